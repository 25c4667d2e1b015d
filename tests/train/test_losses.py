"""The losses against golden values and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train import losses
from train.errors import ConfigError
from train.losses import LossConfig


def test_logit_kl_golden_value():
    teacher = torch.log(torch.tensor([[[0.5, 0.5]]]))
    student = torch.log(torch.tensor([[[0.25, 0.75]]]))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    torch.testing.assert_close(losses.distill_logits(teacher, student), torch.tensor([expected]))


def test_logit_kl_is_zero_for_equal_distributions_whatever_the_offset():
    logits = torch.randn(2, 3, 7)
    torch.testing.assert_close(losses.distill_logits(logits, logits + 5.0), torch.zeros(2), atol=1e-6, rtol=0)


def test_logit_kl_equals_a_loop():
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    for b in range(2):
        total = 0.0
        for m in range(3):
            p, q = teacher[b, m].softmax(0), student[b, m].softmax(0)
            total += sum(float(p[v] * (p[v] / q[v]).log()) for v in range(5))
        assert losses.distill_logits(teacher, student)[b] == pytest.approx(total / 3, rel=1e-5)


def test_attention_kl_golden_value_with_padding():
    teacher = torch.tensor([[[[0.5, 0.5, 0.0]]]])  # one head, one query, the third row is padding
    student = torch.tensor([[[[0.9, 0.1, 0.0]]]])
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    torch.testing.assert_close(losses.distill_attention(teacher, student), torch.tensor([expected]))


def test_attention_kl_averages_heads_and_queries():
    teacher, student = torch.rand(2, 3, 4, 6).softmax(-1), torch.rand(2, 3, 4, 6).softmax(-1)
    loop = [
        sum(
            float((teacher[b, h, m] * (teacher[b, h, m] / student[b, h, m]).log()).sum())
            for h in range(3)
            for m in range(4)
        )
        / 12
        for b in range(2)
    ]
    assert losses.distill_attention(teacher, student).tolist() == pytest.approx(loop, rel=1e-4, abs=1e-6)


def test_attention_kl_survives_a_student_without_mass():
    teacher = torch.tensor([[[[1.0, 0.0]]]])
    student = torch.tensor([[[[0.0, 1.0]]]], requires_grad=True)
    value = losses.distill_attention(teacher, student)
    value.sum().backward()
    assert value.isfinite().all()
    assert student.grad.isfinite().all()


def test_zoom_labels_golden_value():
    mass = torch.tensor([0.1, 0.5, 0.3, 0.1])  # 0.9 of 1.0: the 0.5, the 0.3, and one of the two of 0.1
    assert losses.zoom_labels(mass, 0.9).tolist() == [True, True, True, False]
    assert losses.zoom_labels(mass, 0.5).tolist() == [False, True, False, False]
    assert losses.zoom_labels(mass, 1.0).tolist() == [True, True, True, True]


def test_zoom_labels_of_no_mass_and_of_no_span_are_empty():
    assert not losses.zoom_labels(torch.zeros(2, 3), 0.9).any()
    assert losses.zoom_labels(torch.zeros(2, 0), 0.9).shape == (2, 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.floats(0.05, 0.99))
def test_zoom_labels_are_the_smallest_covering_set(weights, coverage):
    mass = torch.tensor(weights, dtype=torch.float64)
    chosen = losses.zoom_labels(mass, coverage)
    total = mass.sum()
    assert mass[chosen].sum() >= coverage * total - 1e-9
    # No set with fewer spans covers as much: the heaviest ones are the best there are.
    fewer = mass.sort(descending=True).values[: max(0, int(chosen.sum()) - 1)].sum()
    assert fewer < coverage * total or total == 0


def test_zoom_loss_golden_value():
    logit = torch.tensor([[[[0.0, 2.0]]]])
    labels = torch.tensor([[[[True, False]]]])
    positive, negative = 10 * math.log(2), math.log(1 + math.exp(2.0))
    value = losses.zoom(logit, labels, torch.ones(1, 2, dtype=torch.bool), positive=10.0)
    torch.testing.assert_close(value, torch.tensor([(positive + negative) / 2]))


def test_zoom_loss_ignores_padded_spans_even_when_their_logits_are_not_finite():
    mask = torch.tensor([[True, True, False]])
    logit = torch.tensor([[[[0.3, -0.4, math.inf]]]], requires_grad=True)
    labels = torch.tensor([[[[True, False, False]]]])
    short = losses.zoom(logit.detach()[..., :2], labels[..., :2], mask[:, :2], 10.0)
    value = losses.zoom(logit, labels, mask, 10.0)
    torch.testing.assert_close(value, short)
    value.sum().backward()
    assert logit.grad[..., 2] == 0
    assert logit.grad.isfinite().all()


def test_share_loss_is_the_divergence_of_spans_and_rest():
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(2, 3, 4, 6, generator=g).softmax(-1)  # five spans and the rest
    student = (2 * torch.randn(2, 3, 4, 6, generator=g)).log_softmax(-1)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False  # and two that are padding
    padded = torch.nn.functional.pad(student[..., :5], (0, 2), value=-1e4).requires_grad_()
    mass = torch.nn.functional.pad(teacher[..., :5], (0, 2))
    value = losses.zoom_shares(padded, mass, mask)
    expected = torch.nn.functional.kl_div(student, teacher, reduction="none").sum(-1).mean(dim=(1, 2))
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)
    value.sum().backward()
    assert padded.grad.isfinite().all() and not padded.grad[..., 5:].any()
    torch.testing.assert_close(losses.zoom_shares(mass.log(), mass, mask), torch.zeros(2), atol=1e-6, rtol=0)


def test_share_loss_survives_certainty_and_documents_without_spans():
    mask = torch.tensor([[True, True], [False, False]])
    share = torch.tensor([[[[0.0, -1e4]]], [[[-1e4, -1e4]]]], requires_grad=True)  # all on one span; no span
    mass = torch.tensor([[[[0.0, 0.5]]], [[[0.0, 0.0]]]])
    value = losses.zoom_shares(share, mass, mask)
    value.sum().backward()
    assert value.isfinite().all() and value[0] > 1 and value[1] == 0
    assert share.grad.isfinite().all()


def test_zoom_loss_is_stable_for_extreme_logits():
    logit = torch.tensor([[[[-1e4, 1e4]]]])
    wrong = torch.tensor([[[[True, False]]]])
    assert losses.zoom(logit, wrong, torch.ones(1, 2, dtype=torch.bool), 10.0).item() == pytest.approx(5.5e4)


def test_recon_golden_value():
    sigma = torch.tensor([[[[2.0, 1.0]]]])
    gate = torch.tensor([[[[1.0, 0.5]]]])
    value = losses.recon(sigma, gate, torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(value, torch.tensor([0.25 / 5]))


def test_recon_equals_a_loop_over_spans_and_heads():
    sigma, gate = torch.rand(2, 2, 3, 4), torch.rand(2, 2, 3, 4)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    for b in range(2):
        shares = [
            float(((1 - gate[b, k, s]) ** 2 * sigma[b, k, s] ** 2).sum() / (sigma[b, k, s] ** 2).sum())
            for k in range(2)
            for s in range(3)
            if mask[b, s]
        ]
        assert losses.recon(sigma, gate, mask)[b] == pytest.approx(sum(shares) / len(shares), rel=1e-5)


def test_recon_of_a_zero_span_is_finite():
    gate = torch.full((1, 1, 1, 2), 0.5, requires_grad=True)
    value = losses.recon(torch.zeros(1, 1, 1, 2), gate, torch.ones(1, 1, dtype=torch.bool))
    value.sum().backward()
    assert value.item() == 0
    assert gate.grad.isfinite().all()


def test_expected_rows_is_a_fraction_of_the_span_tokens():
    expand = torch.tensor([[[[1.0, 0.5, 1.0]]]])
    length = torch.tensor([[4, 12, 0]])
    value = losses.expected_rows(expand, length, length > 0)
    torch.testing.assert_close(value, torch.tensor([10 / 16]))


def test_rank_is_counted_over_components_with_energy():
    sigma = torch.tensor([[[[3.0, 1.0, 0.0]]]])
    gate = torch.tensor([[[[1.0, 0.5, 1.0]]]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert losses.expected_rank(sigma, gate, mask).item() == pytest.approx(0.75)
    assert losses.effective_rank(sigma, gate, mask).item() == pytest.approx(1.5)


def test_losses_of_a_document_without_spans_are_zero_and_finite():
    mask = torch.zeros(1, 2, dtype=torch.bool)
    logit = torch.randn(1, 2, 3, 2, requires_grad=True)
    sigma, gate = torch.zeros(1, 1, 2, 4), torch.rand(1, 1, 2, 4, requires_grad=True)
    values = [
        losses.zoom(logit, torch.zeros(1, 2, 3, 2, dtype=torch.bool), mask, 10.0),
        losses.recon(sigma, gate, mask),
        losses.expected_rows(torch.rand(1, 1, 3, 2), torch.zeros(1, 2, dtype=torch.long), mask),
        losses.expected_rank(sigma, gate, mask),
    ]
    sum(v.sum() for v in values).backward()
    assert [v.item() for v in values] == [0, 0, 0, 0]
    assert logit.grad.isfinite().all()
    assert gate.grad.isfinite().all()


def test_masked_mean_is_per_document():
    values = torch.tensor([[1.0, 3.0, 99.0], [4.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert losses.masked_mean(values, mask).tolist() == [2.0, 4.0]


def test_annealing_rises_over_the_first_half():
    assert [losses.annealing(step, 100) for step in (0, 25, 50, 99)] == [0.0, 0.5, 1.0, 1.0]


def test_total_is_the_weighted_sum():
    parts = {
        name: torch.tensor([float(i)]) for i, name in enumerate(("logits", "attention", "zoom", "recon", "budget"))
    }
    config = LossConfig(logits=1, attention=2, zoom=3, recon=4, budget=5)
    assert losses.total(parts, config, anneal=0.5).item() == 0 + 2 + 6 + 12 + 10


def test_zoom_targets():
    mass = torch.tensor([[0.02, 0.3, 0.05, 0.0]])
    torch.testing.assert_close(
        losses.zoom_targets(mass, LossConfig(labels="mass")), torch.tensor([[0.2, 1.0, 0.5, 0.0]])
    )
    cover = losses.zoom_targets(mass, LossConfig(labels="cover", coverage=0.9))
    assert cover.tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_unknown_labels_are_refused():
    with pytest.raises(ConfigError, match="'labels' must be share, mass or cover, got soft"):
        LossConfig(labels="soft")


def test_method_constants():
    config = LossConfig()
    assert (config.zoom, config.recon, config.budget, config.rank) == (1.0, 0.5, 0.1, 0.1)
    assert config.coverage == 0.9


@pytest.mark.parametrize(("name", "value"), [("zoom", -1.0), ("coverage", 0.0), ("coverage", 1.5)])
def test_constants_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        LossConfig(**{name: value})
