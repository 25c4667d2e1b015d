"""Folding: tokens that leave the tail become spans that can be zoomed into, within the rows there were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache, StoreLayer
from sekv.errors import PolicyError
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import prefill
from sekv.span_index import TokenIndex
from tests.policies.specs import left_padding, randn


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def zooming_cache(backbone: Backbone, context: Tensor, mask: Tensor | None = None, **options) -> CompressedCache:
    """A cache that may zoom into everything and keeps 40 tail tokens at most."""
    policy = SeKVPolicy(**{"routing": "mean", "max_rank": 64, "basis_bits": 0, "tail": 8, **options})
    state = prefill(backbone, context, mask)
    plan = policy.prepare(state, Budget(share=0.6))
    plan = replace(plan, zoom_rows=torch.full_like(plan.zoom_rows, 10_000))
    layers = [StoreLayer(policy.compress(state, i, plan), state.n_tokens) for i in range(backbone.geometry.num_layers)]
    for layer in layers:
        layer.store.max_tail = 40
    return CompressedCache(layers, state.n_tokens)


def decode(backbone: Backbone, cache: CompressedCache, tokens: Tensor, sizes: list[int], start: Tensor) -> list[Tensor]:
    """Logits of chunks of tokens, read one after another at their true positions."""
    parts, at = [], 0
    for size in sizes:
        positions = start[:, None] + torch.arange(at, at + size)
        states = backbone.hidden_states(tokens[:, at : at + size], position_ids=positions, cache=cache)
        parts.append(backbone.logits(states))
        at += size
    return parts


@torch.no_grad()
@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("keep_raw", [True, False])
@pytest.mark.parametrize("summary_share", [0.1, 1.0])
def test_everything_zoomed_is_still_full_attention(tiny_backbone, rope, keep_raw, summary_share):
    context, later = ids(1, 120), ids(1, 140, seed=1)
    cache = zooming_cache(tiny_backbone, context, rope=rope, keep_raw=keep_raw, summary_share=summary_share)
    sizes = [30, *[1] * 100, 10]  # a question, an answer, another question
    logits = torch.cat(decode(tiny_backbone, cache, later, sizes, torch.tensor([120])), dim=1)
    want = tiny_backbone.logits(tiny_backbone.hidden_states(torch.cat([context, later], dim=1))[:, 120:])
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    for store in cache.stores:
        assert store.forgotten >= 96 and store.tail_length < 40 and cache.get_seq_length() == 260
        assert int(store.plan.segmentation.span_length.max()) == store.plan.tokens.padded_index.shape[2]
    assert cache.stores[0].plan is cache.stores[1].plan  # layers share the tables


@torch.no_grad()
def test_a_padded_batch_equals_single_rows(tiny_backbone):
    lengths = [120, 90]
    contexts, laters = ([ids(1, n, seed=i) for i, n in enumerate(x)] for x in (lengths, (115, 130)))

    def padded(rows: list[Tensor]) -> Tensor:
        n = max(row.shape[1] for row in rows)
        return torch.cat([torch.nn.functional.pad(row, (n - row.shape[1], 0)) for row in rows])

    mask = left_padding(lengths)
    cache = zooming_cache(tiny_backbone, padded(contexts), mask)
    later, real = padded(laters), left_padding([115, 130])
    steps, at = [40, *[1] * 90], 0  # questions of 25 and 40 tokens, and answers
    start = torch.tensor(lengths) - torch.tensor([130 - 115, 0])
    for size in steps:
        at += size
        positions = (start[:, None] + torch.arange(at - size, at)).clamp_min(0)
        states = tiny_backbone.model.model(
            input_ids=later[:, at - size : at],
            position_ids=positions,
            attention_mask=torch.cat([mask, real[:, :at]], dim=1).long(),
            cache=cache,
        ).last_hidden_state
    for i in range(2):
        whole = torch.cat([contexts[i], laters[i]], dim=1)
        want = tiny_backbone.hidden_states(whole)[0, -1]
        torch.testing.assert_close(states[i, -1], want, atol=1e-4, rtol=1e-4)
    assert all(store.forgotten >= 96 for store in cache.stores)


@torch.no_grad()
@pytest.mark.parametrize("index", ["tokens", "summary", "mean", "oracle"])
def test_rows_stay_within_the_bound(tiny_backbone, index):
    if index in ("mean", "oracle"):
        options = {"routing": index}
    else:
        config = SeKVConfig(routing_dim=8, max_span=16, index=index)
        options = {"adapter": SeKVAdapter.create(tiny_backbone, config), "fill": True}
    policy = SeKVPolicy(tail=8, max_rows=200, **options)
    memory = compress(prefill(tiny_backbone, ids(1, 200)), policy, 0.5)
    before = [t.clone() for s in memory.stores for t in (*s.resident_tensors(), *s.host_tensors()) if t is not None]
    cache = memory.fork()
    later, folded = ids(1, 170, seed=1), 0
    for t in range(170):
        before_step = [(store.meter.rows, store.tail_length) for store in cache.stores]
        tiny_backbone.hidden_states(later[:, t : t + 1], position_ids=torch.tensor([[200 + t]]), cache=cache)
        for store, (rows, tail) in zip(cache.stores, before_step, strict=True):
            assert (store.meter.rows - rows) / 2 <= 100 and tail + 1 <= 100  # two KV heads
    for store in cache.stores:
        assert store.forgotten == 96 and store.tail_length == 74
        query = randn(1, 4, 1, 16, seed=3)
        n_context = memory.stores[0].plan.segmentation.span_length.shape[1]
        folded += int(store._choose(query, 0.25, None)[..., n_context:].sum())
        # Few banks, however many blocks were folded; the context's own is shared.
        assert len(store.reader.bank.banks) <= 5
    assert folded > 0  # what was folded is zoomed into
    assert cache.stores[0].reader.bank.banks[0] is memory.stores[0].reader.bank
    after = [t for s in memory.stores for t in (*s.resident_tensors(), *s.host_tensors()) if t is not None]
    assert all(map(torch.equal, before, after))
    assert cache.get_seq_length() == 370 and memory.get_seq_length() == 200


@torch.no_grad()
def test_what_was_folded_cannot_be_taken_back(tiny_backbone):
    cache = compress(prefill(tiny_backbone, ids(1, 150)), SeKVPolicy(routing="mean", tail=8, max_rows=130), 0.6)
    fork = cache.fork()
    tiny_backbone.hidden_states(ids(1, 60, seed=1), position_ids=150 + torch.arange(60)[None], cache=fork)
    left = fork.stores[0].tail_length
    assert 0 < left < 60
    with pytest.raises(PolicyError, match=f"cannot take back 60 tokens: the tail holds {left}"):
        fork.stores[0].crop(60)
    fork.stores[0].crop(left)
    with pytest.raises(PolicyError, match="fork it before decoding"):
        fork.fork()
    with pytest.raises(PolicyError, match="fork it before decoding"):
        fork.reset()
    cache.fork()
    with pytest.raises(PolicyError, match="needs share_group=true"):
        SeKVPolicy(routing="mean", max_rows=200, share_group=False, summary_share=1.0)


@torch.no_grad()
@pytest.mark.parametrize("bits", [None, 8])
def test_a_chain_of_banks_gives_the_rows_of_one(tiny_backbone, bits):
    """Rows fetched from a chain equal those of the block's own banks, in the order that was asked for."""
    cache = zooming_cache(tiny_backbone, ids(2, 120), max_rank=4, keep_raw=True, basis_bits=bits or 0)
    store = cache.stores[0]
    start = store.reader.bank
    blocks = []
    for seed in range(7):
        store.append(randn(2, 2, 40, 16, seed=seed), randn(2, 2, 40, 16, seed=seed + 50))
        before, bank = store.plan, store._bank
        store._bank = lambda memory, length: blocks.append(bank(memory, length)) or blocks[-1]  # noqa: B023
        store.settle()
        store._bank = bank
        assert store.plan is not before
    own = [start, *blocks]
    sizes = [b.n_spans for b in own]
    total, first = sum(sizes), np.cumsum([0, *sizes])
    rng = np.random.default_rng(0)
    real = np.flatnonzero((store.plan.segmentation.span_length > 0).repeat_interleave(2, dim=0).numpy())
    spans = np.sort(rng.permutation(real)[:20])
    key, value, moved = store.reader.bank.fetch(spans, torch.device("cpu"))
    want_key, want_value = [], []
    for number in spans:
        group, span = divmod(int(number), total)
        i = int(np.searchsorted(first, span, side="right")) - 1
        k, v, _ = own[i].fetch(np.array([group * sizes[i] + span - first[i]]), torch.device("cpu"))
        want_key.append(k), want_value.append(v)
    torch.testing.assert_close(key, torch.cat(want_key), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, torch.cat(want_value), atol=1e-5, rtol=1e-5)
    assert moved > 0


@pytest.mark.parametrize("bits", [4, 8])
def test_an_index_in_two_steps_knows_what_one_would(bits):
    first, second, third = (TokenIndex(randn(1, 2, 4, n, seed=n) * n).quantised(bits) for n in (5, 6, 30))
    both = first.extended(second).extended(third)
    query = randn(1, 2, 3, 4)
    want = torch.cat([query @ (x._numbers() * x.step) for x in (first, second, third)], dim=-1)
    # One unit of the larger step at most, summed over the directions.
    slack = (query.abs() * third.step.mT).sum(-1, keepdim=True)
    assert ((both._logits(query) - want).abs() <= slack + 1e-5).all()
    assert both.keys is first.keys and first.later is None
