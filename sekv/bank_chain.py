"""A bank that grows: spans of later tokens behind those of the context, fetched by span number as from one bank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sekv.host import FactorBank, Index, ranges


class BankChain:
    """Banks of the same batch rows and KV heads, the spans of each behind those of the one before.

    The first bank, the context's, is never copied. Those behind it are joined whenever the last has as many spans as
    the one before it, so that there are few of them, and few copies.

    Args:
        banks: at least one.
    """

    def __init__(self, banks: tuple[FactorBank, ...]) -> None:
        self.banks = banks
        self._first = np.cumsum([0, *(bank.n_spans for bank in banks)])  # first span of each, and the end

    def extended(self, bank: FactorBank) -> BankChain:
        """A chain with the spans of one more bank; this one stays as it is."""
        first, *later = self.banks
        later.append(bank)
        while len(later) > 1 and later[-1].n_spans >= later[-2].n_spans:
            last = later.pop()
            later.append(later.pop().joined(last))
        return BankChain((first, *later))

    def fetch(self, spans: Index, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """As `FactorBank.fetch`, the numbers row-major over (batch, KV head, span of any bank)."""
        group, span = np.divmod(spans, self._first[-1])
        owner = np.searchsorted(self._first, span, side="right") - 1
        parts, order = [], []
        for i in np.unique(owner):
            at = np.flatnonzero(owner == i)
            bank = self.banks[i]
            parts.append(bank.fetch(group[at] * bank.n_spans + span[at] - self._first[i], device))
            order.append(at)
        if len(parts) == 1:
            return parts[0]
        # The rows lie bank behind bank: where those of each span begin there.
        fetched = np.concatenate(order)
        length = np.concatenate(
            [self.banks[owner[at[0]]].lengths(group[at], span[at] - self._first[owner[at]]) for at in order]
        )
        begin = np.empty_like(length)
        begin[fetched] = length.cumsum() - length
        in_order = np.empty_like(length)
        in_order[fetched] = length
        rows = torch.from_numpy(ranges(begin, in_order)).to(device)
        key, value = (torch.cat([part[side] for part in parts]).index_select(0, rows) for side in (0, 1))
        return key, value, sum(part[2] for part in parts)

    def tensors(self) -> list[Tensor]:
        """The live tensors of all banks, for byte counts."""
        return [tensor for bank in self.banks for tensor in bank.tensors()]
