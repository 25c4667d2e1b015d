"""The two resolutions of every span of one layer: summaries and gated low-rank bases (method section 1.2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from sekv.adapter import RankGate
from sekv.factors import truncated_svd
from sekv.rotary import rotate, unrotate
from sekv.segmentation import Segmentation

_GATE_FLOOR = 0.05  # components with a smaller gate are neither stored nor moved


Basis = tuple[Tensor, Tensor, Tensor]
"""U [B, K, S, L, r], sigma [B, K, S, r] and V^T [B, K, S, r, d] of every span, float32."""

Turn = tuple[Tensor, Tensor]
"""Cos and sin [L, rot] float32 of the rotation between a span's first token and each of its tokens."""


def span_turn(tables: Callable[[Tensor], tuple[Tensor, Tensor]], last: Tensor, longest: int) -> Turn:
    """The rotation to undo before keys are factored.

    A key at place t of a span that begins at position p was turned by R(p + t) = R(t) R(p). Undoing R(t) alone is
    enough: R(p) is one orthogonal matrix for the whole span and changes neither singular values nor U. So one small
    table serves every span, whatever its position, and nothing is lost to the rounding of far positions.

    Args:
        tables: positions [1, n] to cos and sin [1, n, rot] float32, such as `Backbone.rope`.
        last: last position of the longest context (0-dimensional); dynamic RoPE picks its frequencies by it.
        longest: tokens of the longest span, L.

    Returns:
        Cos and sin [L, rot].
    """
    position = torch.cat([torch.arange(longest, device=last.device), last[None]])
    cos, sin = (table[0, :-1] for table in tables(position[None]))
    return cos, sin


@dataclass(frozen=True)
class SpanTokens:
    """Where the tokens of the spans are.

    Dimensions: B batch, S spans, L longest span, T most span tokens of any row.

    Attributes:
        padded_index: token index in the context [B, S, L], 0 beyond a span's length.
        padded_mask: [B, S, L].
        slot: position of each span token in the flattened [S * L] axis [B, T].
        span: span of each span token [B, T].
        mask: True where a span token is real [B, T].
    """

    padded_index: Tensor
    padded_mask: Tensor
    slot: Tensor
    span: Tensor
    mask: Tensor

    @classmethod
    def of(cls, segmentation: Segmentation) -> SpanTokens:
        """Index tables of a partition."""
        start, length = segmentation.span_start, segmentation.span_length
        longest = max(1, int(length.max()))
        offset = torch.arange(longest, device=start.device)
        padded_mask = offset < length[..., None]
        padded_index = torch.where(padded_mask, start[..., None] + offset, 0)
        flat = padded_mask.flatten(1)
        count = flat.sum(1)
        order = (~flat).int().argsort(dim=1, stable=True)[:, : max(1, int(count.max()))]
        mask = torch.arange(order.shape[1], device=start.device) < count[:, None]
        return cls(padded_index, padded_mask, order, order // longest, mask)

    def followed_by(self, other: SpanTokens, offset: int) -> SpanTokens:
        """With the spans of other tokens behind these, none longer than the longest of these.

        Args:
            other: spans of a block of tokens.
            offset: where the block begins among all tokens.
        """
        n_spans, longest = self.padded_index.shape[1:]
        padding = (0, longest - other.padded_index.shape[2])
        index = torch.where(other.padded_mask, other.padded_index + offset, 0)
        place = other.slot % other.padded_index.shape[2]
        return SpanTokens(
            torch.cat([self.padded_index, torch.nn.functional.pad(index, padding)], dim=1),
            torch.cat([self.padded_mask, torch.nn.functional.pad(other.padded_mask, padding)], dim=1),
            torch.cat([self.slot, (n_spans + other.span) * longest + place], dim=1),
            torch.cat([self.span, n_spans + other.span], dim=1),
            torch.cat([self.mask, other.mask], dim=1),
        )


@dataclass(frozen=True)
class SpanMemory:
    """Summaries and bases of one layer's spans.

    Dimensions: B batch, K KV heads, S spans, L longest span, r components, d head dimension, T span tokens.

    Attributes:
        summary_key: surprisal-weighted mean key of each span [B, K, S, d], in the backbone's dtype.
        summary_value: likewise for values.
        raw_key: rotated keys of the spans' tokens [B, K, S, L, d], zero beyond a span's length.
        raw_value: values, likewise.
        key_basis: of the keys as factored, before or after RoPE.
        value_basis: of the values.
        key_gate: g [B, K, S, r]; differentiable when the rank gate is.
        value_gate: g for the values.
    """

    summary_key: Tensor
    summary_value: Tensor
    raw_key: Tensor
    raw_value: Tensor
    key_basis: Basis
    value_basis: Basis
    key_gate: Tensor
    value_gate: Tensor


def build_memory(
    key: Tensor,
    value: Tensor,
    tokens: SpanTokens,
    weights: Tensor,
    max_rank: int,
    gate: RankGate | None = None,
    turn: Turn | None = None,
    shortest: int = 1,
) -> SpanMemory:
    """Builds summaries and bases, batched over batch rows, KV heads and spans.

    Args:
        key: rotated keys [B, K, N, d].
        value: [B, K, N, d].
        tokens: where the spans' tokens are.
        weights: summary weight of each context token, not negative [B, N].
        max_rank: r_max.
        gate: rank gate; None keeps every component whole.
        turn: rotation to undo before keys are factored, from `span_turn`; None factors them as they are.
        shortest: tokens of the shortest span that is factored; shorter ones stay raw (`shortest_factored`).

    Returns:
        The memory; only the gates carry a gradient.
    """
    if turn is not None:
        turn = (turn[0][: tokens.padded_index.shape[2]], turn[1][: tokens.padded_index.shape[2]])
    with torch.no_grad():
        raw_key, raw_value = (span_rows(x, tokens) for x in (key, value))
        summary_key, summary_value = (summarise(x, tokens, weights) for x in (raw_key, raw_value))
        chosen = tokens.padded_mask.sum(-1) >= shortest  # [B, S]
        if bool(chosen.any()):
            to_factor = raw_key.float()
            if turn is not None:
                to_factor = unrotate(to_factor, *turn)  # zero rows stay zero
            key_basis, value_basis = (_factor(x, chosen, max_rank) for x in (to_factor, raw_value.float()))
        else:
            key_basis, value_basis = (_no_basis(x, max_rank) for x in (raw_key, raw_value))
    if gate is None:
        key_gate, value_gate = torch.ones_like(key_basis[1]), torch.ones_like(value_basis[1])
    else:
        key_gate, value_gate = gate(key_basis[1], summary_key), gate(value_basis[1], summary_key)
    return SpanMemory(summary_key, summary_value, raw_key, raw_value, key_basis, value_basis, key_gate, value_gate)


def shortest_factored(max_rank: int, dim: int) -> int:
    """Tokens from which on a basis of rank `max_rank` is smaller than the rows it stands for.

    Rank r costs r (|S| + d) numbers, raw rows |S| d, both stored alike. Training and inference follow the same rule. At
    rank 24 of 64 dimensions only spans of 39 tokens or more are worth factoring.
    """
    return max_rank * dim // (dim - max_rank) + 1 if max_rank < dim else sys.maxsize


def summarise(rows: Tensor, tokens: SpanTokens, weights: Tensor) -> Tensor:
    """Weighted mean of each span's rows, summed in float32.

    Args:
        rows: rows of the spans [B, K, S, L, d], from `span_rows`.
        tokens: where the spans' tokens are.
        weights: weight of each context token, not negative [B, N].

    Returns:
        [B, K, S, d] in the dtype of `rows`.
    """
    share = _summary_shares(weights, tokens)
    return einsum(share, rows.float(), "b s l, b k s l d -> b k s d").to(rows.dtype)


def span_rows(x: Tensor, tokens: SpanTokens) -> Tensor:
    """Rows of the spans' tokens [B, K, S, L, d] from [B, K, N, d], zero beyond a span's length."""
    batch, kv_heads, _, dim = x.shape
    index = tokens.padded_index.flatten(1)[:, None, :, None].expand(batch, kv_heads, -1, dim)
    rows = x.gather(2, index).reshape(batch, kv_heads, *tokens.padded_index.shape[1:], dim)
    return rows * tokens.padded_mask[:, None, ..., None]


def token_rows(rows: Tensor, tokens: SpanTokens) -> Tensor:
    """Rows of the spans [B, K, S, L, d] as rows of their tokens [B, K, T, d]; anything at padding."""
    slot = tokens.slot[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[-1])
    return rows.flatten(2, 3).gather(2, slot)


def _summary_shares(weights: Tensor, tokens: SpanTokens) -> Tensor:
    """Weights that sum to 1 within each span [B, S, L]; uniform where all weights are zero."""
    batch = weights.shape[0]
    picked = weights.gather(1, tokens.padded_index.reshape(batch, -1)).reshape(tokens.padded_index.shape)
    picked = picked * tokens.padded_mask
    flat = picked.sum(-1, keepdim=True) <= 0
    picked = torch.where(flat, tokens.padded_mask.to(picked.dtype), picked)
    return picked / picked.sum(-1, keepdim=True).clamp_min(1e-12)


def _factor(rows: Tensor, chosen: Tensor, max_rank: int) -> Basis:
    """Truncated SVD of the chosen spans; the others, and what is not finite, get zero singular values and stay raw.

    Args:
        rows: [B, K, S, L, d] float32.
        chosen: spans to factor [B, S].
        max_rank: r_max.
    """
    usable = rows.isfinite().all(dim=-1).all(dim=-1) & chosen[:, None]
    left, sigma, right = truncated_svd(torch.where(usable[..., None, None], rows, 0.0), max_rank)
    return left, sigma, right


def _no_basis(rows: Tensor, max_rank: int) -> Basis:
    """What `_factor` gives when it factors none of the rows [B, K, S, L, d]; takes no memory."""
    *spans, longest, dim = rows.shape
    zero = torch.zeros(1, device=rows.device)
    rank = min(max_rank, longest, dim)
    return zero.expand(*spans, longest, rank), zero.expand(*spans, rank), zero.expand(*spans, rank, dim)


def rebuild_rows(basis: Basis, gate: Tensor, raw: Tensor, turn: Turn | None = None) -> Tensor:
    """All spans' rows at the gated rank, for training: sum_i g_i sigma_i u_i v_i^T, raw where there is no basis.

    Args:
        basis: of all spans.
        gate: g [B, K, S, r].
        raw: raw rows [B, K, S, L, d].
        turn: what was undone before the keys were factored.

    Returns:
        [B, K, S, L, d] in the dtype of `raw`.
    """
    left, sigma, right = basis
    kept, stays_raw = components_kept(gate, sigma)
    if bool(stays_raw.all()):
        return raw
    rows = (left * (gate * kept * sigma)[..., None, :]) @ right
    if turn is not None:
        rows = rotate(rows, *turn)
    return torch.where(stays_raw[..., None, None], raw, rows.to(raw.dtype))


def components_kept(gate: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Which components of a basis are worth storing, and which spans have none and stay raw.

    Args:
        gate: g [B, K, S, r].
        sigma: singular values [B, K, S, r]; all zero where a span was not factored.

    Returns:
        Components kept [B, K, S, r], and raw spans [B, K, S].
    """
    return (gate > _GATE_FLOOR) & (sigma > 0), sigma[..., 0] == 0
