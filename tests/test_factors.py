"""Randomised truncated SVD against the full one, and RoPE there and back."""

from __future__ import annotations

import pytest
import torch

from sekv.factors import truncated_svd
from sekv.rotary import rotate, unrotate


def decaying(m: int, d: int, batch: int = 5) -> torch.Tensor:
    g = torch.Generator().manual_seed(m * 100 + d)
    left, right = (torch.linalg.qr(torch.randn(batch, n, n, generator=g)).Q for n in (m, d))
    k = min(m, d)
    spectrum = 0.7 ** torch.arange(k)
    return left[..., :k] * spectrum @ right[..., :k].mT


@pytest.mark.parametrize(("m", "d"), [(64, 64), (32, 64), (64, 16), (3, 8), (1, 8)])
@pytest.mark.parametrize("rank", [1, 4, 16, 64])
def test_close_to_the_best_rank(m, d, rank):
    matrix = decaying(m, d)
    left, sigma, right = truncated_svd(matrix, rank)
    r = min(rank, m, d)
    assert left.shape == (5, m, r) and sigma.shape == (5, r) and right.shape == (5, r, d)
    exact = torch.linalg.svdvals(matrix)
    error = (matrix - left * sigma[..., None, :] @ right).norm(dim=(-2, -1))
    best = exact[..., r:].norm(dim=-1)
    assert bool((error <= 1.02 * best + 1e-4).all())
    torch.testing.assert_close(sigma, exact[..., :r], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("rank", [8, 64])
def test_full_rank_is_exact(rank):
    matrix = torch.randn(7, 30, 8, generator=torch.Generator().manual_seed(0))
    left, sigma, right = truncated_svd(matrix, rank)
    torch.testing.assert_close(left * sigma[..., None, :] @ right, matrix, atol=1e-4, rtol=1e-4)


def test_zero_rows_and_zero_matrices_change_nothing():
    matrix = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(0))
    matrix[:, 6:] = 0
    matrix[3] = 0
    left, sigma, right = truncated_svd(matrix, 16)
    assert bool(left.isfinite().all() and right.isfinite().all())
    torch.testing.assert_close(left * sigma[..., None, :] @ right, matrix, atol=1e-4, rtol=1e-4)
    assert float(sigma[3].abs().max()) == 0.0


def test_reproducible_and_float32_from_half():
    matrix = decaying(64, 64).to(torch.bfloat16)
    first, second = truncated_svd(matrix, 8), truncated_svd(matrix, 8)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(t.dtype == torch.float32 for t in first)


@pytest.mark.parametrize("rot", [16, 8])
def test_unrotate_inverts_the_backbones_rotation(rot):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    angle = torch.rand(2, 5, rot // 2, generator=torch.Generator().manual_seed(1)) * 6
    angle = torch.cat([angle, angle], dim=-1)
    for factor in (1.0, 1.3):  # yarn scales the tables
        cos, sin = angle.cos() * factor, angle.sin() * factor
        ours = rotate(x, cos[:, None], sin[:, None])
        theirs, _ = apply_rotary_pos_emb(x[..., :rot], x[..., :rot], cos, sin)
        torch.testing.assert_close(ours[..., :rot], theirs)
        assert torch.equal(ours[..., rot:], x[..., rot:])
        torch.testing.assert_close(unrotate(ours, cos[:, None], sin[:, None]), x, atol=1e-5, rtol=1e-5)
