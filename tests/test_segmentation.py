"""Anchors and spans: exact partition, limits, budget-aware anchors, line breaks, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sekv.errors import PolicyError
from sekv.segmentation import Segmentation, SegmentationConfig, segment


def covered(segmentation: Segmentation, row: int) -> list[int]:
    """Every token index of a row, exact tokens and span tokens together, with repeats."""
    found = segmentation.exact_index[row][segmentation.exact_mask[row]].tolist()
    for start, length in zip(
        segmentation.span_start[row].tolist(), segmentation.span_length[row].tolist(), strict=True
    ):
        found += list(range(start, start + length))
    return sorted(found)


def surprisals(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    n = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(lengths), n, generator=generator).exp()
    mask = torch.arange(n) >= n - torch.tensor(lengths)[:, None]
    return values * mask, mask


def check_summary_rows(result: Segmentation, row: int, rows: int, config: SegmentationConfig) -> None:
    """Rows are dense from 0, no more than allowed, runs of neighbouring spans, and each stands for some tokens."""
    real = result.span_length[row] > 0
    numbers = result.span_row[row][real]
    count = int(result.summary_rows[row])
    assert count == len(numbers.unique())
    assert count <= config.summary_rows(rows, int(real.sum()))
    if len(numbers):
        assert int(numbers[0]) == 0 and set(numbers.diff().tolist()) <= {0, 1}
    if not config.merges:
        assert count == int(real.sum())
    assert not result.span_row[row][~real].any()
    assert result.merged == config.merges
    cost = torch.where(real, result.span_length[row] - int(not config.merges), -1)
    assert torch.equal(result.zoom_cost[row], cost)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 400),
    share=st.floats(0.3, 1.0),
    min_span=st.integers(1, 6),
    max_span=st.integers(11, 40),
    method=st.sampled_from(["surprisal", "fixed"]),
    anchors=st.booleans(),
    summary_share=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 5),
)
def test_partition_is_exact(n, share, min_span, max_span, method, anchors, summary_share, seed):
    values, mask = surprisals(n, max(1, n - 3), seed=seed)
    config = SegmentationConfig(
        min_span=min_span, max_span=max_span, method=method, anchors=anchors, summary_share=summary_share
    )
    rows = (mask.sum(1) * share).long().clamp_min(1)
    breaks = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
    result = segment(values, mask, rows, config, breaks)
    for row in range(2):
        assert covered(result, row) == mask[row].nonzero().squeeze(1).tolist()
        lengths = result.span_length[row][result.span_length[row] > 0]
        if len(lengths):
            assert int(lengths.min()) >= min_span and int(lengths.max()) <= max_span
        check_summary_rows(result, row, int(rows[row]), config)


def test_anchors_follow_the_rule_when_the_budget_allows():
    values, mask = surprisals(300)
    config = SegmentationConfig(persistent_share=1.0, sinks=4, tail=8)
    result = segment(values, mask, torch.tensor([299]), config)
    exact = set(result.exact_index[0][result.exact_mask[0]].tolist())
    rule = values[0].mean() + values[0].std(unbiased=False)
    anchors = {i for i in range(4, 292) if values[0, i] > rule}
    assert anchors and anchors <= exact
    assert set(range(4)) <= exact and set(range(292, 300)) <= exact
    # What is exact beyond sinks, tail and anchors lies in runs shorter than min_span.
    for i in exact - anchors - set(range(4)) - set(range(292, 300)):
        run = [i]
        while run[0] - 1 >= 4 and run[0] - 1 not in anchors:
            run.insert(0, run[0] - 1)
        while run[-1] + 1 < 292 and run[-1] + 1 not in anchors:
            run.append(run[-1] + 1)
        assert len(run) < config.min_span


@pytest.mark.parametrize("share", [0.08, 0.1, 0.2, 0.4])
def test_persistent_rows_keep_to_their_share(share):
    values, mask = surprisals(4000)
    config = SegmentationConfig()
    rows = torch.tensor([int(4000 * share)])
    result = segment(values, mask, rows, config)
    floor = config.sinks + config.tail + config.summary_rows(int(rows), 4000)
    assert int(result.persistent_rows) <= max(config.persistent_share * int(rows), floor)
    own = SegmentationConfig(summary_share=1.0)
    result = segment(values, mask, rows, own)
    floor = own.sinks + own.tail + -(-(4000 - 36) // own.max_span)
    assert int(result.persistent_rows) <= max(own.persistent_share * int(rows), floor)


def test_more_budget_gives_more_anchors():
    values, mask = surprisals(2000)
    counts = [
        int(segment(values, mask, torch.tensor([rows]), SegmentationConfig()).exact_mask.sum())
        for rows in (160, 300, 600)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_splits_prefer_line_breaks():
    n = 36 + 150  # one run of 150 tokens between sinks and tail
    values, mask = torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool)
    breaks = torch.zeros(1, n, dtype=torch.bool)
    plain = segment(values, mask, torch.tensor([100]), SegmentationConfig(max_span=64), breaks)
    assert plain.span_start[0].tolist() == [4, 54, 104]
    breaks[0, [51, 106]] = True  # two tokens before the first cut, two behind the second
    moved = segment(values, mask, torch.tensor([100]), SegmentationConfig(max_span=64), breaks)
    assert moved.span_start[0].tolist() == [4, 52, 107]
    breaks[0] = False
    breaks[0, 20] = True  # too far from any cut
    assert segment(values, mask, torch.tensor([100]), SegmentationConfig(max_span=64), breaks).span_start[
        0
    ].tolist() == [
        4,
        54,
        104,
    ]


@pytest.mark.parametrize("n", [40, 130, 500, 1000, 4096])
@pytest.mark.parametrize("summary_share", [0.1, 0.5, 0.99, 1.0])
def test_the_smallest_budget_holds_one_zoom_and_a_smaller_one_none(n, summary_share):
    values, mask = surprisals(n)
    config = SegmentationConfig(summary_share=summary_share)
    least = config.minimum_rows(n)
    result = segment(values, mask, torch.tensor([least]), config)
    if least < n:
        assert int(result.persistent_rows) + int(result.zoom_cost.max()) <= least
    assert least < 4 * n**0.5 + 36
    # No length of spans leaves room for a span with one row less.
    for max_span in range(2 * config.min_span - 1, config.max_span + 1):
        pieces = -(-(n - 36) // max_span)
        longest = -(-(n - 36) // pieces)
        summaries = config.summary_rows(least - 1, pieces)
        assert 36 + summaries + longest - (0 if config.merges else 1) > min(least, n) - 1


@pytest.mark.parametrize("n", [300, 2000])
def test_with_shared_rows_short_spans_cost_nothing(n):
    own, shared = (SegmentationConfig(summary_share=share) for share in (1.0, 0.1))
    assert shared.minimum_rows(n) < own.minimum_rows(n)
    values, mask = surprisals(n)
    rows = torch.tensor([int(0.25 * n)])
    assert int((segment(values, mask, rows, shared).span_length > 0).sum()) >= int(
        segment(values, mask, rows, shared).summary_rows
    )
    assert int(segment(values, mask, rows, shared).summary_rows) <= 0.1 * int(rows)


def test_context_within_budget_is_exact():
    values, mask = surprisals(50)
    result = segment(values, mask, torch.tensor([50]), SegmentationConfig())
    assert covered(result, 0) == list(range(50)) and int(result.span_length.max()) == 0


def test_batch_equals_single_rows():
    values, mask = surprisals(200, 131)
    rows = torch.tensor([90, 80])
    both = segment(values, mask, rows, SegmentationConfig())
    alone = segment(values[1:, 69:], mask[1:, 69:], rows[1:], SegmentationConfig())
    real = both.span_length[1] > 0
    assert torch.equal(both.span_start[1][real] - 69, alone.span_start[0])
    assert torch.equal(both.span_length[1][real], alone.span_length[0])
    assert torch.equal(both.span_row[1][real], alone.span_row[0])
    assert torch.equal(both.exact_index[1][both.exact_mask[1]] - 69, alone.exact_index[0])


def test_bad_settings_are_refused():
    with pytest.raises(PolicyError, match="unknown; use 'surprisal' or 'fixed'"):
        SegmentationConfig(method="words")
    with pytest.raises(PolicyError, match="min_span=9, max_span=8"):
        SegmentationConfig(min_span=9, max_span=8)
    with pytest.raises(PolicyError, match=r"summary_share must be in \(0, 1\], got 1.5"):
        SegmentationConfig(summary_share=1.5)
    with pytest.raises(PolicyError, match=r"persistent_share must be in \(0, 1\]"):
        SegmentationConfig(persistent_share=0.0)
