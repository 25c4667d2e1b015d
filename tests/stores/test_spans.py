"""The span store: the identity with full attention, a loop reference, training against inference, bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache, StoreLayer
from sekv.corpus import builtin_english
from sekv.memory import shortest_factored
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy, training_cache
from sekv.prefill import prefill
from sekv.span_index import TokenIndex
from sekv.stores.spans import OffloadedSpanStore

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def everything_zoomed(backbone: Backbone, context: Tensor, mask: Tensor | None = None, **options) -> CompressedCache:
    """A compressed cache whose rows suffice to zoom into every span, although it keeps few of them resident."""
    policy = SeKVPolicy(**{"routing": "mean", "max_rank": 64, "basis_bits": 0, **options})
    state = prefill(backbone, context, mask)
    plan = policy.prepare(state, Budget(share=0.6))
    plan = replace(plan, zoom_rows=torch.full_like(plan.zoom_rows, 10_000))
    layers = [StoreLayer(policy.compress(state, i, plan), state.n_tokens) for i in range(backbone.geometry.num_layers)]
    assert int(plan.segmentation.span_length.max()) > 1
    return CompressedCache(layers, state.n_tokens)


def question_logits(backbone: Backbone, cache: CompressedCache | None, context: Tensor, question: Tensor) -> Tensor:
    if cache is None:
        states = backbone.hidden_states(torch.cat([context, question], dim=1))[:, context.shape[1] :]
    else:
        positions = torch.arange(question.shape[1])[None] + context.shape[1]
        states = backbone.hidden_states(question, position_ids=positions, cache=cache)
    return backbone.logits(states)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("keep_raw", [True, False])
def test_everything_zoomed_at_full_rank_is_full_attention(make_tiny_backbone, family, rope, keep_raw):
    backbone = make_tiny_backbone(family)
    context, question = ids(1, 150), ids(1, 7, seed=1)
    cache = everything_zoomed(backbone, context, rope=rope, keep_raw=keep_raw)
    logits = question_logits(backbone, cache, context, question)
    torch.testing.assert_close(logits, question_logits(backbone, None, context, question), atol=1e-4, rtol=1e-4)
    assert cache.mean_rows == pytest.approx(150)


@torch.no_grad()
def test_head_dim_other_than_hidden_over_heads(make_tiny_backbone):
    backbone = make_tiny_backbone("qwen3", head_dim=24)
    context, question = ids(1, 120), ids(1, 3, seed=1)
    logits = question_logits(backbone, everything_zoomed(backbone, context), context, question)
    torch.testing.assert_close(logits, question_logits(backbone, None, context, question), atol=1e-4, rtol=1e-4)


def loop_attention(
    store: OffloadedSpanStore,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    scaling: float,
    zoomed: Tensor,
    summary_bias: Tensor,
) -> Tensor:
    """One softmax per query over exact rows, summary rows and the raw tokens of zoomed spans; plain loops.

    A summary row is the mean of the summaries of its spans that are not zoomed into, weighted by their tokens.
    """
    segmentation = store.plan.segmentation
    batch, heads, n_queries, _ = query.shape
    group = heads // key.shape[1]
    tail_key = store.exact.key[:, :, store.exact.n_context :]
    tail_value = store.exact.value[:, :, store.exact.n_context :]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            k = h // group
            for q in range(n_queries):
                keys, values, bias = [], [], []
                for index in segmentation.exact_index[b][segmentation.exact_mask[b]].tolist():
                    keys.append(key[b, k, index]), values.append(value[b, k, index]), bias.append(0.0)
                for s, length in enumerate(segmentation.span_length[b].tolist()):
                    start = int(segmentation.span_start[b, s])
                    if length and zoomed[b, k, q, s]:
                        for index in range(start, start + length):
                            keys.append(key[b, k, index]), values.append(value[b, k, index]), bias.append(0.0)
                rows = segmentation.span_row[b].tolist()
                for row in range(int(segmentation.summary_rows[b])):
                    lengths = segmentation.span_length[b].tolist()
                    members = [s for s, n in enumerate(lengths) if n and rows[s] == row and not zoomed[b, k, q, s]]
                    tokens = sum(lengths[s] for s in members)
                    if tokens:
                        keys.append(sum(lengths[s] * store.summary_key[b, k, s] for s in members) / tokens)
                        values.append(sum(lengths[s] * store.summary_value[b, k, s] for s in members) / tokens)
                        bias.append(math.log(tokens) + float(summary_bias[h]))
                for t in range(store.tail_length - n_queries + q + 1):
                    keys.append(tail_key[b, k, t]), values.append(tail_value[b, k, t]), bias.append(0.0)
                logits = torch.stack(keys) @ query[b, h, q] * scaling + torch.tensor(bias)
                out[b, h, q] = logits.softmax(0) @ torch.stack(values)
    return out


@torch.no_grad()
@pytest.mark.parametrize(
    ("routing", "index"), [("mean", "tokens"), ("oracle", "tokens"), ("learned", "tokens"), ("learned", "summary")]
)
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("lengths", [(130,), (130, 97)])
@pytest.mark.parametrize("summary_share", [0.1, 1.0])
def test_equals_the_loop(tiny_backbone, routing, index, n_queries, lengths, summary_share):
    backbone = tiny_backbone
    context = ids(len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    config = SeKVConfig(
        index=index,
        routing_dim=8,
        max_span=16,
        summary_share=summary_share,
        persistent_share=0.5,
        basis_bits=0,
    )
    adapter = SeKVAdapter.create(backbone, config)
    adapter.summary_bias.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(2)))
    policy = SeKVPolicy(routing=routing, adapter=adapter, fill=True, max_rank=16, tail=8)
    state = prefill(backbone, context, mask)
    store = compress(state, policy, 0.5).stores[1]
    assert isinstance(store, OffloadedSpanStore)
    g = torch.Generator().manual_seed(3)
    query = torch.randn(len(lengths), 4, n_queries, 16, generator=g)
    store.append(torch.randn(len(lengths), 2, 3, 16, generator=g), torch.randn(len(lengths), 2, 3, 16, generator=g))
    store.append(
        torch.randn(len(lengths), 2, n_queries, 16, generator=g),
        torch.randn(len(lengths), 2, n_queries, 16, generator=g),
    )
    zoomed = store._choose(query, 0.25, None)
    assert 0 < int(zoomed.sum()) < zoomed.numel()
    key, value = state.key_value(1)
    expected = loop_attention(store, key, value, query, 0.25, zoomed, adapter.summary_bias[1])
    torch.testing.assert_close(store.attend(query, 0.25, None), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_oracle_covers_the_most_mass(tiny_backbone):
    context = ids(1, 300)
    state = prefill(tiny_backbone, context)
    query = torch.randn(1, 4, 4, 16, generator=torch.Generator().manual_seed(0))
    mass = {}
    for routing in ("oracle", "mean"):
        store = compress(state, SeKVPolicy(routing=routing, max_span=16, tail=8), 0.3).stores[0]
        oracle = compress(state, SeKVPolicy(routing="oracle", max_span=16, tail=8), 0.3).stores[0]
        for each in (store, oracle):
            each.append(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))
        mass[routing] = float((oracle._teacher_mass(query, 0.25, None) * store._choose(query, 0.25, None)).sum())
    assert mass["oracle"] >= mass["mean"] > 0


@torch.no_grad()
@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("gates", ["open", "mixed"])
@pytest.mark.parametrize(("index", "summary_share"), [("tokens", 0.1), ("summary", 1.0)])
def test_training_and_inference_agree(tiny_backbone, monkeypatch, rope, gates, index, summary_share):
    """But for what inference keeps in 8 bits."""
    monkeypatch.setattr(TokenIndex, "quantised", lambda self, bits: self)
    backbone = tiny_backbone
    config = SeKVConfig(
        routing_dim=8, max_span=24, max_rank=6, rope=rope, index=index, summary_share=summary_share, basis_bits=0
    )
    adapter = SeKVAdapter.create(backbone, config)
    adapter.bias.add_(1.0)
    if gates == "mixed":  # some components fall below the floor, so fewer spans are cheaper as raw rows
        adapter.gate.outer.bias.copy_(torch.linspace(4.0, -5.0, 6))
    context, question = ids(2, 260), ids(2, 9, seed=1)
    mask = torch.ones(2, 260, dtype=torch.bool)
    mask[1, :70] = False
    state = prefill(backbone, context, mask)
    positions = state.mask.sum(1, keepdim=True) + torch.arange(9)
    outputs = []
    for cache in (compress(state, SeKVPolicy(adapter=adapter), 0.4), training_cache(state, adapter, 0.4)):
        outputs.append(backbone.hidden_states(question, position_ids=positions, cache=cache))
        rows = cache.mean_rows
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    assert rows < 0.4 * 260
    assert all(0 < float(store.trace.expand.mean()) < 1 for store in cache.stores)


@pytest.mark.parametrize("index", ["tokens", "summary"])
@pytest.mark.parametrize("summary_share", [0.1, 1.0])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_trace_masses_add_up_and_gradients_reach_everything(tiny_backbone, index, summary_share, checkpoint):
    backbone = tiny_backbone
    config = SeKVConfig(routing_dim=8, max_span=24, max_rank=6, index=index, summary_share=summary_share)
    adapter = SeKVAdapter.create(backbone, config)
    state = prefill(backbone, ids(2, 200))
    cache = training_cache(state, adapter, 0.4, checkpoint=checkpoint)
    positions = 200 + torch.arange(6)[None].expand(2, 6)
    hidden = backbone.hidden_states(ids(2, 6, seed=1), position_ids=positions, cache=cache)
    for store in cache.stores:
        trace = store.trace
        total = trace.span_mass.sum(-1) + trace.exact_mass.sum(-1) + trace.window_mass
        torch.testing.assert_close(total, torch.ones_like(total))
        assert set(trace.expand.detach().unique().tolist()) <= {0.0, 1.0}
    hidden.square().mean().backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
    assert all(p.grad is None for p in backbone.model.parameters())


@torch.no_grad()
def test_what_layers_share_is_counted_once(tiny_backbone):
    cache = compress(prefill(tiny_backbone, ids(1, 600)), SeKVPolicy(routing="mean"), 0.3)
    first, second = cache.stores
    shared = sum(t.untyped_storage().nbytes() for t in first.plan.tensors())
    assert cache.resident_bytes == first.resident_bytes + second.resident_bytes - shared
    assert shared > 0


@torch.no_grad()
def test_without_zoom_only_summaries_answer(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, zoom=False))
    store = compress(prefill(tiny_backbone, ids(1, 400)), SeKVPolicy(adapter=adapter), 0.3).stores[0]
    store.append(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    store.attend(torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(0)), 0.25, None)
    assert store.meter.moved_bytes == 0
    assert store.meter.mean_rows == float(store.plan.segmentation.persistent_rows)


@torch.no_grad()
def test_host_bytes_never_exceed_raw_rows(tiny_backbone):
    state = prefill(tiny_backbone, ids(1, 1000))
    store = compress(state, SeKVPolicy(routing="mean", max_span=64, max_rank=8, basis_bits=0), 0.3).stores[0]
    lengths = store.plan.segmentation.span_length[0]
    raw = int(lengths.sum()) * 2 * 2 * 16 * 4  # tokens, keys and values, KV heads, dimension, float32
    data = sum(t.numel() * t.element_size() for t in store.reader.bank.tensors() if t.is_floating_point())
    assert data < raw
    is_raw = store.reader.bank.is_raw[0].reshape(2, -1)[0]
    for length, kept in zip(lengths.tolist(), is_raw.tolist(), strict=True):
        assert kept == (8 * (length + 16) >= length * 16)


@torch.no_grad()
@pytest.mark.parametrize("summary_share", [0.1, 1.0])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_that_keep_to_a_choice_attend_to_what_it_chose(tiny_backbone, summary_share, padded):
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :100] = not padded
    state = prefill(tiny_backbone, ids(2, 300), mask)
    lazy, eager = (
        compress(state, SeKVPolicy(routing="mean", max_span=16, summary_share=summary_share, choose_every=n), 0.4)
        .stores[0]
        .fork()
        for n in (3, 1)
    )
    choices, anew = lazy.record_choices(), []
    choose = eager._choose
    eager._choose = lambda *_: choices[-1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        key, value = torch.randn(2, 2, 2, 1, 16, generator=generator)
        query = torch.randn(2, 4, 1, 16, generator=generator)
        for store in (lazy, eager):
            store.append(key, value)
        torch.testing.assert_close(lazy.attend(query, 0.25, None), eager.attend(query, 0.25, None))
        anew.append(torch.equal(choices[-1], choose(query, 0.25, None)))
        assert lazy.meter.rows == eager.meter.rows and lazy.meter.wanted_rows == eager.meter.wanted_rows
    assert len(choices) == 8 and anew[0] and anew[3] and anew[6] and not all(anew)
    lazy.reset()
    lazy.append(key, value)
    lazy.attend(query, 0.25, None)
    assert torch.equal(choices[-1], choose(query, 0.25, None))  # another question does not inherit a choice


@pytest.mark.parametrize("rank", [1, 8, 24, 63])
def test_a_span_is_factored_from_the_length_on_at_which_that_is_smaller(rank):
    shortest = shortest_factored(rank, 64)
    smaller = [length for length in range(1, 64 * 64 + 2) if rank * (length + 64) < length * 64]
    assert shortest == smaller[0]
    assert shortest_factored(64, 64) > 10**9  # a full basis is never smaller


@torch.no_grad()
def test_raw_rows_in_8_bits_are_rows_to_half_a_step_and_a_quarter_of_their_size(tiny_backbone):
    state = prefill(tiny_backbone, ids(1, 300))
    whole, small = (
        compress(state, SeKVPolicy(routing="mean", max_span=20, max_rank=16, basis_bits=bits), 0.3).stores[0]
        for bits in (0, 8)
    )
    spans = np.arange(whole.reader.bank.n_entries)
    key, value, moved = whole.reader.bank.fetch(spans, torch.device("cpu"))
    key_8, value_8, moved_8 = small.reader.bank.fetch(spans, torch.device("cpu"))
    for exact, rounded in ((key, key_8), (value, value_8)):
        step = exact.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((exact - rounded).abs() <= 0.501 * step).all()) and not torch.equal(exact, rounded)
    assert moved_8 == moved // 4 + 2 * len(key) * 4  # and a step for each row


@torch.no_grad()
@pytest.mark.parametrize("summary_share", [0.1, 1.0])
def test_moved_bytes_are_the_bytes_of_the_zoomed_spans(tiny_backbone, summary_share):
    state = prefill(tiny_backbone, ids(1, 400))
    policy = SeKVPolicy(routing="mean", max_span=20, max_rank=16, basis_bits=0, summary_share=summary_share)
    store = compress(state, policy, 0.3).stores[0]
    zero = torch.zeros(1, 2, 1, 16)
    store.append(zero, zero)
    query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    zoomed = store._choose(query, 0.25, None)
    tokens = int((zoomed * store.plan.segmentation.span_length[:, None, None]).sum())
    store.attend(query, 0.25, None)
    assert store.meter.moved_bytes == tokens * 2 * 16 * 4 > 0  # rank 16 never pays on 20 tokens: raw keys and values
    cut = store.plan.segmentation
    left = sum(len({int(cut.span_row[0, i]) for i in (~zoomed[0, k, 0]).nonzero()}) for k in range(2))
    rows = int(cut.exact_mask.sum()) + (tokens + left) / 2
    assert store.meter.mean_rows == pytest.approx(rows)
    assert store.meter.mean_rows <= 120


@torch.no_grad()
def test_rows_of_a_span_that_cannot_be_factored_stay_raw(tiny_backbone):
    state = prefill(tiny_backbone, ids(1, 300))
    state.keys[0][0, 0, 100, 0] = torch.inf
    store = compress(state, SeKVPolicy(routing="mean", max_span=32, max_rank=2, keep_raw=False), 0.4).stores[0]
    raw = store.reader.bank.is_raw[0].reshape(2, -1)
    start, length = store.plan.segmentation.span_start[0], store.plan.segmentation.span_length[0]
    holds = (start <= 100) & (start + length > 100)
    assert raw[0].tolist() == holds.tolist() and not bool(raw[1].any())


@torch.no_grad()
def test_per_head_masks_zoom_no_more_than_the_union(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16, summary_share=1.0))
    state = prefill(tiny_backbone, ids(1, 300))
    query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    shared, single = (
        compress(state, SeKVPolicy(adapter=adapter, share_group=share), 0.4).stores[0] for share in (True, False)
    )
    for store in (shared, single):
        store.append(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    per_head = single._choose(query, 0.25, None)
    assert per_head.shape[1] == 4 and shared._choose(query, 0.25, None).shape[1] == 2
    out = single.attend(query, 0.25, None)
    assert bool(out.isfinite().all()) and single.meter.mean_rows <= 120


@torch.no_grad()
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_the_identity_holds_on_the_real_model(smollm2, rope):
    ids = smollm2.tokenizer(builtin_english()[0], return_tensors="pt").input_ids
    context, question = ids[:, :500], ids[:, 500:510]
    full = question_logits(smollm2, None, context, question)
    for keep_raw in (True, False):
        cache = everything_zoomed(smollm2, context, rope=rope, keep_raw=keep_raw)
        logits = question_logits(smollm2, cache, context, question)
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=1e-4)
        assert cache.mean_rows == pytest.approx(500)


@torch.no_grad()
@pytest.mark.parametrize("routing", ["mean", "learned"])
@pytest.mark.parametrize(("share_group", "summary_share"), [(True, 0.1), (True, 1.0), (False, 1.0)])
def test_rows_kept_from_earlier_steps_change_no_answer(tiny_backbone, routing, share_group, summary_share):
    config = SeKVConfig(routing_dim=8, max_span=24, max_rank=4, share_group=share_group, summary_share=summary_share)
    policy = SeKVPolicy(adapter=SeKVAdapter.create(tiny_backbone, config), routing=routing, fill=True, tail=8)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :80] = False
    memory = compress(prefill(tiny_backbone, ids(2, 300), mask), policy, 0.4).stores[0]
    g = torch.Generator().manual_seed(0)
    store, query, before = memory.fork(), torch.randn(2, 4, 1, 16, generator=g), memory.resident_bytes
    for _ in range(20):
        query = 0.9 * query + 0.3 * torch.randn(2, 4, 1, 16, generator=g)
        new = torch.randn(2, 2, 2, 1, 16, generator=g)
        store.append(*new)
        fresh = memory.fork()
        fresh.append(store.exact.key[:, :, store.exact.n_context :], store.exact.value[:, :, store.exact.n_context :])
        torch.testing.assert_close(store.attend(query, 0.25, None), fresh.attend(query, 0.25, None))
        assert fresh.meter.hit_rate == 0
    assert 0 < store.meter.hit_rate < 1
    assert store.meter.moved_bytes > 0
    grown = store.resident_bytes - before
    assert grown <= 2 * 2 * 2 * 2 * 64 * 16 * 4  # the room for the tail and nothing else
    assert memory.meter.queries == 0
