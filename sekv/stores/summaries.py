"""Summary rows at inference: what stands for the spans that a query does not zoom into.

Neighbouring spans share a row: the mean of their summaries, weighted by tokens, without the spans that are zoomed into.
So nothing is dropped and nothing counts twice, whatever the choice. With `summary_share=1` every span has its own row.
Where rows are shared, the summaries of single spans are needed only to take a zoomed span out of its row: they may lie
on the host, beside what the span is rebuilt from.

Dimensions: B batch, K KV heads, G query heads per KV head, Q queries, S spans, M summary rows, d head dimension.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sekv import kernels
from sekv.attention import Merge, RowSet
from sekv.host import Index, to_host
from sekv.segmentation import Segmentation
from sekv.stores.base import ExactRows


class Summaries:
    """Summaries of one layer's spans and the rows they are merged into.

    Args:
        key: summary keys [B, K, S, d].
        value: [B, K, S, d].
        segmentation: lengths of the spans and the row of each.
        bias: added to the logits of summary rows, one number or one for each query head [H].
        n_rows: M, at least as many as the segmentation has; None: as many. Rows that stand for nothing are never seen.
        offload: keep the summaries of single spans on the host; needs shared rows.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        segmentation: Segmentation,
        bias: float | Tensor,
        n_rows: int | None = None,
        offload: bool = False,
    ) -> None:
        batch, kv_heads, n_spans, dim = key.shape
        self.merged, self.offloaded = segmentation.merged, offload and segmentation.merged
        self._length, self._row = segmentation.span_length, segmentation.span_row
        key, value = (x.to(self._length.device) for x in (key, value))
        self.key, self.value = (to_host(x) if self.offloaded else x for x in (key, value))
        self.n_rows = n_rows or max(1, int(segmentation.summary_rows.max()))
        per_head = torch.as_tensor(bias, dtype=torch.float32, device=self._length.device).detach()
        self._bias = per_head.expand(kv_heads) if per_head.ndim == 0 else per_head
        self._bias = self._bias.reshape(1, kv_heads, -1, 1, 1)  # [1, K, G or 1, 1, 1]
        self._host_bias = self._bias.flatten(2).expand(batch, -1, -1).flatten(0, 1)[..., None].cpu().numpy()

        tokens = self._length.float()[:, None, :, None]  # [B, 1, S, 1]
        index = self._row[:, None, :, None].expand(batch, kv_heads, n_spans, dim)
        self._sums = [
            torch.zeros(batch, kv_heads, self.n_rows, dim, device=self._length.device).scatter_add(
                2, index, x.float() * tokens
            )
            for x in (key, value)
        ]
        length, row = (x.repeat_interleave(kv_heads, dim=0).cpu().numpy() for x in (self._length, self._row))
        self._tokens = np.zeros((batch * kv_heads, self.n_rows), dtype=np.int64)  # of each row
        np.add.at(self._tokens, (np.arange(len(row))[:, None], row), length)
        self._host_length, self._host_row = length, row  # [B * K, S]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows before any zoom [B, K, M, d], in the summaries' dtype."""
        tokens = torch.from_numpy(self._tokens).to(self._length.device).view(*self.key.shape[:2], -1, 1)
        key, value = (x / tokens.clamp_min(1) for x in self._sums)
        return key.to(self.key.dtype), value.to(self.value.dtype)

    def tokens_left(self, chosen: Index) -> Index:
        """Tokens that each row stands for when some spans are zoomed into.

        Args:
            chosen: bool [B * K, C, S], any number C of choices.

        Returns:
            [B * K, C, M].
        """
        return kernels.tokens_left(chosen, self._tokens, self._host_row, self._host_length)

    def logit_bias(self, left: Index) -> Index:
        """What is added to the logits of the rows, -inf where no token is left.

        Args:
            left: `tokens_left` of one choice or several [B * K, C, M]; several only where no row is shared.

        Returns:
            [B * K, C or G, M] float32.
        """
        with np.errstate(divide="ignore"):
            found: Index = np.log(left, dtype=np.float32) + self._host_bias
        return found

    @cached_property
    def _on_host(self) -> list[tuple[kernels.Floats, kernels.Floats]]:
        """Sums [B * K, M, d] and summaries [B * K, S, d], of keys and of values, for compiled loops."""
        pairs = zip(self._sums, (self.key, self.value), strict=True)
        return [(total.flatten(0, 1).numpy(), x.flatten(0, 1).numpy()) for total, x in pairs]

    def write_without(self, chosen: Index, left: Index, rows: ExactRows, first: int) -> None:
        """Brings the rows from `first` on to what is left when some spans are zoomed into; needs shared rows.

        Args:
            chosen: bool [B * K, S].
            left: `tokens_left` of them [B * K, M].
            rows: written.
            first: where the M rows begin.
        """
        if not rows.compiled:
            rows.overwrite(first, *self._rows_without(chosen, left))
            return
        for (total, summary), out in zip(self._on_host, rows.buffers(write=True), strict=True):
            kernels.rows_without(total, summary, chosen, left, self._host_row, self._host_length, out, first)

    def _rows_without(self, chosen: Index, tokens: Index) -> tuple[Tensor, Tensor]:
        device, shape = self._length.device, self._sums[0].shape
        group, span = np.nonzero(chosen)
        target = torch.from_numpy(group * self.n_rows + self._host_row[group, span]).to(device)
        source = torch.from_numpy(group * chosen.shape[1] + span).to(self.key.device)
        weight = torch.from_numpy(self._host_length[group, span].astype(np.float32)).to(device)[:, None]
        left = torch.from_numpy(np.maximum(tokens, 1)).to(device).view(*shape[:3], 1)
        result = []
        for total, x in zip(self._sums, (self.key, self.value), strict=True):
            gone = x.flatten(0, 2).index_select(0, source).to(device, non_blocking=True).float() * weight
            sums = total.flatten(0, 2).index_add(0, target, gone, alpha=-1.0).view(shape)
            result.append((sums / left).to(x.dtype))
        return result[0], result[1]

    def row_set(self, zoomed: Tensor) -> RowSet:
        """The rows of many queries at once, for `mixed_attention`.

        Args:
            zoomed: spans each query zooms into [B, K, 1 or G, Q, S].
        """
        weight = self._length[:, None, None, None] * ~zoomed
        key, value = (x.to(self._length.device, non_blocking=True) for x in (self.key, self.value))
        return RowSet(key, value, bias=self._bias, merge=Merge(self._row, self.n_rows, weight.float()))

    def crossing_bytes(self, chosen: Index) -> int:
        """Bytes that come from the host to answer: of the chosen spans for one token, of all for several.

        Args:
            chosen: bool [B * K, C, Q, S].
        """
        if not self.offloaded:
            return 0
        n = int(chosen.sum()) if chosen.shape[2] == 1 else self.key.shape[:3].numel()
        return 2 * n * self.key.shape[3] * self.key.element_size()

    def tensors(self) -> list[Tensor | None]:
        """The live tensors on the compute tier."""
        return [*self._sums, *([] if self.offloaded else [self.key, self.value])]

    def host_tensors(self) -> list[Tensor]:
        """Bookkeeping, and the summaries if they are offloaded."""
        tables = [torch.from_numpy(x) for x in (self._tokens, self._host_length, self._host_row)]
        return [*tables, *([self.key, self.value] if self.offloaded else [])]
