"""What stores share whose tokens lie on the host: each query chooses spans, within the rows left, and reads them."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sekv import kernels
from sekv.host import Index
from sekv.routing import select_spans
from sekv.stores.base import Store, causal_tail_mask
from sekv.stores.plan import SpanPlan
from sekv.stores.reader import SpanReader

_QUERY_CHUNK = 64  # queries answered at once; bounds the rows a long question materialises together


class OffloadedStore(Store):
    """A store that fetches what each query chooses; subclasses set `plan` and `reader` and call `_set_costs`.

    `choose_every` is the number of single-token steps that keep to one choice: 1 chooses anew for every token.
    """

    plan: SpanPlan
    reader: SpanReader
    fetches_ahead: ClassVar[bool] = False  # let the next layer fetch what this one chose (docs/speed.md)
    choose_every: int = 1
    _kept = 0  # steps that have kept to the last choice
    _choices: list[Tensor] | None = None
    _following: OffloadedStore | None = None

    def _set_costs(self, cost: Tensor, rows: Tensor, choosers: int) -> None:
        """Says what choosing costs.

        Args:
            cost: rows that choosing a span adds [B, S]; -1 where there is none.
            rows: rows left for each context [B].
            choosers: choices per batch row and query: K, or H when query heads choose for themselves.
        """
        self._cost, self._rows = cost[:, None, None], rows[:, None, None]
        self._host_cost, self._host_rows = (
            x.repeat_interleave(choosers, dim=0).cpu().numpy() for x in (cost, rows[:, None])
        )

    @abstractmethod
    def _choose(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Spans each query reads [B, K, Q, S], or [B, H, Q, S] when query heads choose for themselves."""

    def _take(self, order: Tensor, margin: Tensor | None = None) -> Tensor:
        """The first spans in an order that fit the rows left.

        The choice of a single step is made on the host, where it is needed to fetch.

        Args:
            order: the highest are taken first [B, K or H, Q, S].
            margin: take no span with a negative margin, shaped as `order`; None allows all.
        """
        eligible = None if margin is None else margin >= 0
        if order.shape[2] > 1:
            return select_spans(order, self._cost, self._rows, eligible)
        on_host, allowed = (
            None if x is None else x.detach().cpu().numpy().reshape(-1, order.shape[3]) for x in (order, eligible)
        )
        assert on_host is not None
        return self._take_on_host(on_host, np.ones(on_host.shape, dtype=bool) if allowed is None else allowed)

    def _take_on_host(self, order: Index, eligible: Index) -> Tensor:
        """The choice of a single step [B, K or H, 1, S], from the order and what may be taken [B * K or B * H, S]."""
        chosen = kernels.choose_spans(order, self._host_cost, self._host_rows, eligible)
        return torch.from_numpy(chosen).view(len(self.lengths), -1, 1, order.shape[1])

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Chooses, fetches and attends, a bounded number of queries at a time."""
        n_queries = query.shape[2]
        if n_queries == 1:
            return self._attend(query, scaling, tail_mask)
        if tail_mask is None:
            tail_mask = causal_tail_mask(n_queries, self.tail_length, query.device)
        assert tail_mask is not None
        parts = zip(query.split(_QUERY_CHUNK, dim=2), tail_mask.split(_QUERY_CHUNK, dim=2), strict=True)
        return torch.cat([self._attend(part, scaling, mask) for part, mask in parts], dim=2)

    def _attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        if query.shape[2] == 1 and self._kept + 1 < self.choose_every:
            output = self.reader.attend_again(query, scaling, self.exact, tail_mask, self.meter)
            if output is not None:
                self._kept += 1
                if self._choices:
                    self._choices.append(self._choices[-1])
                return output
        self._kept = 0
        zoomed = self._choose(query, scaling, tail_mask)
        if self._choices is not None:
            self._choices.append(zoomed.to("cpu", copy=True))
        output = self.reader.attend(query, scaling, zoomed, self.exact, tail_mask, self.meter)
        if self._following is not None and query.shape[2] == 1:
            # The device is still at this layer's attention: what is gathered and copied now costs no time there.
            self._following.expect(zoomed)
        return output

    def precede(self, following: Store) -> None:
        """Lets the next layer fetch ahead what this one chooses, if `fetches_ahead`."""
        self._following = following if self.fetches_ahead and isinstance(following, OffloadedStore) else None

    def expect(self, zoomed: Tensor) -> None:
        """Fetches spans [B, K or H, 1, S] that this store's next step may choose, within a bound on their rows."""
        wanted = zoomed.cpu().numpy().reshape(len(self.lengths) * self.exact.key.shape[1], -1, zoomed.shape[-1])
        self.reader.fetch_ahead(np.asarray(wanted.any(axis=1)), self.exact.key.device, self.meter)

    def record_choices(self) -> list[Tensor]:
        """The choices of every step from now on, in order, each bool [B, K or H, Q, S]; forks add to the same list."""
        self._choices, self._kept = [], self.choose_every  # the next step chooses, so that its choice is known
        return self._choices

    def reset(self) -> None:
        """As in the base; the next question chooses for itself."""
        super().reset()
        self._kept = self.choose_every

    def fork(self) -> Self:
        """Shares the bank and the rows that never change; what its steps fetch is its own."""
        twin = super().fork()
        twin._following = None
        twin.reader = self.reader.fork()
        return twin

    def host_tensors(self) -> list[Tensor | None]:
        """The bank and the bookkeeping of the slots."""
        return self.reader.host_tensors()
