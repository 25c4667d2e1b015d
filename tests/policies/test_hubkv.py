"""HubKV against the plainest reading of method section 2, and the properties stated there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.base import FullPolicy
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.nestedkv import NestedKVPolicy
from sekv.policies.snapkv import SnapKVPolicy
from tests.policies.specs import left_padding, plain_prefill, randn

unit_scores = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


def loop_refine(scores: list[list[float]], ratio: float) -> list[list[float]]:
    """z of one unpadded layer, scores [K][n] in [0, 1], in plain Python."""
    selectivity = []
    for s in scores:
        mean = sum(s) / len(s)
        std = math.sqrt(sum((x - mean) ** 2 for x in s) / len(s))
        selectivity.append(std / mean if mean else 0.0)
    average = sum(selectivity) / len(selectivity)
    refined = []
    for s, c in zip(scores, selectivity, strict=True):
        beta = min(1.2, max(0.8, math.sqrt(c / average if average else 1.0)))
        row = []
        for i, x in enumerate(s):
            q = x if x == max(s[max(0, i - 2) : i + 3]) else 0.5 * x
            row.append(x + ratio**2 * (beta * q - x))
        refined.append(row)
    return refined


def refine(scores: Tensor, ratio: float, **options: float) -> Tensor:
    """z of one unpadded layer [K, n]."""
    policy = HubKVPolicy(**options)
    return policy.refine(scores[None], torch.ones(1, scores.shape[1], dtype=torch.bool), torch.tensor([ratio]))[0]


@pytest.mark.parametrize("base", [KeyDiffPolicy(), NestedKVPolicy(), SnapKVPolicy(window=8)])
def test_equals_the_loop_with_ratio_and_scale_per_context(base):
    lengths, rows = [50, 31, 2, 1], torch.tensor([10, 20, 1, 1])
    mask = left_padding(lengths)
    state = plain_prefill(randn(4, 3, 50, 8), mask, randn(4, 6, 8, 8, seed=1))
    policy = HubKVPolicy(base=base)
    z = policy.refine(policy.score(state, 0), mask, 1.0 - rows / torch.tensor(lengths))
    raw = base.score(state, 0)
    for b, n in enumerate(lengths):
        real = raw[b, :, 50 - n :].double()
        low, high = float(real.min()), float(real.max())
        constant = high - low <= 1e-6 * max(abs(low), abs(high))
        scores = [[0.0 if constant else (float(x) - low) / (high - low) for x in head] for head in real]
        expected = torch.tensor(loop_refine(scores, 1 - int(rows[b]) / n))
        torch.testing.assert_close(z[b, :, 50 - n :], expected, atol=1e-5, rtol=1e-5)


@given(unit_scores, st.floats(0, 1, width=32))
@settings(max_examples=100, deadline=None)
def test_a_unique_local_peak_stays_ahead_of_its_neighbours(values, ratio):
    scores = torch.tensor([values])
    z = refine(scores, ratio)
    for i, peak in enumerate(values):
        near = [j for j in range(max(0, i - 2), min(len(values), i + 3)) if j != i]
        if all(values[j] < peak for j in near):
            assert all(z[0, j] <= z[0, i] for j in near)
            if ratio > 0.1 and peak > 1e-3:
                assert all(z[0, j] < z[0, i] for j in near)


@given(unit_scores, unit_scores)
@settings(max_examples=50, deadline=None)
def test_nothing_changes_when_nothing_is_removed(first, second):
    n = min(len(first), len(second))
    scores = torch.tensor([first[:n], second[:n]])
    assert torch.equal(refine(scores, 0.0), scores)


@given(unit_scores, unit_scores, st.floats(0, 1, width=32))
@settings(max_examples=100, deadline=None)
def test_the_change_is_bounded_by_the_gate(first, second, ratio):
    n = min(len(first), len(second))
    scores = torch.tensor([first[:n], second[:n]])
    full_change = refine(scores, 1.0) - scores  # beta q - s
    change = refine(scores, ratio) - scores
    assert (change.abs() <= ratio**2 * full_change.abs() + 1e-6).all()
    assert (full_change.abs() <= 0.6 * scores + 1e-6).all()  # beta q is between 0.4 s and 1.2 s


def test_head_weights_are_bounded_and_favour_selective_heads():
    sharp = torch.zeros(1, 100)
    sharp[0, 50] = 1.0
    scores = torch.cat([sharp, torch.full((1, 100), 0.5) + 0.01 * randn(1, 100)])[None]
    weights = HubKVPolicy().head_weights(scores, torch.ones(1, 1, 100, dtype=torch.bool)).flatten().tolist()
    assert weights == pytest.approx([1.2, 0.8])


def test_equal_scores_stay_equal():
    assert len(refine(torch.full((3, 20), 0.7), 0.9).unique()) == 1
    assert not refine(torch.zeros(3, 20), 0.9).any()


def test_the_budget_goes_to_another_cluster():
    scores = torch.zeros(1, 1, 40)
    scores[0, 0, 10:13] = torch.tensor([0.9, 1.0, 0.9])
    scores[0, 0, 30] = 0.8

    class Fixed(KeyDiffPolicy):
        def score(self, prefill, layer):
            return scores

    base = Fixed(sinks=0, tail=0)
    state, rows = plain_prefill(randn(1, 1, 40, 4)), torch.tensor([2])
    assert base.keep(state, 0, rows).nonzero()[:, 2].tolist() == [10, 11]
    assert HubKVPolicy(base=base).keep(state, 0, rows).nonzero()[:, 2].tolist() == [11, 30]


def test_selection_is_the_bases():
    base = SnapKVPolicy(window=16, sinks=2, tail=5, allocation="headwise", safeguard=0.5)
    policy = HubKVPolicy(base=base)
    assert (policy.window, policy.sinks, policy.tail, policy.allocation, policy.safeguard) == (
        16,
        2,
        5,
        "headwise",
        0.5,
    )
    assert isinstance(HubKVPolicy().base, KeyDiffPolicy)


@pytest.mark.parametrize("base", [FullPolicy(), HubKVPolicy()])
def test_only_scorers_can_be_refined(base):
    with pytest.raises(PolicyError, match=f"hubkv refines a scorer .*; {base.name} is none"):
        HubKVPolicy(base=base)


@pytest.mark.parametrize(
    "option",
    [
        {"kernel_size": 4},
        {"kernel_size": -3},
        {"gamma": 1.5},
        {"weight_low": 2.0},
        {"exponent": -0.5},
        {"gate_power": -1.0},
        {"gate_power": float("nan")},
    ],
)
def test_options_out_of_range(option):
    with pytest.raises(PolicyError, match=next(iter(option))):
        HubKVPolicy(**option)
