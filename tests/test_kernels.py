"""Compiled loops of a step against the same in torch, which accelerators and longer questions use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sekv import kernels
from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import prefill
from sekv.span_index import TokenIndex
from tests.policies.specs import left_padding, randn
from tests.test_span_index import LENGTH, MASK, SPAN, B, D, H, K, T, ids, make_router


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_log_shares_of_a_step(bits: int, rank: int, blocks: int) -> None:
    router, query, rest = make_router(rank), randn(B, H, 1, D, seed=2), randn(B, H, 1, seed=4)
    index = TokenIndex.of(router, randn(B, K, T, D, seed=3)).quantised(bits)
    for later in range(1, blocks):
        index = index.extended(TokenIndex.of(router, 3 * randn(B, K, 600, D, seed=later)).quantised(bits))
    n_later = 600 * (blocks - 1)
    span = torch.cat([SPAN, torch.full((B, n_later), LENGTH.shape[1])], dim=1)
    length = torch.cat([LENGTH, torch.full((B, 1), n_later)], dim=1)
    mask = torch.cat([MASK, torch.ones(B, n_later, dtype=torch.bool)], dim=1)
    want = index.log_shares(router, query, span, length, rest, 0.4, mask)
    found = index.step_log_shares(router, query, span, length, rest, 0.4, mask)
    assert found.shape == (B * H, length.shape[1])
    found, want = (x.clamp_min(-30.0) for x in (torch.from_numpy(found).view_as(want[:, :, 0]), want[:, :, 0]))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_log_shares_of_contexts_without_spans() -> None:
    router, query, rest = make_router(), randn(B, H, 1, D, seed=2), randn(B, H, 1, seed=4)
    index = TokenIndex.of(router, randn(B, K, T, D, seed=3)).quantised(4)
    nothing = torch.zeros_like(MASK)
    found = index.step_log_shares(router, query, SPAN, torch.zeros_like(LENGTH), rest, 0.4, nothing)
    assert bool((found < -1000).all())
    assert bool(np.isfinite(found).all())


def test_exponentials() -> None:
    logits = torch.cat([randn(5, 700) * 30, torch.full((5, 3), -torch.inf)], dim=1)
    logits[0] = -torch.inf
    found = logits.numpy().copy()
    peak = torch.from_numpy(kernels.exponentials(found))
    assert torch.equal(peak[1:], logits[1:].amax(dim=1))
    want = (logits[1:] - peak[1:, None]).double().exp()
    torch.testing.assert_close(torch.from_numpy(found)[1:].double(), want, rtol=1e-5, atol=1e-37)
    assert np.abs(found[0]).max() == 0.0
    assert np.abs(found[:, 700:]).max() == 0.0


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("share_group", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_a_step_chooses_what_longer_questions_choose(tiny_backbone, bits, share_group, fill) -> None:
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=9, max_span=16))
    adapter.threshold_logit.fill_(-4.0)
    state = prefill(tiny_backbone, ids(2, 400), left_padding([400, 290]))
    options = {"index_bits": bits, "share_group": share_group, "fill": fill}
    policy = SeKVPolicy(adapter=adapter, max_span=16, summary_share=0.2 if share_group else 1.0, **options)
    store = compress(state, policy, 0.35).stores[1]
    store.append(randn(2, 2, 3, 16, seed=1), randn(2, 2, 3, 16, seed=2))
    tail = torch.tensor([[True, True, True], [False, True, True]])[:, None, None]
    chosen: list[Tensor] = []
    for i in range(12):
        query = 4 * randn(2, 4, 1, 16, seed=10 + i)
        alone = store._choose(query, 0.25, tail)
        twice = store._choose(query.expand(-1, -1, 2, -1), 0.25, tail.expand(-1, -1, 2, -1))
        assert torch.equal(alone[:, :, 0], twice[:, :, 0])
        chosen.append(alone)
    several = torch.cat(chosen, dim=2)
    assert bool((several.any(dim=2) & ~several.all(dim=2)).any())  # another query, another choice


@torch.no_grad()
def test_log_sum_of_exact_rows(tiny_backbone) -> None:
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16))
    state = prefill(tiny_backbone, ids(2, 300), left_padding([300, 190]))
    store = compress(state, SeKVPolicy(adapter=adapter), 0.35).stores[0]
    query = randn(2, 4, 1, 16, seed=3)
    for n_tail in (0, 5):
        store.append(randn(2, 2, n_tail, 16, seed=1), randn(2, 2, n_tail, 16, seed=2))
        tail = torch.ones(2, 1, 1, n_tail, dtype=torch.bool)
        tail[1, ..., :2] = False
        want = super(type(store), store)._log_exact(query.expand(-1, -1, 2, -1), 0.25, tail.expand(-1, -1, 2, -1))
        torch.testing.assert_close(store._log_exact(query, 0.25, tail)[..., 0], want[..., 0], atol=1e-5, rtol=1e-5)
