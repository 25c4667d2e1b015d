"""The full cache: every row exact, answered by sdpa."""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.stores.base import ExactRows, Store


class FullStore(Store):
    """Keeps every token of the context.

    Args:
        key: [B, K, N, d], rotated.
        value: [B, K, N, d].
        mask: True for real tokens [B, N].
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Tensor) -> None:
        padded = not bool(mask.all())
        super().__init__(ExactRows(key, value, mask if padded else None), mask.sum(dim=1))

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Plain attention over the context and the tail."""
        kv_heads = self.exact.key.shape[1]
        self.meter.queries += query.shape[0] * query.shape[2] * kv_heads
        self.meter.rows += float(self.lengths.sum()) * query.shape[2] * kv_heads
        mask = self.exact_mask(query.shape[2], tail_mask)
        batch, heads, n_queries, dim = query.shape
        if (
            n_queries == 1
        ):  # the heads of a group read the same rows: make them the query axis instead of repeating keys
            query = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, self.exact.key, self.exact.value, attn_mask=mask, scale=scaling, enable_gqa=n_queries > 1
        )
        return output.reshape(batch, heads, n_queries, -1)

    def resident_tensors(self) -> list[Tensor | None]:
        """The buffers."""
        return self.exact.tensors()
