"""Reading a memory whose spans lie on the host: fetch what a query chose, one softmax over all it may see.

The context part of a layer's `ExactRows` is laid out as [exact rows | summary rows | slots]; the tail follows. Exact
rows never change, summary rows follow the step's choice. The slots hold rebuilt rows of the spans that single-token
steps chose, and stay filled from step to step, so that a step fetches only what it did not choose before.

Dimensions: B batch, K KV heads, H = G * K query heads, Q queries, S spans, E exact rows, M summary rows, C slots, T
tail tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sekv import kernels
from sekv.attention import RowSet, mixed_attention, packed_attention
from sekv.bank_chain import BankChain
from sekv.host import FactorBank, Index, ranges
from sekv.stores.base import ExactRows, Meter, causal_tail_mask
from sekv.stores.slots import SlotTable
from sekv.stores.summaries import Summaries

_AHEAD = 4  # rows fetched ahead take at most this part of the slots of all KV heads


@dataclass(frozen=True)
class Ahead:
    """Spans fetched before they are wanted; they leave the compute tier with the next step, wanted or not.

    Attributes:
        spans: their numbers, ascending [M].
        key: their rows [P, d].
        value: likewise.
    """

    spans: Index
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Choice:
    """What a single-token step chose, for the steps that keep to it.

    Attributes:
        bias: added to the logits of the context part of the rows [B, K, 1 or G, n_context] float32.
        rows: context rows attended to, as a meter counts them.
        wanted: those of them that lie in slots.
    """

    bias: Tensor
    rows: float
    wanted: int


class SpanReader:
    """Answers queries whose spans have been chosen.

    Args:
        bank: the spans' rows on the host.
        length: tokens per span [B, S]; 0 where there is none.
        bias: added to the logits of exact rows [B, E] float32: -inf where a row is not real, 0 elsewhere.
        kv_heads: K.
        capacity: C, rows of slots per KV head; at least the most rows a single query's choice can have.
        summaries: what stands for spans that are not chosen; None where nothing does.
    """

    def __init__(
        self,
        bank: FactorBank | BankChain,
        length: Tensor,
        bias: Tensor,
        kv_heads: int,
        capacity: int,
        summaries: Summaries | None = None,
    ) -> None:
        self.bank, self.summaries, self.n_exact = bank, summaries, bias.shape[1]
        self.n_persistent = self.n_exact + (summaries.n_rows if summaries is not None else 0)
        self._batch, self._kv_heads = len(length), kv_heads
        self._bias = bias
        per_group = [x.repeat_interleave(kv_heads, dim=0).cpu().numpy() for x in (length, bias)]
        self._length, self._group_bias = per_group  # [B * K, S], [B * K, E or E + S]
        self._n_exact_rows = int((bias > -torch.inf).sum()) * kv_heads  # of all groups
        self.slots = SlotTable(self._length, capacity)
        self._ahead: Ahead | None = None
        self._choice: Choice | None = None

    def fork(self) -> SpanReader:
        """A reader of the same bank with empty slots, for rows of its own."""
        twin = copy.copy(self)
        twin.slots, twin._ahead, twin._choice = self.slots.fresh(), None, None
        return twin

    def extended(self, bank: BankChain, length: Tensor, capacity: int, summaries: Summaries) -> SpanReader:
        """A reader with more spans behind those of this one, which keeps what its slots hold.

        Args:
            bank: of all spans.
            length: tokens per span [B, S + new].
            capacity: C, at least as many as before.
            summaries: of all spans, in as many rows as before.
        """
        assert self.summaries is not None and summaries.n_rows == self.summaries.n_rows
        twin = copy.copy(self)
        twin.bank, twin.summaries = bank, summaries
        twin._length = length.repeat_interleave(self._kv_heads, dim=0).cpu().numpy()
        twin.slots, twin._choice = self.slots.extended(twin._length, capacity), None
        return twin

    def layout(self, key: Tensor, value: Tensor) -> ExactRows:
        """Rows [exact | summary rows | empty slots] from exact rows [B, K, E, d]."""
        summaries = (None, None) if self.summaries is None else self.summaries.rows()

        def packed(exact: Tensor, summary: Tensor | None) -> Tensor:
            slots = exact.new_zeros(*exact.shape[:2], self.slots.capacity, exact.shape[3])
            return torch.cat([exact, *([] if summary is None else [summary]), slots], dim=2)

        return ExactRows(packed(key, summaries[0]), packed(value, summaries[1]))

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
        attended = (
            self._n_exact_rows * n_queries + float((chosen * self._length[:, None, None]).sum()) / chosen.shape[1]
        )
        left = None
        if self.summaries is not None:
            left = self.summaries.tokens_left(chosen.reshape(len(chosen), -1, chosen.shape[-1]))
            attended += float((left > 0).sum()) / chosen.shape[1]
            meter.moved_bytes += self.summaries.crossing_bytes(chosen)
        meter.queries += self._batch * self._kv_heads * n_queries
        meter.rows += attended
        if n_queries == 1:
            self._choice = self._prepare(chosen[:, :, 0], left, attended, rows, meter)
            return self._step(query, scaling, self._choice, rows, tail_mask)
        self._choice = None
        sets = [*self.exact_sets(rows, n_queries, tail_mask), *self._span_sets(zoomed, chosen, rows, meter)]
        return mixed_attention(query, sets, scaling)[0]

    def attend_again(
        self, query: Tensor, scaling: float, rows: ExactRows, tail_mask: Tensor | None, meter: Meter
    ) -> Tensor | None:
        """As `attend` for a single token, with the spans that the token before chose; None when it chose none."""
        choice = self._choice
        if choice is None:
            return None
        meter.queries += self._batch * self._kv_heads
        meter.rows += choice.rows
        meter.wanted_rows += choice.wanted
        meter.reused_rows += choice.wanted
        return self._step(query, scaling, choice, rows, tail_mask)

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

    def log_exact(self, query: Tensor, scaling: float, rows: ExactRows, tail_mask: Tensor | None) -> Tensor:
        """Log-sum of the exponentials over exact rows and tail for a single token [B, H, 1] float32.

        One product with all rows, of which summaries and slots are left out, costs less than picking the others.
        """
        batch, heads, _, dim = query.shape
        grouped = query.reshape(batch, self._kv_heads, -1, dim).float() * scaling
        if rows.compiled:
            asked, keys = grouped.flatten(0, 1).numpy(), rows.buffers()[0]
            unseen = self._unseen(rows, tail_mask)
            found = kernels.exact_log_sum(asked, keys, rows.n_context, self._group_bias, unseen)
            return torch.from_numpy(found).view(batch, heads, 1)
        logits = grouped @ rows.key.float().mT
        logits[..., self.n_exact : rows.n_context] = -torch.inf
        logits[..., : self.n_exact] += self._bias[:, None, None]
        if tail_mask is not None:
            logits[..., rows.n_context :].masked_fill_(~tail_mask, -torch.inf)
        return logits.logsumexp(dim=-1).view(batch, heads, 1)

    def _prepare(self, chosen: Index, left: Index | None, attended: float, rows: ExactRows, meter: Meter) -> Choice:
        """Brings what one query token chose [B * K, 1 or G, S] into `rows`."""
        wanted: Index = chosen[:, 0] if chosen.shape[1] == 1 else np.asarray(chosen.any(axis=1))
        self._hold(wanted, rows, meter)
        added = None if self.summaries is None or left is None else self.summaries.logit_bias(left)
        n_choices = chosen.shape[1] if added is None else added.shape[1]
        bias = np.empty((len(chosen), n_choices, rows.n_context), dtype=np.float32)
        bias[..., : self.n_exact] = self._group_bias[:, None]
        if added is not None:
            bias[..., self.n_exact : self.n_persistent] = added
        if self.summaries is not None and self.summaries.merged and left is not None:
            self.summaries.write_without(chosen[:, 0], left[:, 0], rows, self.n_exact)
        bias[..., self.n_persistent :] = np.where(self.slots.visible(chosen), np.float32(0.0), np.float32(-np.inf))
        on_device = torch.from_numpy(bias).view(self._batch, self._kv_heads, n_choices, -1).to(rows.key.device)
        return Choice(on_device, attended, int((wanted * self._length).sum()))

    def _step(self, query: Tensor, scaling: float, choice: Choice, rows: ExactRows, tail_mask: Tensor | None) -> Tensor:
        """One query token: everything it may see lies in `rows` once its spans are in slots."""
        if rows.compiled:
            asked = (query.float() * scaling).view(len(self._length), -1, query.shape[3]).numpy()
            bias, unseen = choice.bias.flatten(0, 1).numpy(), self._unseen(rows, tail_mask)
            found = kernels.attend(asked, *rows.buffers(), rows.n_context, bias, unseen)
            return torch.from_numpy(found).view(*query.shape[:3], -1).to(query.dtype)
        padded = torch.nn.functional.pad(choice.bias, (0, rows.tail_length))
        if tail_mask is not None:
            padded[..., rows.n_context :].masked_fill_(~tail_mask, -torch.inf)
        return packed_attention(query, rows.key, rows.value, padded, scaling)

    def _unseen(self, rows: ExactRows, tail_mask: Tensor | None) -> kernels.Flags:
        """Tail tokens that a single token must not see [B * K, T], on the CPU."""
        unseen = np.zeros((self._batch, self._kv_heads, rows.tail_length), dtype=bool)
        if tail_mask is not None:
            unseen[:] = ~tail_mask[:, :, 0].numpy()
        return unseen.reshape(self._batch * self._kv_heads, rows.tail_length)

    def _hold(self, wanted: Index, rows: ExactRows, meter: Meter) -> None:
        """Brings the wanted spans [B * K, S] into slots."""
        ahead, self._ahead = self._ahead, None
        missing = self.slots.admit(wanted)
        n_wanted = int((wanted * self._length).sum())
        meter.wanted_rows += n_wanted
        meter.reused_rows += n_wanted
        if missing is None:
            return
        meter.reused_rows -= len(missing.slot)
        place_of = missing.slot + self.n_persistent
        if ahead is None and rows.compiled and isinstance(self.bank, FactorBank):
            moved = self.bank.rebuild_into(missing.spans, missing.group, place_of, *rows.buffers(write=True))
            if moved is not None:
                meter.moved_bytes += moved
                return
        device = rows.key.device
        key, value = self._fetch(missing.spans, ahead, device, meter)
        group, place = (torch.from_numpy(x).to(device) for x in (missing.group, place_of))
        rows.write(group, place, key, value)

    def _fetch(self, spans: Index, ahead: Ahead | None, device: torch.device, meter: Meter) -> tuple[Tensor, Tensor]:
        """Rows of spans [M] behind one another, those that are there already without the way from the host."""
        known = np.isin(spans, ahead.spans) if ahead is not None else np.zeros(len(spans), dtype=bool)
        rest = spans[~known]
        parts: list[tuple[Index, Tensor, Tensor]] = []
        if ahead is not None and known.any():
            parts.append((ahead.spans, ahead.key, ahead.value))
        if len(rest):
            key, value, moved = self.bank.fetch(rest, device)
            meter.moved_bytes += moved
            parts.append((rest, key, value))
        if len(parts) == 1 and parts[0][0] is rest:
            return parts[0][1], parts[0][2]
        # Those fetched ahead lie first, then the rest: where the rows of each span begin there.
        length = self._length.ravel()
        meter.ahead_used_rows += int(length[spans[known]].sum())
        there = np.concatenate([part[0] for part in parts])
        begin = length[there].cumsum() - length[there]
        by_number = np.argsort(there)
        place = by_number[np.searchsorted(there, spans, sorter=by_number)]
        order = torch.from_numpy(ranges(begin[place], length[spans])).to(device)
        keys, values = [part[1] for part in parts], [part[2] for part in parts]
        return torch.cat(keys).index_select(0, order), torch.cat(values).index_select(0, order)

    def fetch_ahead(self, likely: Index, device: torch.device, meter: Meter) -> None:
        """Fetches what the next step may want and the slots do not hold.

        Args:
            likely: bool [B * K, S].
            device: of the slots.
            meter: counts bytes and rows.
        """
        spans = np.flatnonzero(likely & ~self.slots.held)
        rows = self._length.ravel()[spans].cumsum()
        spans = spans[rows <= len(likely) * self.slots.capacity // _AHEAD]
        if not len(spans):
            return
        key, value, moved = self.bank.fetch(spans, device)
        meter.moved_bytes += moved
        meter.ahead_rows += len(key)
        self._ahead = Ahead(spans, key, value)

    def _span_sets(self, zoomed: Tensor, chosen: Index, rows: ExactRows, meter: Meter) -> list[RowSet]:
        """Summaries and rebuilt rows for many queries: fetched once for all of them, and not kept."""
        batch, kv_heads, n_spans, device = self._batch, self._kv_heads, zoomed.shape[-1], zoomed.device
        per_group = zoomed.view(batch, kv_heads, -1, *zoomed.shape[2:])  # [B, K, 1 or G, Q, S]
        sets = []
        if self.summaries is not None:
            sets.append(self.summaries.row_set(per_group))
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

    def tensors(self) -> list[Tensor]:
        """What was fetched ahead and lies on the compute tier until the next step."""
        return [] if self._ahead is None else [self._ahead.key, self._ahead.value]

    def host_tensors(self) -> list[Tensor | None]:
        """The bank and the bookkeeping of slots and summary rows."""
        summaries = [] if self.summaries is None else self.summaries.host_tensors()
        return [*self.bank.tensors(), *self.slots.tensors(), *summaries, torch.from_numpy(self._length)]
