"""The index of tokens: shares of attention against a plain loop and the teacher's own, and whole numbers for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sekv.adapter import LayerRouter, SeKVAdapter, SeKVConfig
from sekv.attention import RowSet, log_sum
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy, training_cache
from sekv.prefill import prefill
from sekv.span_index import TokenIndex
from tests.policies.specs import left_padding, randn

B, H, K, Q, D, R, T = 2, 4, 2, 3, 8, 4, 12
LENGTH = torch.tensor([[3, 4, 2, 1, 2], [2, 3, 0, 0, 0]])
SPAN = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 4], [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
MASK = torch.arange(T) < LENGTH.sum(1, keepdim=True)


def make_router(rank: int = R, **changes: Tensor) -> LayerRouter:
    router = LayerRouter(
        projection=randn(H, rank, D),
        key_projection=randn(K, rank, D, seed=1),
        threshold=torch.full((H,), 0.5),
        scale=torch.linspace(0.5, 1.5, H),
        length_coefficient=None,
        offset=torch.linspace(-1.0, 1.0, H),
        bias=torch.zeros(H),
        summary_bias=torch.zeros(H),
    )
    return router._replace(**changes)


def test_shares_follow_the_formula():
    router, query, key, rest = make_router(), randn(B, H, Q, D, seed=2), randn(B, K, T, D, seed=3), randn(B, H, Q)
    found = TokenIndex.of(router, key).log_shares(router, query, SPAN, LENGTH, rest, 0.4, MASK)
    assert router.key_projection is not None and router.offset is not None
    for b in range(B):
        for h in range(H):
            for q in range(Q):
                asked = router.projection[h] @ query[b, h, q]
                sums = {}
                for t in range(int(LENGTH[b].sum())):
                    logit = 0.4 * asked @ (router.key_projection[h // 2] @ key[b, h // 2, t])
                    sums[int(SPAN[b, t])] = sums.get(int(SPAN[b, t]), 0.0) + math.exp(logit)
                estimate = {s: float(router.scale[h] * math.log(x) + router.offset[h]) for s, x in sums.items()}
                total = math.log(sum(map(math.exp, estimate.values())) + math.exp(rest[b, h, q]))
                for s in range(LENGTH.shape[1]):
                    if s in estimate:
                        assert float(found[b, h, q, s]) == pytest.approx(estimate[s] - total, abs=1e-4)
                    else:
                        assert float(found[b, h, q, s]) < -1000  # no span, no share


def test_with_whole_keys_the_shares_are_the_teachers():
    whole = torch.eye(D)
    router = make_router(
        projection=whole.expand(H, D, D),
        key_projection=whole.expand(K, D, D),
        scale=torch.ones(H),
        offset=torch.zeros(H),
    )
    query, key, other = randn(1, H, Q, D, seed=2), randn(1, K, T, D, seed=3), randn(1, K, 6, D, seed=4)
    rest = log_sum(query, [RowSet(other, other)], 0.4)
    found = TokenIndex.of(router, key).log_shares(router, query, SPAN[:1], LENGTH[:1], rest, 0.4)
    everything = torch.cat([key, other], dim=2).repeat_interleave(2, dim=1)
    mass = (query @ everything.mT * 0.4).softmax(-1)
    for s in range(LENGTH.shape[1]):
        torch.testing.assert_close(found[..., s].exp(), mass[..., :T][..., SPAN[0] == s].sum(-1))


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_whole_numbers_are_close(bits, rank):
    """Every entry to half a step, two of them in a byte with four bits, and logits are those of the entries."""
    router, query, key = make_router(rank), randn(B, H, Q, D, seed=2), randn(B, K, T, D, seed=3)
    rest = torch.zeros(B, H, Q)
    index = TokenIndex.of(router, key)
    small = index.quantised(bits)
    assert small.keys.nbytes == -(-rank * bits // 8) * B * K * T
    assert small.bits == bits
    assert small.step is not None
    kept = small._numbers() * small.step
    assert bool(((kept - index.keys).abs() <= small.step / 2 + 1e-6).all())
    assert bool((kept.abs().amax(-1) > 0).all())
    shares = [x.log_shares(router, query, SPAN, LENGTH, rest, 0.3, MASK) for x in (small, TokenIndex(kept), index)]
    torch.testing.assert_close(shares[0], shares[1], atol=1e-4, rtol=1e-4)
    if bits == 8:
        torch.testing.assert_close(shares[0][0].exp(), shares[2][0].exp(), atol=0.02, rtol=0.1)


def test_gradients_of_a_context_without_spans_are_finite():
    router, key = make_router(), randn(B, K, T, D, seed=3)
    learned = [x.clone().requires_grad_() for x in router if x is not None]
    fields = [name for name, x in zip(LayerRouter._fields, router, strict=True) if x is not None]
    router = router._replace(**dict(zip(fields, learned, strict=True)))
    length, mask = LENGTH.clone(), MASK.clone()
    length[1], mask[1] = 0, False
    shares = TokenIndex.of(router, key).log_shares(
        router, randn(B, H, Q, D, seed=2), SPAN, length, torch.zeros(B, H, Q), 0.4, mask
    )
    shares.exp().sum().backward()
    assert bool(shares.isfinite().all())
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in learned)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_store_knows_the_teachers_shares_when_its_index_is_whole(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=16, max_span=16))
    for projection in (adapter.projection, adapter.key_projection):
        projection.copy_(torch.eye(16).expand_as(projection))
    state = prefill(tiny_backbone, ids(2, 200), left_padding([200, 150]))
    store = training_cache(state, adapter, 0.4).stores[1]
    store.append(randn(2, 2, 5, 16, seed=1), randn(2, 2, 5, 16, seed=2))
    query = randn(2, 4, 3, 16, seed=3)
    store.attend(query, 0.25, None)
    key = torch.cat([state.key_value(1)[0], store.exact.key[:, :, store.exact.n_context :]], dim=2)
    visible = torch.ones(2, 3, 205, dtype=torch.bool)
    visible[:, :, :200] = state.mask[:, None]
    visible[:, 0, 203:], visible[:, 1, 204:] = False, False
    logits = query @ key.repeat_interleave(2, dim=1).mT * 0.25
    mass = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    cut = store.plan.segmentation
    for b in range(2):
        for s, (start, n) in enumerate(zip(cut.span_start[b].tolist(), cut.span_length[b].tolist(), strict=True)):
            if n:
                expected = mass[b, :, :, start : start + n].sum(-1)
                torch.testing.assert_close(store.trace.log_share[b, :, :, s].exp(), expected, atol=1e-5, rtol=1e-3)


def test_a_context_kept_whole_beside_a_compressed_one(tiny_backbone):
    """It has no spans: neither answers nor gradients may suffer from that."""
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16, max_rank=4))
    state = prefill(tiny_backbone, ids(2, 300), left_padding([300, 60]))
    positions = torch.tensor([[300], [60]]) + torch.arange(4)
    answers = [
        tiny_backbone.hidden_states(ids(2, 4, seed=1), position_ids=positions, cache=cache)
        for cache in (training_cache(state, adapter, 100), compress(state, SeKVPolicy(adapter=adapter), 100))
    ]
    answers[0].square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in adapter.parameters())
    alone = prefill(tiny_backbone, state.input_ids[1:, 240:])
    whole = tiny_backbone.hidden_states(
        ids(2, 4, seed=1)[1:], position_ids=positions[1:], cache=compress(alone, SeKVPolicy(adapter=adapter), 100)
    )
    for answer in answers:
        torch.testing.assert_close(answer[1:].detach(), whole.detach(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_resident_bytes_hold_the_index(tiny_backbone):
    sizes = {}
    for index in ("tokens", "summary"):
        adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, index=index))
        store = compress(prefill(tiny_backbone, ids(1, 600)), SeKVPolicy(adapter=adapter), 0.3).stores[0]
        known = store.index.tensors() if index == "tokens" else [store.norm]
        sizes[index] = store.resident_bytes - sum(t.nbytes for t in known)
        n_tokens = int(store.plan.segmentation.span_length.sum())
        if index == "tokens":
            assert sum(t.nbytes for t in known) == 2 * 8 * n_tokens // 2 + 2 * 8 * 4  # KV heads, directions, steps
            summaries = store.summaries.key.nbytes + store.summaries.value.nbytes  # on the host: nobody routes by them
    assert sizes["tokens"] + summaries == sizes["summary"]
