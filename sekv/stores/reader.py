"""Reading a memory whose spans lie on the host: fetch what a query chose, one softmax over all it may see.

The context part of a layer's `ExactRows` is laid out as [exact rows | summaries | slots]; the tail follows. Exact rows
and summaries never change. The slots hold rebuilt rows of the spans that single-token steps chose, and stay filled from
step to step, so that a step fetches only what it did not choose before.

Dimensions: B batch, K KV heads, H = G * K query heads, Q queries, S spans, E exact rows, C slots, T tail tokens.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from sekv.attention import RowSet, mixed_attention, packed_attention
from sekv.host import FactorBank, Index
from sekv.stores.base import ExactRows, Meter, causal_tail_mask
from sekv.stores.slots import SlotTable


class SpanReader:
    """Answers queries whose spans have been chosen.

    Args:
        bank: the spans' rows on the host.
        length: tokens per span [B, S]; 0 where there is none.
        bias: added to the logits of exact rows and, where there are any, summaries [B, E or E + S] float32: log|S| for
            a summary, -inf where a row is not real.
        n_exact: E.
        kv_heads: K.
        capacity: C, rows of slots per KV head; at least the most rows a single query's choice can have.
    """

    def __init__(
        self, bank: FactorBank, length: Tensor, bias: Tensor, n_exact: int, kv_heads: int, capacity: int
    ) -> None:
        self.bank, self.n_exact, self.n_persistent = bank, n_exact, bias.shape[1]
        self._batch, self._kv_heads = len(length), kv_heads
        self._bias = bias
        per_group = [x.repeat_interleave(kv_heads, dim=0).cpu().numpy() for x in (length, bias)]
        self._length, self._group_bias = per_group  # [B * K, S], [B * K, E or E + S]
        # Persistent rows of all groups, and what a zoomed span adds to them.
        self._n_real = int((bias > -torch.inf).sum()) * kv_heads
        self._added = np.maximum(self._length - (self.n_persistent > n_exact), 0)
        self.slots = SlotTable(self._length, capacity)

    def fork(self) -> SpanReader:
        """A reader of the same bank with empty slots, for rows of its own."""
        twin = copy.copy(self)
        twin.slots = self.slots.fresh()
        return twin

    def layout(
        self, key: Tensor, value: Tensor, summary_key: Tensor | None = None, summary_value: Tensor | None = None
    ) -> ExactRows:
        """Rows [exact | summaries | empty slots] from exact rows [B, K, E, d] and summaries [B, K, S, d]."""

        def packed(exact: Tensor, summary: Tensor | None) -> Tensor:
            slots = exact.new_zeros(*exact.shape[:2], self.slots.capacity, exact.shape[3])
            return torch.cat([exact, *([] if summary is None else [summary]), slots], dim=2)

        return ExactRows(packed(key, summary_key), packed(value, summary_value))

    def attend(
        self, query: Tensor, scaling: float, zoomed: Tensor, rows: ExactRows, tail_mask: Tensor | None, meter: Meter
    ) -> Tensor:
        """One softmax over exact rows, summaries of spans not chosen, tokens of chosen ones, and the tail.

        Args:
            query: [B, H, Q, d].
            scaling: factor on q.k.
            zoomed: spans each query chose [B, K, Q, S], or [B, H, Q, S] for a choice per query head.
            rows: laid out by `layout`.
            tail_mask: True where a query may see a tail token [B, 1, Q, T]; None: plainly causal.
            meter: counts rows and bytes.

        Returns:
            [B, H, Q, d] in the query's dtype.
        """
        n_queries = query.shape[2]
        # [B * K, 1 or G, Q, S]
        chosen = zoomed.cpu().numpy().reshape(self._batch * self._kv_heads, -1, n_queries, zoomed.shape[-1])
        meter.queries += self._batch * self._kv_heads * n_queries
        meter.rows += self._n_real * n_queries + float((chosen * self._added[:, None, None]).sum()) / chosen.shape[1]
        if n_queries == 1:
            return self._step(query, scaling, chosen[:, :, 0], rows, tail_mask, meter)
        sets = [*self.exact_sets(rows, n_queries, tail_mask), *self._span_sets(zoomed, chosen, rows, meter)]
        return mixed_attention(query, sets, scaling)[0]

    def exact_sets(self, rows: ExactRows, n_queries: int, tail_mask: Tensor | None) -> list[RowSet]:
        """The exact context rows and the tail, for `mixed_attention`."""
        if tail_mask is None:
            tail_mask = causal_tail_mask(n_queries, rows.tail_length, rows.key.device)
        context, tail = slice(0, self.n_exact), slice(rows.n_context, None)
        bias = self._bias[:, None, None, None, context]
        return [
            RowSet(rows.key[:, :, context], rows.value[:, :, context], bias=bias),
            RowSet(
                rows.key[:, :, tail],
                rows.value[:, :, tail],
                visible=None if tail_mask is None else tail_mask[:, :, None],
            ),
        ]

    def _step(
        self, query: Tensor, scaling: float, chosen: Index, rows: ExactRows, tail_mask: Tensor | None, meter: Meter
    ) -> Tensor:
        """One query token: everything it may see lies in `rows` once its spans are in slots. `chosen` [B*K, 1|G, S]."""
        wanted: Index = chosen[:, 0] if chosen.shape[1] == 1 else np.asarray(chosen.any(axis=1))
        self._hold(wanted, rows, meter)
        bias = np.zeros((*chosen.shape[:2], rows.used), dtype=np.float32)
        bias[..., : self.n_persistent] = self._group_bias[:, None]
        if self.n_persistent > self.n_exact:
            bias[..., self.n_exact : self.n_persistent][chosen] = -np.inf
        bias[..., self.n_persistent : rows.n_context][~self.slots.visible(chosen)] = -np.inf
        on_device = torch.from_numpy(bias).view(self._batch, self._kv_heads, -1, rows.used).to(query.device)
        if tail_mask is not None:
            on_device[..., rows.n_context :].masked_fill_(~tail_mask, -torch.inf)
        return packed_attention(query, rows.key, rows.value, on_device, scaling)

    def _hold(self, wanted: Index, rows: ExactRows, meter: Meter) -> None:
        """Brings the wanted spans [B * K, S] into slots."""
        missing = self.slots.admit(wanted)
        n_wanted = int((wanted * self._length).sum())
        meter.wanted_rows += n_wanted
        meter.reused_rows += n_wanted
        if missing is None:
            return
        meter.reused_rows -= len(missing.slot)
        device = rows.key.device
        key, value, moved = self.bank.fetch(missing.spans, device)
        meter.moved_bytes += moved
        group, place = (torch.from_numpy(x).to(device) for x in (missing.group, missing.slot + self.n_persistent))
        rows.write(group, place, key, value)

    def _span_sets(self, zoomed: Tensor, chosen: Index, rows: ExactRows, meter: Meter) -> list[RowSet]:
        """Summaries and rebuilt rows for many queries: fetched once for all of them, and not kept."""
        batch, kv_heads, n_spans, device = self._batch, self._kv_heads, zoomed.shape[-1], zoomed.device
        per_group = zoomed.view(batch, kv_heads, -1, *zoomed.shape[2:])  # [B, K, 1 or G, Q, S]
        sets = []
        if self.n_persistent > self.n_exact:
            summary = slice(self.n_exact, self.n_persistent)
            bias = self._bias[:, None, None, None, summary]
            sets.append(RowSet(rows.key[:, :, summary], rows.value[:, :, summary], bias=bias, visible=~per_group))
        spans = np.flatnonzero(chosen.any(axis=(1, 2)))
        if not len(spans):
            return sets
        key, value, moved = self.bank.fetch(spans, device)
        meter.moved_bytes += moved
        # Pack the rows of each group behind one another [B * K, R]; empty places belong to no span, number S.
        length = self._length.ravel()[spans]
        group = np.repeat(spans // n_spans, length)
        counts = np.bincount(group, minlength=batch * kv_heads)
        n_rows = int(counts.max())
        first = np.arange(len(counts)) * n_rows - counts.cumsum() + counts
        place = torch.from_numpy(np.arange(len(group)) + first[group]).to(device)
        key, value = (
            x.new_zeros(len(counts) * n_rows, x.shape[1]).index_copy_(0, place, x).view(batch, kv_heads, n_rows, -1)
            for x in (key, value)
        )
        owner = torch.full((len(counts) * n_rows,), n_spans, device=device)
        owner[place] = torch.from_numpy(np.repeat(spans % n_spans, length)).to(device)
        index = owner.view(batch, kv_heads, 1, 1, n_rows).expand(*per_group.shape[:4], -1)
        sets.append(RowSet(key, value, visible=torch.nn.functional.pad(per_group, (0, 1)).gather(-1, index)))
        return sets

    def host_tensors(self) -> list[Tensor | None]:
        """The bank and the bookkeeping of the slots."""
        return [*self.bank.tensors(), *self.slots.tensors(), torch.from_numpy(self._length)]
