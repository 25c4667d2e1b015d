"""Scaling that several methods share."""

from __future__ import annotations

import torch

from sekv.policies.scorer import scale_to_unit
from tests.policies.specs import left_padding, randn


def test_scaling_is_per_row_and_ignores_padding():
    mask = left_padding([10, 6])[:, None]
    values = randn(2, 3, 10) * 50
    values[1, :, :4] = torch.nan
    per_head, per_layer = scale_to_unit(values, mask), scale_to_unit(values, mask, dims=(-2, -1))
    for b, n in enumerate((10, 6)):
        real = values[b, :, 10 - n :]
        low, high = real.amin(-1, keepdim=True), real.amax(-1, keepdim=True)
        torch.testing.assert_close(per_head[b, :, 10 - n :], (real - low) / (high - low))
        torch.testing.assert_close(per_layer[b, :, 10 - n :], (real - real.min()) / (real.max() - real.min()))
        assert not per_head[b, :, : 10 - n].any()


def test_values_that_differ_by_rounding_only_are_constant():
    mask = torch.ones(1, 5, dtype=torch.bool)
    for value in (0.0, 0.3, -1.0, 1e-20, 1e20):
        values = torch.full((1, 5), value)
        values[0, 2] *= 1 + 2e-7
        assert not scale_to_unit(values, mask).any()
    small = torch.tensor([[0.0, 1e-9, 2e-9, 0.0, 4e-9]])  # small scores are scores
    torch.testing.assert_close(scale_to_unit(small, mask), small / 4e-9)
