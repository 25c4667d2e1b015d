"""Mixed-resolution attention: one softmax over rows of every kind, for training and inference (method section 1.4).

Also the plain attention probabilities of a few queries, which scores and teachers are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_BYTES = 64 * 2**20  # float32 probabilities that may exist at once


@dataclass(frozen=True)
class RowSet:
    """Rows of one kind that queries attend to.

    Dimensions: B batch, K KV heads, G query heads per KV head, Q queries, R rows, d head dimension.

    Attributes:
        key: [B, K, R, d].
        value: [B, K, R, d].
        bias: added to the logits, float32, broadcastable to [B, K, G, Q, R]; log|S| for summaries. With `merge` it is
            added to the merged rows' logits.
        visible: rows a query may see, bool, broadcastable to [B, K, G, Q, R]; None shows all.
        gate: weights in [0, 1] on the rows' exponentials, float32, broadcastable to [B, K, G, Q, R]. A hard gate with a
            straight-through gradient trains the decision; it equals `visible` in the forward pass.
        merge: rows are averaged into fewer before the softmax; then there is no `visible` and no `gate`.
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    visible: Tensor | None = None
    gate: Tensor | None = None
    merge: Merge | None = None


@dataclass(frozen=True)
class Merge:
    """Rows that stand for several tokens each are attended to as fewer rows: averages, weighted by those tokens.

    The logit of a mean key is the mean of the logits, so no mean is ever formed, whatever each query leaves out. A
    merged row has log(tokens) added to its logit.

    Attributes:
        row: merged row of each row [B, R].
        n_rows: merged rows M.
        weight: tokens each row stands for, float32, 0 to leave it out, broadcastable to [B, K, G, Q, R].
    """

    row: Tensor
    n_rows: int
    weight: Tensor

    def logits(self, logits: Tensor) -> Tensor:
        """Logits of the merged rows [B, K, G, Q, M], from those of the rows [B, K, G, Q, R]."""
        tokens, weighted = self._tokens(logits), self._sum(self.weight * logits)
        empty = tokens <= 0
        safe = tokens.masked_fill(empty, 1.0)
        return (weighted / safe + safe.log()).masked_fill(empty, -torch.inf)

    def spread(self, mass: Tensor, like: Tensor) -> Tensor:
        """The mass of merged rows [B, K, G, Q, M] on the rows they stand for, [B, K, G, Q, R] as `like`."""
        per_token = mass / self._tokens(like).clamp_min(torch.finfo(torch.float32).tiny)
        return per_token.gather(-1, self._index(like)) * self.weight

    def _tokens(self, like: Tensor) -> Tensor:
        return self._sum(self.weight.expand(*self.weight.shape[:-1], like.shape[-1]))

    def _sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.n_rows).scatter_add(-1, self._index(x), x)

    def _index(self, like: Tensor) -> Tensor:
        return self.row[:, None, None, None].expand(*like.shape[:-1], -1)


def mixed_attention(query: Tensor, row_sets: list[RowSet], scaling: float) -> tuple[Tensor, list[Tensor]]:
    """Attends to all rows of all sets in one softmax.

    Args:
        query: [B, H, Q, d] with H = K * G.
        row_sets: at least one; every query must see at least one row.
        scaling: factor on q.k.

    Returns:
        The output [B, H, Q, d] in the query's dtype, and per set the attention mass [B, K, G, Q, R] in float32.
    """
    batch, heads, n_queries, dim = query.shape
    kv_heads = row_sets[0].key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * n_queries, dim)
    shape = (batch, kv_heads, heads // kv_heads, n_queries, -1)
    per_row = [_logits(grouped, rows, shape, scaling) for rows in row_sets]
    per_set = [_merged(logits, rows) for logits, rows in zip(per_row, row_sets, strict=True)]
    logits = torch.cat(per_set, dim=-1)
    # A query without visible rows (padding of a batch) gets zeros instead of NaN.
    peak = logits.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(logits - peak)
    sizes = [logits.shape[-1] for logits in per_set]
    if any(rows.gate is not None for rows in row_sets):
        parts = zip(weights.split(sizes, dim=-1), row_sets, strict=True)
        weights = torch.cat([w if rows.gate is None else w * rows.gate for w, rows in parts], dim=-1)
    mass = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    masses = [
        m if rows.merge is None else rows.merge.spread(m, like)
        for m, rows, like in zip(mass.split(sizes, dim=-1), row_sets, per_row, strict=True)
    ]
    output = sum(
        m.reshape(batch, kv_heads, -1, m.shape[-1]) @ rows.value.float()
        for m, rows in zip(masses, row_sets, strict=True)
    )
    assert isinstance(output, Tensor)
    return output.reshape(batch, heads, n_queries, -1).to(query.dtype), masses


def packed_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """`mixed_attention` of one query token over rows that lie in one tensor: no copies, no masses, no gradient needed.

    Args:
        query: [B, H, 1, d] with H = K * G.
        key: [B, K, R, d].
        value: [B, K, R, d].
        bias: added to the logits, float32 [B, K, 1 or G, R]; -inf hides a row. Every query must see at least one.
        scaling: factor on q.k.

    Returns:
        [B, H, 1, d] in the query's dtype; logits and softmax are float32 inside the kernel, whatever that is.
    """
    batch, heads, _, dim = query.shape
    # The heads of a group read the same rows: they are the query axis, and keys are not repeated.
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scaling)
    return output.reshape(batch, heads, 1, -1)


def _logits(grouped: Tensor, rows: RowSet, shape: tuple[int, ...], scaling: float) -> Tensor:
    # In float32 from the start: half precision would round the logits, and overflow on large queries.
    logits = ((grouped * scaling) @ rows.key.float().mT).reshape((*shape[:-1], rows.key.shape[2]))
    if rows.bias is not None and rows.merge is None:
        logits = logits + rows.bias
    if rows.visible is not None:
        logits = logits.masked_fill(~rows.visible, -torch.inf)
    return logits


def log_sum(query: Tensor, row_sets: list[RowSet], scaling: float) -> Tensor:
    """Logarithm of the softmax's denominator over the rows of all sets, -inf where a query sees none.

    Args:
        query: [B, H, Q, d] with H = K * G.
        row_sets: not merged and not gated.
        scaling: factor on q.k.

    Returns:
        [B, H, Q] float32.
    """
    batch, heads, n_queries, dim = query.shape
    kv_heads = row_sets[0].key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, -1, dim)
    shape = (batch, kv_heads, heads // kv_heads, n_queries, -1)
    logits = torch.cat([_logits(grouped, rows, shape, scaling) for rows in row_sets], dim=-1)
    return logits.logsumexp(dim=-1).reshape(batch, heads, n_queries)


def _merged(logits: Tensor, rows: RowSet) -> Tensor:
    """A set's logits as they enter the softmax."""
    if rows.merge is None:
        return logits
    merged = rows.merge.logits(logits)
    return merged if rows.bias is None else merged + rows.bias


def attention_rows(query: Tensor, key: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Attention probabilities of some queries over some keys; keys are not repeated to query heads.

    Args:
        query: rotated queries [B, H, Q, d] with H = K * G.
        key: rotated keys [B, K, R, d].
        visible: keys a query may see, bool, broadcastable to [B, K, G, Q, R]; a query that sees none gets finite values
            without meaning.
        scaling: factor on q.k.

    Returns:
        Float32 [B, K, G, Q, R].
    """
    batch, heads, n_queries, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * n_queries, dim) * scaling
    logits = (grouped @ key.float().mT).reshape(batch, kv_heads, heads // kv_heads, n_queries, key.shape[2])
    return logits.masked_fill_(~visible, torch.finfo(torch.float32).min).softmax(dim=-1)


def query_blocks(n_queries: int, rows: int) -> Iterator[slice]:
    """Slices of `n_queries` queries, so that the probabilities of a block stay within about 64 MiB.

    Args:
        n_queries: Q.
        rows: probabilities per query over all batch rows and heads, B * H * R.
    """
    size = max(1, _BLOCK_BYTES // (4 * max(1, rows)))
    for start in range(0, n_queries, size):
        yield slice(start, min(n_queries, start + size))
