"""Which rebuilt rows lie where on the compute tier: bookkeeping of a bounded set of slots, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sekv import kernels
from sekv.host import Index


@dataclass(frozen=True)
class Missing:
    """Spans that a step wants and the slots do not hold.

    Attributes:
        spans: their numbers, row-major over (group, span) [M].
        group: the group of each of their rows [P].
        slot: the slot reserved for each of their rows [P].
    """

    spans: Index
    group: Index
    slot: Index


class SlotTable:
    """Holds the rows of chosen spans from step to step; the spans that were chosen longest ago make room.

    A *group* is one (batch row, KV head) pair. Rows of a span may lie in any slots of its group: attention does not
    depend on their order.

    Args:
        length: tokens per span of each group [groups, S].
        capacity: slots per group, at least the rows of any one choice (`slots_needed`).
    """

    def __init__(self, length: Index, capacity: int) -> None:
        groups, n_spans = length.shape
        self.capacity, self._length = capacity, length
        # Column S stands for "no span": where empty slots belong.
        self.owner = np.full((groups, capacity), n_spans)  # span of each slot
        self._held = np.zeros((groups, n_spans + 1), dtype=bool)  # all rows of the span are in slots
        self._used = np.zeros((groups, n_spans + 1), dtype=np.int64)  # step that last chose the span
        self._used[:, -1] = -1
        self._step = 0

    @property
    def held(self) -> Index:
        """Spans whose rows are all in slots, bool [groups, S]."""
        found: Index = self._held[:, :-1]
        return found

    def admit(self, wanted: Index) -> Missing | None:
        """Reserves slots for the spans of a step.

        Args:
            wanted: bool [groups, S].

        Returns:
            What has to be fetched, or None when every wanted span is held.
        """
        # The bound on the bytes of the compute tier: nothing is ever put beside the slots.
        assert ((wanted * self._length).sum(axis=1) <= self.capacity).all(), "a choice exceeds the slots"
        self._step += 1
        spans, group, slot = kernels.admit(wanted, self._length, self.owner, self._held, self._used, self._step)
        if not len(spans):
            return None
        return Missing(spans, group, slot)

    def visible(self, chosen: Index) -> Index:
        """Slots whose span is chosen [groups, n, C], from choices [groups, n, S]."""
        return kernels.visible_slots(chosen, self.owner)

    def tensors(self) -> list[Tensor]:
        """The tables, for byte counts; they live on the host."""
        return [torch.from_numpy(x) for x in (self.owner, self._held, self._used)]

    def extended(self, length: Index, capacity: int) -> SlotTable:
        """The same rows in the same slots, with more spans and perhaps more slots.

        Args:
            length: tokens per span [groups, S + new]; the first S as before.
            capacity: slots per group, at least as many as before.
        """
        twin, n_spans = SlotTable(length, capacity), self._length.shape[1]
        twin.owner[:, : self.capacity] = np.where(self.owner == n_spans, length.shape[1], self.owner)
        twin._held[:, :n_spans], twin._used[:, :n_spans] = self._held[:, :-1], self._used[:, :-1]
        twin._step = self._step
        return twin

    def fresh(self) -> SlotTable:
        """An empty table for the same spans."""
        return SlotTable(self._length, self.capacity)


def slots_needed(length: Tensor, rows: Tensor, spared: int) -> int:
    """Most rows that one choice of spans can have.

    A choice costs |S| - `spared` for each span and at most `rows` in all, so its rows exceed `rows` by as many
    summaries as it can replace: the most when it takes the shortest spans.

    Args:
        length: tokens per span [B, S]; 0 where there is none.
        rows: rows left for zooming [B].
        spared: rows that a chosen span saves: 1 when it replaces a summary, 0 otherwise.
    """
    ordered = length.sort(dim=-1).values
    cost = (ordered - spared).clamp_min(0).cumsum(-1)
    fitting = ((cost <= rows[:, None]) & (ordered > 0)).sum(-1)
    return int((rows + spared * fitting).minimum(length.sum(-1)).max())
