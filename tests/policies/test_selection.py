"""Protection and allocation: exact counts, the right tokens, and nothing of padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sekv.policies.selection import keep_headwise, keep_uniform, pooled_rows, protect, pyramid_rows, top
from tests.policies.specs import left_padding, randn

LENGTHS = [1, 2, 3, 37, 60]


def loop_headwise(scores: Tensor, rows: int, safeguard: float) -> Tensor:
    """AdaKV's rule for one batch row [K, N], in plain Python."""
    kv_heads, n = scores.shape
    keep = torch.zeros(kv_heads, n, dtype=torch.bool)
    for k in range(kv_heads):
        best = sorted(range(n), key=lambda i: (-float(scores[k, i]), i))
        keep[k, best[: max(1, int(safeguard * rows + 1e-6))]] = True
    rest = sorted(
        ((k, i) for k in range(kv_heads) for i in range(n) if not keep[k, i]), key=lambda x: (-float(scores[x]), *x)
    )
    for k, i in rest[: kv_heads * rows - int(keep.sum())]:
        keep[k, i] = True
    return keep


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_top_marks_exactly_the_highest(data):
    n = data.draw(st.integers(1, 12))
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))).float()  # many ties
    count = data.draw(st.integers(0, n))
    marked = top(scores, torch.tensor(count))
    expected = sorted(range(n), key=lambda i: (-float(scores[i]), i))[:count]
    assert marked.nonzero().flatten().tolist() == sorted(expected)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("tail", [0, 8])
def test_counts_are_exact_and_padding_is_never_kept(share, sinks, tail):
    mask = left_padding(LENGTHS)
    rows = torch.tensor([max(1, int(share * n)) for n in LENGTHS])
    scores = protect(randn(len(LENGTHS), 3, max(LENGTHS)), mask, sinks, tail)
    uniform, headwise = keep_uniform(scores, rows), keep_headwise(scores, rows, 0.2)
    assert (uniform.sum(-1) == rows[:, None]).all()
    assert (headwise.sum((1, 2)) == 3 * rows).all()
    assert headwise.any(-1).all()  # no head is left without a row
    for keep in (uniform, headwise):
        assert not (keep & ~mask[:, None]).any()


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.5, 1.0])
def test_headwise_equals_the_loop(safeguard):
    mask = left_padding(LENGTHS)
    scores = protect(randn(len(LENGTHS), 3, max(LENGTHS)), mask, 2, 3)
    rows = torch.tensor([1, 1, 2, 12, 35])
    keep = keep_headwise(scores, rows, safeguard)
    for b in range(len(LENGTHS)):
        assert torch.equal(keep[b], loop_headwise(scores[b], int(rows[b]), safeguard))


def test_headwise_gives_more_to_the_heads_with_higher_scores():
    scores = torch.stack([torch.linspace(0, 1, 100), torch.linspace(2, 3, 100)])[None]
    counts = keep_headwise(scores, torch.tensor([20]), 0.2).sum(-1)
    assert counts.tolist() == [[4, 36]]
    assert keep_headwise(scores, torch.tensor([20]), 1.0).sum(-1).tolist() == [[20, 20]]


@pytest.mark.parametrize("allocate", [keep_uniform, lambda s, r: keep_headwise(s, r, 0.2)])
def test_a_small_budget_keeps_the_first_sinks_and_then_the_most_recent(allocate):
    mask = left_padding([50, 40])
    scores = protect(randn(2, 2, 50), mask, sinks=4, tail=8)
    for rows, kept in {
        1: [0],
        3: [0, 1, 2],
        4: [0, 1, 2, 3],
        6: [0, 1, 2, 3, 48, 49],
        12: [0, 1, 2, 3, *range(42, 50)],
    }.items():
        keep = allocate(scores, torch.tensor([rows, rows]))
        for head in range(2):
            assert keep[0, head].nonzero().flatten().tolist() == kept
        shorter = [10 + i if i < 4 else i for i in kept]  # padded by 10 on the left, the end is the same
        assert keep[1, 0].nonzero().flatten().tolist() == shorter


def test_beyond_the_protected_tokens_the_highest_scores_are_kept():
    scores = randn(1, 2, 50)
    keep = keep_uniform(protect(scores, left_padding([50]), 4, 8), torch.tensor([15]))
    middle = scores[..., 4:42]
    assert torch.equal(keep[..., 4:42], top(middle, torch.tensor(3)))
    assert keep[..., :4].all()
    assert keep[..., 42:].all()


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.01, 1)), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_a_pyramid_keeps_the_total_and_falls(contexts, data):
    lengths = torch.tensor([n for n, _ in contexts])
    rows = torch.tensor([max(1, int(n * share)) for n, share in contexts])
    n_layers, protected = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 20))
    beta = data.draw(st.floats(1, 50))
    found = pyramid_rows(rows, lengths, protected, n_layers, beta)
    assert found.shape == (len(contexts), n_layers)
    assert found.sum(dim=1).tolist() == (n_layers * rows).tolist()
    assert (found >= 1).all()
    assert (found <= lengths[:, None]).all()
    assert (found >= torch.minimum(rows, torch.tensor(max(1, protected)))[:, None]).all()
    assert (found.diff(dim=1) <= 1).all()  # falling, but for rounding


def test_a_pyramid_by_hand():
    rows, lengths = torch.tensor([110, 90]), torch.tensor([1000, 100])
    # 100 rows are free: from 190 down to 10, and where only 90 fit, from 90 down to 70.
    assert pyramid_rows(rows, lengths, 10, 3, 10.0).tolist() == [[200, 110, 20], [100, 90, 80]]
    assert pyramid_rows(rows, lengths, 10, 3, 1.0).tolist() == [[110] * 3, [90] * 3]


def test_pooled_layers_compete_for_the_same_rows():
    low, high = (
        protect(randn(1, 2, 50), left_padding([50]), 1, 0),
        protect(randn(1, 2, 50) + 3, left_padding([50]), 1, 0),
    )
    rows = torch.tensor([10])
    per_layer = pooled_rows([low, high], rows, 0.2)
    assert per_layer.shape == (1, 2)
    assert float(per_layer.sum()) == 20
    assert float(per_layer[0, 0]) >= 2  # each head keeps its safeguard
    assert per_layer[0, 1] > per_layer[0, 0]
    kept = [keep_headwise(scores, per_layer[:, i], 0.2) for i, scores in enumerate((low, high))]
    assert [int(k.sum()) for k in kept] == (2 * per_layer[0]).round().long().tolist()
