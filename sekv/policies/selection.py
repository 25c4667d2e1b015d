"""From scores to kept tokens: protection, uniform and head-wise allocation (method sections 3.4 and 4).

Dimensions: B batch, K KV heads, N context tokens. Scores are float32, higher is kept first; where scores are equal the
earlier head and token is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.prefill import positions_of

_PROTECTED = 1e38  # above every score; float32 still tells two million levels apart up there


def protect(scores: Tensor, mask: Tensor, sinks: int, tail: int) -> Tensor:
    """Raises the first `sinks` and the last `tail` tokens of each context above all others, padding below.

    The levels are ordered, so that a budget too small for all of them keeps the sinks, first ones first, and then the
    most recent tokens.

    Args:
        scores: finite [B, K, N]; anything at padding.
        mask: True for real tokens [B, N].
        sinks: tokens at the beginning of each context.
        tail: tokens at its end.

    Returns:
        [B, K, N], -inf at padding.
    """
    position = positions_of(mask)
    age = mask.sum(dim=1, keepdim=True) - 1 - position  # 0 for the last token
    recent = _PROTECTED * (1.0 + (tail - age) / max(1, tail))
    first = _PROTECTED * (2.0 + (sinks - position) / max(1, sinks))
    level = torch.where(position < sinks, first, recent).float()
    protected = (position < sinks) | (age < tail)
    scores = torch.where(protected[:, None], level[:, None], scores)
    return scores.masked_fill(~mask[:, None], -torch.inf)


def top(scores: Tensor, count: Tensor) -> Tensor:
    """Marks the `count` highest scores along the last dimension.

    Args:
        scores: [..., n].
        count: how many to mark in each row, broadcastable to [..., 1].

    Returns:
        Bool [..., n] with exactly `count` True per row.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = (torch.arange(scores.shape[-1], device=scores.device) < count).expand_as(order)
    return torch.zeros_like(chosen).scatter(-1, order, chosen)


def keep_uniform(scores: Tensor, rows: Tensor) -> Tensor:
    """Every head keeps its own best `rows[b]` tokens.

    Args:
        scores: protected scores [B, K, N].
        rows: rows per head [B], at most the context's tokens.

    Returns:
        Bool [B, K, N].
    """
    return top(scores, rows[:, None, None])


def keep_headwise(scores: Tensor, rows: Tensor, safeguard: float) -> Tensor:
    """Heads compete for the layer's K * rows[b] rows, after each has taken its safeguard.

    Each head keeps its own best floor(safeguard * rows[b]) tokens, at least one; the rest goes to the highest scores
    whatever their head (method section 3.4, the rule of AdaKV, arXiv 2407.11550).

    Args:
        scores: protected scores [B, K, N], comparable between heads.
        rows: mean rows per head [B], at most the context's tokens.
        safeguard: share of `rows` that no head can lose.

    Returns:
        Bool [B, K, N], exactly K * rows[b] True per batch row.
    """
    safe = (safeguard * rows + 1e-6).long().clamp_min(1)  # the tiny term keeps floor(0.2 * 35) at 7
    own = top(scores, safe[:, None, None])
    return top(scores.masked_fill(own, torch.inf).flatten(1), scores.shape[1] * rows[:, None]).view_as(scores)
