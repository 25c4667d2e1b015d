"""What the full cache does at the window's queries: attention rows, mined queries, mass per row (method section 1.6).

Attention is computed for query rows only, one layer at a time: O(M x N) memory, never N x N.

Dimensions: B documents, H query heads, K KV heads (H = G * K), Q window queries, M mined queries, N tokens of context
and window, C tokens of context (N = C + Q), R rows of the memory, d head dimension. Padding is on the left, so all
windows end at token N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.attention import attention_rows as rows_over_keys


def attention_rows(query: Tensor, key: Tensor, index: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Causal attention of some query tokens over all tokens, float32.

    Args:
        query: rotated queries [B, H, M, d].
        key: rotated keys [B, K, N, d].
        index: token index of each query [B, M].
        mask: True for real tokens [B, N].
        scaling: factor on q.k.

    Returns:
        Probabilities [B, H, M, N].
    """
    visible = mask[:, None] & (torch.arange(key.shape[2], device=key.device) <= index[..., None])  # [B, M, N]
    return rows_over_keys(query, key, visible[:, None, None], scaling).flatten(1, 2)


def far_share(attention: Tensor, index: Tensor, mask: Tensor, distance: Tensor, sinks: int) -> Tensor:
    """Share of a query's attention that lies `distance` or more tokens before it, averaged over heads.

    The first `sinks` tokens of a document are left out: heads with nothing to look for rest on them, which is not a
    long-range need.

    Args:
        attention: [B, H, M, N].
        index: token index of each query [B, M].
        mask: True for real tokens [B, N].
        distance: tokens [B].
        sinks: first real tokens that do not count.

    Returns:
        [B, M].
    """
    position = mask.long().cumsum(dim=1)  # from 1 for the first real token
    token = torch.arange(mask.shape[1], device=mask.device)
    far = (token <= index[..., None] - distance[:, None, None]) & (position > sinks)[:, None]  # [B, M, N]
    return (attention * far[:, None]).sum(dim=-1).mean(dim=1)


def mine(
    queries: list[Tensor], keys: list[Tensor], mask: Tensor, scaling: float, *, count: int, distance: int, sinks: int
) -> Tensor:
    """The window queries with the highest share of attention far before them.

    Args:
        queries: rotated window queries [B, H, Q, d] of the layers to look at; a strided subset of layers is enough to
            rank positions.
        keys: their rotated keys [B, K, N, d].
        mask: True for real tokens [B, N].
        scaling: factor on q.k.
        count: queries to mine, at most Q.
        distance: tokens that count as near; at most half the context in a document that is shorter.
        sinks: first tokens of the document that do not count.

    Returns:
        Window positions in ascending order [B, count], each in [0, Q).
    """
    window, n = queries[0].shape[2], mask.shape[1]
    index = torch.arange(n - window, n, device=mask.device).expand(mask.shape[0], -1)
    half = (mask.sum(dim=1) - window).div(2, rounding_mode="floor").clamp_min(1)
    near = half.clamp_max(distance)
    share = torch.stack(
        [
            far_share(attention_rows(q, k, index, mask, scaling), index, mask, near, sinks)
            for q, k in zip(queries, keys, strict=True)
        ]
    ).mean(dim=0)
    return share.topk(min(count, window), dim=-1).indices.sort(dim=-1).values


def row_of_token(
    exact_index: Tensor, exact_mask: Tensor, span_start: Tensor, span_length: Tensor, span_mask: Tensor, n_context: int
) -> Tensor:
    """Which row of the memory each context token belongs to: rows are the E exact tokens, then the S spans.

    Args:
        exact_index: token indices of exact rows [B, E].
        exact_mask: True for real exact rows [B, E].
        span_start: first token of each span, ascending [B, S].
        span_length: tokens per span [B, S].
        span_mask: True for real spans, all before the padded ones [B, S].
        n_context: C.

    Returns:
        Row numbers [B, C] in [0, E + S]; E + S means no row (padding).
    """
    batch, n_exact = exact_index.shape
    n_spans = span_start.shape[1]
    token = torch.arange(n_context, device=exact_index.device).expand(batch, -1)
    row = torch.full_like(token, n_exact + n_spans)
    if n_spans:
        start = span_start.masked_fill(~span_mask, n_context).contiguous()
        nearest = (
            torch.searchsorted(start, token.contiguous(), right=True) - 1
        )  # the last span that starts at or before the token
        found = nearest.clamp_min(0)
        inside = (nearest >= 0) & (token < (start + span_length).gather(1, found))
        row = torch.where(inside, n_exact + found, row)
    spare = torch.cat([row, row.new_zeros(batch, 1)], dim=1)  # padded exact rows write into the extra column
    slots = torch.arange(n_exact, device=row.device).expand(batch, -1)
    return spare.scatter(1, exact_index.masked_fill(~exact_mask, n_context), slots)[:, :n_context]


def row_mass(attention: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """Attention mass per row of the memory, and on the window as one last row.

    Args:
        attention: [B, H, M, N].
        row: row number of each context token [B, C], `n_rows` for none.
        n_rows: rows of the memory, E + S.

    Returns:
        [B, H, M, E + S + 1].
    """
    n_context = row.shape[1]
    context = attention[..., :n_context]
    mass = attention.new_zeros(*attention.shape[:3], n_rows + 1)
    mass.scatter_add_(-1, row[:, None, None].expand_as(context), context)
    mass[..., n_rows] = attention[..., n_context:].sum(
        dim=-1
    )  # padding has no attention: its slot is free for the window
    return mass
