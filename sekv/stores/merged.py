"""Rows that stand for several tokens each, answered with their size in the logit (proportional attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.attention import RowSet, mixed_attention
from sekv.stores.base import ExactRows, Store, causal_tail_mask


class MergedStore(Store):
    """Keeps means of groups of tokens; a row of m tokens counts m times in the softmax.

    Dimensions: B batch, K KV heads, R rows, d head dimension.

    Args:
        key: mean keys [B, K, R, d].
        value: mean values [B, K, R, d].
        size: tokens behind each row [B, K, R], 0 where there is no row.
        lengths: true tokens of each context [B].
    """

    def __init__(self, key: Tensor, value: Tensor, size: Tensor, lengths: Tensor) -> None:
        # The empty context part of the exact rows: here they hold the tail only.
        super().__init__(ExactRows(*(t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (key, value))), lengths)
        self.merged_key, self.merged_value = key, value
        self.log_size = size.float().log()  # [B, K, R], -inf where there is no row
        self.rows_per_head = (size > 0).sum(dim=-1)  # [B, K]
        self._rows = int(self.rows_per_head.sum())

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """One softmax over merged rows and the visible tail."""
        self.meter.queries += query.shape[0] * query.shape[2] * self.merged_key.shape[1]
        self.meter.rows += float(self._rows) * query.shape[2]
        if tail_mask is None:
            tail_mask = causal_tail_mask(query.shape[2], self.tail_length, query.device)
        visible = None if tail_mask is None else tail_mask[:, :, None]
        merged = RowSet(self.merged_key, self.merged_value, bias=self.log_size[:, :, None, None])
        tail = RowSet(self.exact.key, self.exact.value, visible=visible)
        return mixed_attention(query, [merged, tail], scaling)[0]

    @classmethod
    def restored(cls, state: dict[str, Tensor], lengths: Tensor) -> MergedStore:
        """The store of contexts of these lengths whose `state` this is."""
        return cls(state["key"], state["value"], state["size"], lengths)

    def state(self) -> dict[str, Tensor]:
        """Merged rows and their sizes."""
        return {"key": self.merged_key, "value": self.merged_value, "size": self.log_size.exp().round().long()}

    def resident_tensors(self) -> list[Tensor | None]:
        """Merged rows, their sizes, and the tail."""
        return [self.merged_key, self.merged_value, self.log_size, self.rows_per_head, *self.exact.tensors()]


def merge_rows(x: Tensor, row: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Means of the tokens that share a row, summed in float32.

    Args:
        x: keys or values [B, K, N, d].
        row: the row of each token [B, K, N]; `n_rows` for tokens that belong to none.
        n_rows: R.

    Returns:
        Means [B, K, R, d] in the dtype of `x`, zero for empty rows, and sizes [B, K, R].
    """
    batch, kv_heads, _, dim = x.shape
    size = torch.zeros(batch, kv_heads, n_rows + 1, device=x.device)
    size.scatter_add_(2, row, torch.ones_like(row, dtype=torch.float32))
    total = torch.zeros(batch, kv_heads, n_rows + 1, dim, device=x.device)
    total.scatter_add_(2, row[..., None].expand(-1, -1, -1, dim), x.float())
    mean = total[:, :, :n_rows] / size[:, :, :n_rows, None].clamp_min(1)
    return mean.to(x.dtype), size[:, :, :n_rows].long()
