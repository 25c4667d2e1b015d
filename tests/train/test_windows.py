"""Cut points and the batches they make."""

from __future__ import annotations

import pytest
import torch

from sekv.budget import Budget
from sekv.errors import DataError
from sekv.segmentation import SegmentationConfig
from train.windows import cut_documents, draw_cuts, smallest_context


@pytest.mark.parametrize("side", ["left", "right"])
def test_documents_are_cut_and_aligned_on_the_right(side):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]])
    mask = ids > 0
    if side == "left":
        ids, mask = torch.stack([ids[0], ids[1].roll(2)]), torch.stack([mask[0], mask[1].roll(2)])
    cut, real = cut_documents(ids, mask, torch.tensor([3, 2]), window=2)
    assert cut.tolist() == [[1, 2, 3, 4, 5], [0, 7, 8, 9, 10]]
    assert real.tolist() == [[True] * 5, [False] + [True] * 4]


def test_cuts_cover_the_whole_range_and_never_leave_it():
    lengths = torch.full((1000,), 20)
    cuts = draw_cuts(lengths, torch.rand(1000, generator=torch.Generator().manual_seed(0)), window=4, smallest=10)
    assert cuts.unique().tolist() == list(range(10, 17))
    assert draw_cuts(torch.tensor([14]), torch.tensor([0.999]), 4, 10).tolist() == [10]


def test_a_short_document_is_refused_with_the_length_it_needs():
    with pytest.raises(DataError, match=r"document of 13 tokens is too short.*need 14"):
        draw_cuts(torch.tensor([30, 13]), torch.zeros(2), window=4, smallest=10)


def test_an_impossible_budget_is_refused():
    with pytest.raises(DataError, match=r"budget of 0\.01 cannot hold a context of 500 tokens"):
        smallest_context(Budget(share=0.01), SegmentationConfig(), limit=500)


@pytest.mark.parametrize("budget", ["0.02", "0.032", "0.05", "0.1", "0.3", "0.9", "40", "120"])
@pytest.mark.parametrize(
    "config",
    [
        SegmentationConfig(),
        SegmentationConfig(max_span=16),
        SegmentationConfig(tail=200),
        SegmentationConfig(summary_share=0.9),
        SegmentationConfig(summary_share=1.0),
    ],
)
def test_the_smallest_context_is_that_of_a_look_at_every_length(budget, config):
    budget, limit = Budget.parse(budget), 4000
    short = [n for n in range(1, limit + 1) if budget.rows_for(n) < config.minimum_rows(n)]
    longest = max(short, default=0)
    if longest == limit:
        with pytest.raises(DataError, match=rf"cannot hold a context of {limit} tokens"):
            smallest_context(budget, config, limit)
    else:
        assert smallest_context(budget, config, limit) == longest + 1


def test_the_smallest_context_is_looked_for_once(monkeypatch):
    budget, config = Budget(share=0.11), SegmentationConfig(tail=33)
    first = smallest_context(budget, config, 3000)
    monkeypatch.setattr(SegmentationConfig, "minimum_rows", None)
    assert smallest_context(Budget(share=0.11), SegmentationConfig(tail=33), 3000) == first
