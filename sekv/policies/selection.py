"""From scores to kept tokens: protection, and allocation over heads and layers (method sections 3.4 and 4).

Dimensions: B batch, K KV heads, N context tokens. Scores are float32, higher is kept first; where scores are equal the
earlier head and token is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.prefill import positions_of

_PROTECTED = 1e38  # above every score; float32 still tells two million levels apart up there


def protect(scores: Tensor, mask: Tensor, sinks: int, tail: int | Tensor) -> Tensor:
    """Raises the first `sinks` and the last `tail` tokens of each context above all others, padding below.

    The levels are ordered, so that a budget too small for all of them keeps the sinks, first ones first, and then the
    most recent tokens.

    Args:
        scores: finite [B, K, N]; anything at padding.
        mask: True for real tokens [B, N].
        sinks: tokens at the beginning of each context.
        tail: tokens at its end, one number or one per context [B].

    Returns:
        [B, K, N], -inf at padding.
    """
    tail = torch.as_tensor(tail, device=mask.device).reshape(-1, 1)
    position = positions_of(mask)
    age = mask.sum(dim=1, keepdim=True) - 1 - position  # 0 for the last token
    recent = _PROTECTED * (1.0 + (tail - age) / tail.clamp_min(1))
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
        rows: whole rows per head [B], at most the context's tokens.

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
        rows: mean rows per head [B], at most the context's tokens; K * rows[b] is a whole number.
        safeguard: share of `rows` that no head can lose.

    Returns:
        Bool [B, K, N], exactly K * rows[b] True per batch row.
    """
    safe = (safeguard * rows + 1e-6).long().clamp_min(1)  # the tiny term keeps floor(0.2 * 35) at 7
    own = top(scores, safe[:, None, None])
    count = (scores.shape[1] * rows).round().long()
    return top(scores.masked_fill(own, torch.inf).flatten(1), count[:, None]).view_as(scores)


def pyramid_rows(rows: Tensor, lengths: Tensor, protected: int, n_layers: int, beta: float) -> Tensor:
    """Rows per layer that fall from the first layer to the last, the same in total (PyramidKV, arXiv 2406.02069).

    What is left of `rows` after the protected tokens is spread as an arithmetic series: the last layer gets 1 / beta of
    the mean and the first one as much above it. Where the first layer would keep more than there is, the series is
    flattened around the same mean.

    Args:
        rows: mean rows per layer and head [B].
        lengths: tokens of each context [B].
        protected: tokens that every layer keeps, as far as `rows` allows.
        n_layers: L.
        beta: steepness, at least 1; 1 is uniform.

    Returns:
        Whole rows [B, L] that sum to L * rows[b], none above lengths[b].
    """
    protected = max(1, protected)  # no layer may be left without a row
    free = (rows - protected).clamp_min(0).double()
    lowest = free / beta
    highest = torch.minimum(2 * free - lowest, (lengths - protected).clamp_min(0))
    step = (2 * free - 2 * highest) / max(1, n_layers - 1)
    layer = torch.arange(n_layers, device=rows.device)
    wanted = (rows - free)[:, None] + (highest[:, None] + layer * step[:, None] if n_layers > 1 else free[:, None])
    # Rounding the running sums keeps the total exact.
    return wanted.cumsum(dim=1).round().long().diff(dim=1, prepend=rows.new_zeros(len(rows), 1))


def pooled_rows(scores: list[Tensor], rows: Tensor, safeguard: float) -> Tensor:
    """Rows per layer when all heads of all layers compete for the same pool.

    Args:
        scores: protected scores [B, K, N] of each layer, comparable between layers.
        rows: mean rows per layer and head [B].
        safeguard: share of `rows` that no head can lose.

    Returns:
        Mean rows per head [B, L], float: a layer's total need not divide by its heads.
    """
    keep = keep_headwise(torch.cat(scores, dim=1), rows, safeguard)
    return keep.unflatten(1, (len(scores), -1)).sum(dim=-1).float().mean(dim=2)
