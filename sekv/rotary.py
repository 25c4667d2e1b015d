"""Turning keys by RoPE and back, in the half-split layout that Llama, Mistral and Qwen use."""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to the first `cos.shape[-1]` dimensions of `x`; cos and sin broadcast against `x`."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = turned * cos + _rotate_half(turned) * sin
    return torch.cat([turned, rest], dim=-1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Inverse of `rotate`, attention scaling of the rotary tables (cos^2 + sin^2) included."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = (turned * cos - _rotate_half(turned) * sin) / (cos.square() + sin.square())
    return torch.cat([turned, rest], dim=-1)
