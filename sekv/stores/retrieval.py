"""Stores that retrieve without training: tokens on the host, what judges them on the compute tier."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sekv.host import BankSide, FactorBank
from sekv.memory import span_rows, summarise
from sekv.stores.base import ExactRows
from sekv.stores.offloaded import OffloadedStore
from sekv.stores.plan import SpanPlan, visibility_bias
from sekv.stores.reader import SpanReader
from sekv.stores.slots import slots_needed


class RetrievalStore(OffloadedStore):
    """Exact sinks and tail, and for each query the tokens of the spans that promise it the most attention.

    Spans that are not retrieved are not attended to at all.

    Dimensions: B batch, H query heads, K KV heads, N context tokens, Q queries, S spans, d head dimension.

    Args:
        key: rotated keys of the context [B, K, N, d].
        value: [B, K, N, d].
        plan: the partition, and rows left for retrieval.
    """

    def __init__(self, key: Tensor, value: Tensor, plan: SpanPlan) -> None:
        segmentation = plan.segmentation
        length, kv_heads = segmentation.span_length, key.shape[1]
        raw_key, raw_value = (span_rows(x, plan.tokens) for x in (key, value))
        self.plan = plan
        self.index = self._index(raw_key)
        self.reader = SpanReader(
            FactorBank(BankSide(raw_key), BankSide(raw_value), length),
            length,
            visibility_bias(segmentation.exact_mask),
            kv_heads,
            slots_needed(length, plan.zoom_rows, spared=0),
        )
        exact: ExactRows = self.reader.layout(*(segmentation.exact_rows(x) for x in (key, value)))
        super().__init__(exact, plan.lengths)
        self._set_costs(length.masked_fill(length == 0, -1), plan.zoom_rows, kv_heads)

    @abstractmethod
    def _index(self, rows: Tensor) -> Tensor:
        """What stays on the compute tier to judge spans by [B, K, S, ...], from their keys [B, K, S, L, d]."""

    @abstractmethod
    def promise(self, grouped: Tensor) -> Tensor:
        """Estimated logit of each span [B, K, n, S] for queries [B, K, n, d], float32."""

    def _choose(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """The spans with the most estimated mass, summed over the heads of a KV group [B, K, Q, S]."""
        batch, _, n_queries, dim = query.shape
        kv_heads = self.index.shape[1]
        logits = self.promise(query.float().reshape(batch, kv_heads, -1, dim) * scaling)
        logits = logits + visibility_bias(self.plan.segmentation.span_length > 0)[:, None, None]
        mass = logits.softmax(dim=-1).unflatten(2, (-1, n_queries)).sum(dim=2)
        return self._take(mass)

    def resident_tensors(self) -> list[Tensor | None]:
        """Exact rows and slots, the index, and the tables that all layers share."""
        return [*self.exact.tensors(), *self.reader.tensors(), self.index, *self.plan.tensors()]


class PageStore(RetrievalStore):
    """Pages judged by the bounds of their keys: the largest logit that any key within them could have."""

    def _index(self, rows: Tensor) -> Tensor:
        """Largest and smallest key of each page by dimension [B, K, S, 2d]."""
        outside = ~self.plan.tokens.padded_mask[:, None, ..., None]
        most = rows.masked_fill(outside, -torch.inf).amax(dim=3)
        least = rows.masked_fill(outside, torch.inf).amin(dim=3)
        absent = (self.plan.segmentation.span_length == 0)[:, None, :, None]
        return torch.cat([most, least], dim=-1).masked_fill(absent, 0.0)

    def promise(self, grouped: Tensor) -> Tensor:
        """sum_i max(q_i max_i, q_i min_i)."""
        signs = torch.cat([grouped.clamp_min(0.0), grouped.clamp_max(0.0)], dim=-1)
        return signs @ self.index.float().mT


class SentenceStore(RetrievalStore):
    """Sentences judged by their mean key."""

    def _index(self, rows: Tensor) -> Tensor:
        """Mean key of each sentence [B, K, S, d]."""
        weights = self.plan.tokens.padded_mask.new_ones(rows.shape[0], self.plan.n_tokens, dtype=torch.float32)
        return summarise(rows, self.plan.tokens, weights)

    def promise(self, grouped: Tensor) -> Tensor:
        """Inner product with the mean key."""
        return grouped @ self.index.float().mT
