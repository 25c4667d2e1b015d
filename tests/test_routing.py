"""Routing: logits of summaries against the formula, selection against a loop, straight-through gradients."""

from __future__ import annotations

import math

import pytest
import torch

from sekv.adapter import LayerRouter
from sekv.routing import (
    group_max,
    mean_margin,
    routing_logits,
    select_spans,
    straight_through,
    sum_by_span,
    summary_norm,
)

B, H, K, Q, S, D, R = 2, 4, 2, 3, 5, 8, 4


def make_router() -> LayerRouter:
    g = torch.Generator().manual_seed(0)
    return LayerRouter(
        projection=torch.randn(H, R, D, generator=g),
        key_projection=None,
        threshold=torch.rand(H, generator=g),
        scale=torch.rand(H, generator=g) + 0.5,
        length_coefficient=torch.rand(H, generator=g),
        offset=None,
        bias=torch.randn(H, generator=g),
        summary_bias=torch.zeros(H),
    )


def test_logits_follow_the_formula():
    router, g = make_router(), torch.Generator().manual_seed(1)
    query, key = torch.randn(B, H, Q, D, generator=g), torch.randn(B, K, S, D, generator=g)
    length = torch.tensor([[3, 9, 1, 20, 4], [2, 2, 7, 0, 0]])
    logits = routing_logits(router, query, key, summary_norm(router, key), length)
    for b in range(B):
        for h in range(H):
            for q in range(Q):
                for s in range(S):
                    projected = router.projection[h] @ key[b, h // 2, s]
                    inner = (router.projection[h] @ query[b, h, q]) @ (projected / projected.norm()) / math.sqrt(R)
                    prior = router.length_coefficient[h] * math.log(max(1, int(length[b, s])))
                    expected = router.scale[h] * inner + prior + router.bias[h]
                    torch.testing.assert_close(logits[b, h, q, s], expected, atol=1e-5, rtol=1e-4)


def test_longer_spans_are_never_underrated():
    router, g = make_router(), torch.Generator().manual_seed(1)
    query, key = torch.randn(1, H, Q, D, generator=g), torch.randn(1, K, 1, D, generator=g).expand(1, K, S, D)
    length = torch.tensor([[1, 2, 8, 32, 64]])
    logits = routing_logits(router, query, key, summary_norm(router, key), length)
    assert bool((logits.diff(dim=-1) >= 0).all())


def test_mean_margin_is_predicted_mass():
    g = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, H, Q, D, generator=g), torch.randn(1, K, S, D, generator=g)
    length = torch.tensor([[3, 9, 1, 20, 0]])
    margin = mean_margin(query, key, length, 0.5)
    torch.testing.assert_close(margin.sum(-1), torch.full((1, K, Q), 2.0))  # two heads of a group, mass 1 each
    logit = (query[0, 1, 0] @ key[0, 0, :4].T) * 0.5 + length[0, :4].log()
    other = (query[0, 0, 0] @ key[0, 0, :4].T) * 0.5 + length[0, :4].log()
    torch.testing.assert_close(margin[0, 0, 0, :4], logit.softmax(-1) + other.softmax(-1))
    assert float(margin[0, 0, 0, 4]) == 0.0


def greedy(margin: list[float], cost: list[int], rows: int, eligible: list[bool]) -> list[bool]:
    taken = [False] * len(margin)
    for i in sorted(range(len(margin)), key=lambda i: -margin[i]):
        if eligible[i] and 0 <= cost[i] <= rows:
            taken[i], rows = True, rows - cost[i]
    return taken


@pytest.mark.parametrize("rows", [0, 5, 17, 40, 1000])
def test_selection_respects_rows_and_order(rows):
    g = torch.Generator().manual_seed(rows)
    margin = torch.randn(6, 30, generator=g)
    cost = torch.randint(-1, 11, (6, 30), generator=g)  # -1: there is no span
    eligible = torch.rand(6, 30, generator=g) < 0.8
    chosen = select_spans(margin, cost, torch.full((6,), rows), eligible)
    used = (cost * chosen).sum(-1)
    assert bool((used <= rows).all())
    assert not bool((chosen & ~eligible).any()) and not bool((chosen & (cost < 0)).any())
    for i in range(6):
        expected = torch.tensor(greedy(margin[i].tolist(), cost[i].tolist(), rows, eligible[i].tolist()))
        # Three passes take the same leading spans as full greedy; they may stop before its last crumbs.
        assert not bool((chosen[i] & ~expected).any())
        assert int(used[i]) >= 0.8 * int((cost[i] * expected).sum())


def test_margin_decides_when_rows_are_short():
    margin, cost = torch.tensor([0.1, 0.9, 0.5, 0.8]), torch.tensor([4, 4, 4, 4])
    assert select_spans(margin, cost, torch.tensor(8)).tolist() == [False, True, False, True]


def test_straight_through():
    margin = torch.tensor([0.3, -0.2, 0.0], requires_grad=True)
    decision, soft = straight_through(torch.tensor([True, False, True]), margin)
    torch.testing.assert_close(decision, torch.tensor([1.0, 0.0, 1.0]))
    decision.sum().backward()
    expected = soft * (1 - soft) / 0.1
    torch.testing.assert_close(margin.grad, expected)


def test_group_max_and_sum_by_span():
    margin = torch.arange(2.0 * 4 * 1 * 3).reshape(2, 4, 1, 3)
    assert torch.equal(group_max(margin, 2), margin[:, 1::2])
    mass = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert sum_by_span(mass, torch.tensor([[0, 2, 2, 0]]), 3).tolist() == [[[5.0, 0.0, 5.0]]]
