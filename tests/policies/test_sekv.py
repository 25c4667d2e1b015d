"""SeKV as a policy: what it refuses, padding, long decoding, host and compute tiers."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.errors import AdapterError, BudgetError, PolicyError
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy, training_cache
from sekv.prefill import prefill


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def test_learned_routing_needs_an_adapter():
    with pytest.raises(PolicyError, match=r"give --adapter DIR, or use sekv\[routing=mean\]"):
        SeKVPolicy()


def test_unknown_routing_is_named():
    with pytest.raises(PolicyError, match="routing 'best' is unknown; use one of learned, mean, oracle"):
        SeKVPolicy(routing="best")


def test_rank_above_the_adapters_is_refused(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_rank=4))
    with pytest.raises(PolicyError, match="max_rank 9 exceeds the adapter's 4"):
        SeKVPolicy(adapter=adapter, max_rank=9)


def test_adapter_of_fewer_layers_is_refused(tiny_backbone, make_tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))
    state = prefill(make_tiny_backbone("llama", num_hidden_layers=3), ids(1, 300))
    with pytest.raises(AdapterError, match="no router for layer 2"):
        compress(state, SeKVPolicy(adapter=adapter), 0.5)


@torch.no_grad()
@pytest.mark.parametrize(("summary_share", "least"), [(0.1, 47), (1.0, 79)])
def test_too_small_a_budget_says_the_smallest_and_that_one_zooms(tiny_backbone, summary_share, least):
    state, policy = prefill(tiny_backbone, ids(1, 500)), SeKVPolicy(routing="mean", summary_share=summary_share)
    with pytest.raises(BudgetError, match=f"needs at least {least} rows") as error:
        compress(state, policy, least - 1)
    assert "sinks, tail" in str(error.value)
    store = compress(state, policy, least).stores[0]
    store.append(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    store.attend(torch.ones(1, 4, 1, 16), 0.25, None)
    assert store.meter.wanted_rows > 0
    assert store.meter.mean_rows <= least


def test_per_head_masks_need_rows_of_their_own():
    with pytest.raises(PolicyError, match="share_group=False needs summary_share=1"):
        SeKVPolicy(routing="mean", share_group=False)
    assert SeKVPolicy(routing="mean", share_group=False, summary_share=1.0).share_group is False


def test_many_sinks_do_not_lift_the_budget(tiny_backbone):
    state = prefill(tiny_backbone, ids(1, 300))
    with pytest.raises(BudgetError, match="too small"):
        compress(state, SeKVPolicy(routing="mean", sinks=1000), 0.5)


def test_a_rotation_in_pairs_is_refused_before_rope_and_fine_after(tokenizer):
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259}
    config = CohereConfig(hidden_size=64, intermediate_size=96, logit_scale=1.0, pad_token_id=0, **settings)
    backbone = Backbone.from_model(CohereForCausalLM(config).eval(), tokenizer, "tiny-cohere")
    state = prefill(backbone, ids(1, 300))
    with pytest.raises(PolicyError, match=r"half-split layout.*use sekv\[rope=post\]"):
        compress(state, SeKVPolicy(routing="mean"), 0.4)
    assert len(compress(state, SeKVPolicy(routing="mean", rope="post"), 0.4).stores) == 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_half_split_layout_is_recognised(make_tiny_backbone, family):
    assert make_tiny_backbone(family).rotates_halves


def test_surprisal_is_needed(tiny_backbone):
    state = prefill(tiny_backbone, ids(1, 200), surprisal=False)
    with pytest.raises(PolicyError, match="needs surprisal"):
        compress(state, SeKVPolicy(routing="mean"), 0.5)


def test_training_on_a_context_kept_whole_is_refused(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))
    with pytest.raises(BudgetError, match="nothing to learn"):
        training_cache(prefill(tiny_backbone, ids(1, 30)), adapter, 0.5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("routing", "index", "summary_share"),
    [("mean", "tokens", 0.1), ("oracle", "tokens", 1.0), ("learned", "tokens", 0.1), ("learned", "summary", 1.0)],
)
def test_padding_changes_nothing(tiny_backbone, side, routing, index, summary_share):
    config = SeKVConfig(routing_dim=8, max_span=16, index=index, summary_share=summary_share, basis_bits=0)
    adapter = SeKVAdapter.create(tiny_backbone, config)
    adapter.bias.add_(2.0)
    policy = SeKVPolicy(adapter=adapter, routing=routing, tail=8)
    long, short, question = ids(1, 200), ids(1, 141, seed=1), ids(1, 4, seed=2)
    pad = torch.zeros(1, 59, dtype=torch.long)
    parts = [pad, short] if side == "left" else [short, pad]
    batch = torch.cat([long, torch.cat(parts, dim=1)])
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, slice(0, 59) if side == "left" else slice(141, 200)] = 0

    def answer(context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        cache = compress(prefill(tiny_backbone, context, mask), policy, 0.4)
        n = context.shape[0]
        start = torch.full((n, 1), context.shape[1]) if mask is None else mask.sum(1, keepdim=True)
        hidden = tiny_backbone.hidden_states(question.expand(n, 4), position_ids=start + torch.arange(4), cache=cache)
        return tiny_backbone.logits(hidden)

    both = answer(batch, mask)
    torch.testing.assert_close(both[:1], answer(long, None), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both[1:], answer(short, None), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_chunked_prefill_and_host_offload_give_the_same_tokens(tiny_backbone):
    context, question = ids(1, 300), ids(1, 5, seed=1)
    prompt = torch.cat([context, question], dim=1)
    outputs = []
    for options in ({}, {"chunk_size": 37}, {"offload": True}, {"chunk_size": 64, "offload": True}):
        cache = compress(prefill(tiny_backbone, context, **options), SeKVPolicy(routing="mean", tail=8), 0.4)
        outputs.append(
            tiny_backbone.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                cache=cache,
                max_new_tokens=50,
                min_new_tokens=50,
                do_sample=False,
            )
        )
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert outputs[0].shape[1] == 355


@torch.no_grad()
def test_decoded_tokens_see_each_other(tiny_backbone):
    """The tail answers: with another first question token, the second one's logits change."""
    context = ids(1, 300)
    cache = compress(prefill(tiny_backbone, context), SeKVPolicy(routing="mean", tail=8), 0.4)
    results = []
    for first in (50, 60):
        twin = cache.fork()
        for step, token in enumerate((first, 70)):
            hidden = tiny_backbone.hidden_states(
                torch.tensor([[token]]), position_ids=torch.tensor([[300 + step]]), cache=twin
            )
        results.append(hidden)
        assert twin.get_seq_length() == 302
    assert not torch.allclose(results[0], results[1], atol=1e-3)


@torch.no_grad()
def test_stored_bytes_follow_kv_heads(make_tiny_backbone):
    sizes = {}
    for kv_heads in (1, 2, 4):
        backbone = make_tiny_backbone("llama", num_key_value_heads=kv_heads)
        cache = compress(prefill(backbone, ids(1, 600)), SeKVPolicy(routing="mean", segmentation="fixed"), 0.3)
        store = cache.stores[0]
        sizes[kv_heads] = sum(
            t.numel() for t in [*store.exact.tensors(), store.summary_key, store.summary_value] if t is not None
        )
    assert sizes[2] == 2 * sizes[1] and sizes[4] == 4 * sizes[1]


@torch.no_grad()
@pytest.mark.parametrize("routing", ["learned", "mean", "oracle"])
def test_layers_share_the_rows_for_zooming(tiny_backbone, routing):
    """A layer with a larger factor reads more; on average queries read no more than the budget."""
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))
    adapter.row_factor.copy_(torch.tensor([1.6, 0.4]))
    state = prefill(tiny_backbone, ids(2, 500), torch.tensor([[0] * 30 + [1] * 470, [1] * 500]), surprisal=True)
    cache = compress(state, SeKVPolicy(adapter=adapter, routing=routing, fill=True), 0.3)
    assert cache.stores[0].reader.slots.capacity > 2 * cache.stores[1].reader.slots.capacity
    for store in cache.stores:
        store.append(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16))
        store.attend(torch.ones(2, 4, 1, 16), 0.25, None)
    first, second = (store.meter.mean_rows for store in cache.stores)
    assert first > 1.5 * second
    assert 0.9 * 0.3 * 485 < (first + second) / 2 <= 0.3 * 485 + 1


@torch.no_grad()
def test_a_bound_on_every_layers_rows_gives_all_layers_the_same(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))
    adapter.row_factor.copy_(torch.tensor([1.6, 0.4]))
    state = prefill(tiny_backbone, ids(1, 500), surprisal=True)
    cache = compress(state, SeKVPolicy(adapter=adapter, max_rows=200), 0.3)
    first, second = (store.reader.slots.capacity for store in cache.stores)
    assert first == second


@torch.no_grad()
def test_equal_chunks_with_equal_weights_need_no_surprisal(tiny_backbone):
    plain = {"routing": "mean", "segmentation": "fixed", "summary_weights": "uniform"}
    policy = SeKVPolicy(**plain)
    assert not policy.needs_surprisal
    states = [prefill(tiny_backbone, ids(2, 300), surprisal=s) for s in (False, True)]
    one, other = (compress(state, policy, 0.3).stores[1] for state in states)
    assert torch.equal(one.summary_key, other.summary_key)
    assert torch.equal(one.plan.segmentation.span_start, other.plan.segmentation.span_start)
    for changed in ({"segmentation": "surprisal"}, {"summary_weights": "surprisal"}):
        policy = SeKVPolicy(**(plain | changed))
        assert policy.needs_surprisal
        with pytest.raises(PolicyError, match="needs surprisal"):
            compress(states[0], policy, 0.3)
