"""Every policy at every budget, context length, padding and dtype; one line in `specs.py` adds a policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache, StoreLayer
from sekv.policies.base import Policy, compress
from sekv.policies.registry import build_policy
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill, prefill
from sekv.stores.evicted import EvictedStore
from tests.policies.specs import EVICTING, SMALLEST_SHARE, plain_prefill, randn

BUDGETS = (1.0, 0.5, 0.1)
CASES = [(spec, share) for spec, smallest in SMALLEST_SHARE.items() for share in BUDGETS if share >= smallest]
N = 130
LONG = 1000


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def read(backbone: Backbone, context: Tensor, policy: Policy, mask: Tensor | None = None) -> Prefill:
    return prefill(backbone, context, mask, window=policy.window, observers=policy.observers)


@torch.no_grad()
def ask(backbone: Backbone, cache: CompressedCache, lengths: Tensor, question: Tensor) -> Tensor:
    """Logits of the question's tokens [B, q, V] after contexts of `lengths` tokens."""
    positions = lengths[:, None] + torch.arange(question.shape[1])
    return backbone.logits(backbone.hidden_states(question, position_ids=positions, cache=cache))


@torch.no_grad()
def plain_logits(backbone: Backbone, context: Tensor, question: Tensor) -> Tensor:
    states = backbone.hidden_states(torch.cat([context, question], dim=1))
    return backbone.logits(states)[:, context.shape[1] :]


@pytest.mark.parametrize(("spec", "share"), CASES)
@pytest.mark.parametrize("n", [1, 2, 3, N, LONG])
def test_every_context_length_answers_within_budget(tiny_backbone, spec, share, n):
    policy = build_policy(spec)
    context, question = ids(1, n), ids(1, 5, seed=1)
    cache = compress(read(tiny_backbone, context, policy), policy, share)
    logits = ask(tiny_backbone, cache, torch.tensor([n]), question)
    assert logits.isfinite().all()
    whole = spec == "full" or share == 1.0 or n <= policy.sinks + policy.tail
    assert cache.mean_rows == pytest.approx(n) if whole else cache.mean_rows <= Budget(share=share).rows_for(n) + 1e-6
    if whole:
        torch.testing.assert_close(logits, plain_logits(tiny_backbone, context, question), atol=1e-4, rtol=1e-4)
    else:
        assert not torch.allclose(logits, plain_logits(tiny_backbone, context, question), atol=1e-3)


@pytest.mark.parametrize("rows", [2, 3, 20, 129])
@pytest.mark.parametrize("spec", EVICTING)
def test_budgets_in_rows_are_met_exactly(tiny_backbone, spec, rows):
    policy = build_policy(spec)
    cache = compress(read(tiny_backbone, ids(1, N), policy), policy, rows)
    assert all(isinstance(store, EvictedStore) for store in cache.stores)
    totals = [int(store.rows_per_head.sum()) for store in cache.stores]
    assert sum(totals) == len(totals) * 2 * rows
    assert min(int(store.rows_per_head.min()) for store in cache.stores) >= 1
    if policy.layers == "uniform":
        assert set(totals) == {2 * rows}


@pytest.mark.parametrize("spec", EVICTING)
@pytest.mark.parametrize("n", [1, 2, 3, N])
def test_a_store_that_keeps_everything_equals_the_plain_model(tiny_backbone, spec, n):
    policy = build_policy(spec)
    context, question = ids(1, n), ids(1, 5, seed=1)
    state = read(tiny_backbone, context, policy)
    plan = policy.prepare(state, Budget(share=1.0))
    layers = [StoreLayer(policy.compress(state, i, plan), n) for i in range(2)]
    logits = ask(tiny_backbone, CompressedCache(layers, n), torch.tensor([n]), question)
    torch.testing.assert_close(logits, plain_logits(tiny_backbone, context, question), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("spec", "share"), CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(tiny_backbone, spec, share, side):
    lengths = [N, 90, 10]
    policy = build_policy(spec)
    context, mask = torch.zeros(3, N, dtype=torch.long), torch.zeros(3, N, dtype=torch.long)
    rows = [ids(1, n, seed=n) for n in lengths]
    for b, row in enumerate(rows):
        place = slice(N - lengths[b], N) if side == "left" else slice(0, lengths[b])
        context[b, place], mask[b, place] = row[0], 1
    question = ids(3, 4, seed=9)
    state = read(tiny_backbone, context, policy, mask)
    logits = ask(tiny_backbone, compress(state, policy, share), torch.tensor(lengths), question)
    for b, n in enumerate(lengths):
        alone = read(tiny_backbone, rows[b], policy)
        expected = ask(tiny_backbone, compress(alone, policy, share), torch.tensor([n]), question[b : b + 1])
        torch.testing.assert_close(logits[b : b + 1], expected, atol=1e-4, rtol=1e-4)
        if isinstance(policy, ScorerPolicy):
            kept = policy.keep(state, 1, policy.rows(state, Budget(share=share)))
            single = policy.keep(alone, 1, policy.rows(alone, Budget(share=share)))
            assert torch.equal(kept[b, :, N - n :], single[0])
            assert not kept[b, :, : N - n].any()


@pytest.mark.parametrize(("spec", "share"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_near_zero_queries_give_finite_logits(make_tiny_backbone, spec, share, dtype):
    backbone = make_tiny_backbone()
    for layer in backbone.model.model.layers:
        layer.self_attn.q_proj.weight.mul_(1e-6)
        layer.self_attn.k_proj.weight.mul_(1e-3)
    backbone.model.to(dtype)
    policy = build_policy(spec)
    cache = compress(read(backbone, ids(1, N), policy), policy, share)
    logits = ask(backbone, cache, torch.tensor([N]), ids(1, 3, seed=1))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize(("spec", "share"), CASES)
def test_two_questions_on_one_memory(tiny_backbone, spec, share):
    policy = build_policy(spec)
    lengths = torch.tensor([N])
    cache = compress(read(tiny_backbone, ids(1, N), policy), policy, share)
    before = [t.clone() for store in cache.stores for t in store.resident_tensors() if t is not None]
    first, second = ids(1, 5, seed=1), ids(1, 7, seed=2)
    answers = [ask(tiny_backbone, cache.fork(), lengths, q) for q in (first, second, first)]
    after = [t for store in cache.stores for t in store.resident_tensors() if t is not None]
    assert all(map(torch.equal, before, after))
    assert torch.equal(answers[0], answers[2])
    fresh = compress(read(tiny_backbone, ids(1, N), policy), policy, share)
    assert torch.equal(answers[1], ask(tiny_backbone, fresh, lengths, second))


@pytest.mark.parametrize(("spec", "share"), CASES)
def test_generate(tiny_backbone, spec, share):
    policy = build_policy(spec)
    context, question = ids(2, N), ids(2, 4, seed=1)
    mask = torch.ones_like(context)
    mask[1, :40] = 0
    cache = compress(read(tiny_backbone, context, policy, mask), policy, share)
    prompt = torch.cat([context, question], dim=1)
    mask = torch.cat([mask, torch.ones_like(question)], dim=1)

    def generate(**options: object) -> Tensor:
        torch.manual_seed(0)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
        return tiny_backbone.model.generate(prompt, attention_mask=mask, **options)

    greedy = generate(cache=cache.fork())
    assert greedy.shape == (2, N + 4 + 8)
    assert generate(cache=cache.fork(), do_sample=True, temperature=2.0, top_k=0).shape == greedy.shape
    if share == 1.0 or spec == "full":
        assert torch.equal(greedy, generate())
    else:
        # Every new token is what a single pass over question and answer predicts from the same memory.
        logits = ask(tiny_backbone, cache.fork(), torch.tensor([N, N - 40]), greedy[:, N:-1])
        assert torch.equal(logits[:, 3:].argmax(-1), greedy[:, N + 4 :])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spec", EVICTING)
def test_bytes_follow_budget_and_kv_heads(make_tiny_backbone, spec, kv_heads):
    backbone = make_tiny_backbone(num_attention_heads=4, num_key_value_heads=kv_heads)
    policy = build_policy(spec)
    state = read(backbone, ids(1, 1000), policy)
    row_bytes = 2 * kv_heads * 2 * 16 * 4  # layers, KV heads, key and value, dim, float32
    assert compress(state, policy, 1.0).resident_bytes == 1000 * row_bytes
    for share in (0.5, 0.1):
        stores = compress(state, policy, share).stores
        ragged = any(int(s.rows_per_head.max()) != int(s.rows_per_head.min()) for s in stores)
        waste = 32 if ragged else 0  # less than a block per head
        found = sum(store.resident_bytes for store in stores)
        assert 1000 * share * row_bytes <= found <= 1.02 * (1000 * share + waste) * row_bytes


@pytest.mark.parametrize("spec", ["nestedkv", "keydiff[allocation=headwise]", "hubkv:nestedkv"])
def test_headwise_stores_are_ragged_and_really_smaller(spec):
    key = randn(1, 4, 1000, 16)
    key[:, 0] = 1.0 + 0.01 * key[:, 0]  # a head whose tokens are all alike but one
    key[:, 0, 500] = -1.0
    policy, state = build_policy(spec), plain_prefill(key)
    store = policy.compress(state, 0, policy.prepare(state, Budget(rows=200)))
    counts = store.rows_per_head.flatten().tolist()
    assert sum(counts) == 4 * 200
    assert 40 <= counts[0] < 100 < min(counts[1:])
    row_bytes = 2 * 16 * 4
    assert store.resident_bytes < 0.9 * 4 * max(counts) * row_bytes  # what padding to the longest head would take
