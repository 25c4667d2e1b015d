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


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_smallest_context_is_the_first_from_which_the_budget_always_holds(share):
    config, budget = SegmentationConfig(), Budget(share=share)
    smallest = smallest_context(budget, config, limit=4096)
    holds = [budget.rows_for(n) >= config.minimum_rows(n) for n in range(1, 4097)]
    assert all(holds[smallest - 1 :])
    assert not holds[smallest - 2]


def test_an_impossible_budget_is_refused():
    with pytest.raises(DataError, match=r"budget of 0\.01 cannot hold a context of 500 tokens"):
        smallest_context(Budget(share=0.01), SegmentationConfig(), limit=500)
