"""Router recall on a memory made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sekv.routing import group_sum
from sekv.segmentation import Segmentation
from sekv.stores.spans import LayerTrace
from train.recall import router_recall, take_queries


@pytest.fixture
def trace():
    """Two query heads on one KV head, two queries, four spans of 3 tokens; room for one zoomed span (2 rows net)."""
    alpha = torch.tensor([[0.1, 0.2, 0.9, 0.3], [0.8, 0.1, 0.1, 0.1]])
    filler = torch.zeros(1)
    return LayerTrace(
        log_share=None,
        alpha_logit=filler,
        alpha=alpha[None, None].expand(1, 2, 2, 4),
        tau=torch.tensor([0.5, 0.7]),
        expand=filler,
        expand_soft=filler,
        span_mass=filler,
        exact_mass=filler,
        window_mass=filler,
        sigma_key=filler,
        sigma_value=filler,
        gate_key=filler,
        gate_value=filler,
        segmentation=Segmentation(
            exact_index=filler,
            exact_mask=filler,
            span_start=torch.tensor([[0, 3, 6, 9]]),
            span_length=torch.full((1, 4), 3),
            span_row=torch.arange(4)[None],
            merged=False,
        ),
        query=torch.tensor([1.0, 0.0]).expand(1, 2, 2, 2),
        summary_key=torch.tensor([[[[0.0, 0.0], [5.0, 0.0], [0.0, 5.0], [0.0, 0.0]]]]),
        zoom_rows=torch.tensor([2]),
        scaling=1.0,
    )


def test_each_router_is_credited_with_what_its_spans_hold(trace):
    mass = torch.tensor([0.1, 0.2, 0.3, 0.4])[None, None, None].expand(1, 2, 1, 4) / 2
    # Query 0: the learned router takes span 2, the untrained one span 1, the teacher span 3.
    recall = router_recall(trace, mass, torch.tensor([[0]]))
    assert {name: round(float(value), 4) for name, value in recall.items()} == {
        "learned": 0.3,
        "mean": 0.2,
        "oracle": 0.4,
    }
    # Query 1's heads want span 0 most, 1.6 in all.
    recall = router_recall(trace, mass, torch.tensor([[1]]))
    assert float(recall["learned"]) == pytest.approx(0.1)


def test_all_rows_cover_everything_and_no_mass_counts_as_zero(trace):
    mass = torch.rand(1, 2, 2, 4)
    mined = torch.tensor([[0, 1]])
    everything = router_recall(replace(trace, zoom_rows=torch.tensor([8])), mass, mined)
    assert all(float(value) == pytest.approx(1.0) for value in everything.values())
    nothing = router_recall(trace, torch.zeros(1, 2, 2, 4), mined)
    assert all(float(value) == 0.0 for value in nothing.values())


def test_the_teachers_own_order_is_not_beaten_with_equal_spans(trace):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mass = torch.rand(1, 2, 2, 4, generator=generator)
        recall = router_recall(trace, mass, torch.tensor([[0, 1]]))
        assert float(recall["oracle"]) >= max(float(recall["learned"]), float(recall["mean"])) - 1e-6


def test_take_queries_and_group_sum_equal_loops():
    x = torch.randn(2, 4, 5, 3)
    position = torch.tensor([[0, 4], [2, 2]])
    taken = take_queries(x, position)
    summed = group_sum(x, kv_heads=2)
    for b in range(2):
        for m in range(2):
            assert torch.equal(taken[b, :, m], x[b, :, position[b, m]])
        for k in range(2):
            torch.testing.assert_close(summed[b, k], x[b, 2 * k] + x[b, 2 * k + 1])
