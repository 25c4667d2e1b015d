"""Bytes of a compressed context, predicted from shapes alone; tests hold them against live tensors.

Dimensions: N context tokens, L layers, H query heads, K KV heads, d head dimension, E exact rows, M summary rows, C
slots, S spans of at most m tokens, T span tokens, r components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sekv.adapter import SeKVConfig
from sekv.backbone import Geometry
from sekv.budget import Budget
from sekv.expected_cut import Cut, expected_cut
from sekv.memory import shortest_factored

_INDEX, _F32 = 8, 4
_BANK_TABLE = 5  # numbers per span and side: tokens, rank, and where its numbers begin in three banks


@dataclass(frozen=True)
class Footprint:
    """The memory of one context under SeKV with a learned router, nothing decoded yet.

    Attributes:
        geometry: of the backbone.
        config: of the adapter.
        budget: rows that a query may attend to.
        tokens: of the context, N.
        element_bytes: of a number in the backbone's dtype.
    """

    geometry: Geometry
    config: SeKVConfig
    budget: Budget
    tokens: int
    element_bytes: int

    @property
    def layers(self) -> int:
        """Layers that are compressed, L."""
        return len(self.geometry.compressible)

    @property
    def whole(self) -> bool:
        """The budget keeps everything: there is nothing to compress."""
        return self.budget.rows_for(self.tokens) >= self.tokens

    @property
    def full_bytes(self) -> int:
        """The full cache."""
        return self.layers * self._rows(self.tokens)

    @property
    def resident_bytes(self) -> int:
        """On the compute tier: rows, summaries, the index, and the tables that all layers share."""
        if self.whole:
            return self.full_bytes
        spans, merged = self.cut.spans, self._merged_rows
        layer = self._rows(self.cut.exact + merged + self.slots) + (
            0 if self._offloads_summaries else self._rows(spans)
        )
        layer += 2 * self._per_head(merged) * self.geometry.head_dim * _F32 + self._index_bytes
        return self.layers * layer + self._table_bytes

    @property
    def host_bytes(self) -> int:
        """On the host: bases and raw rows, and the bookkeeping of spans and slots."""
        if self.whole:
            return 0
        spans = self._per_head(self.cut.spans)
        tables = (
            spans * _INDEX * (2 * _BANK_TABLE + 4) + spans + self._per_head(self.slots + self._merged_rows) * _INDEX
        )
        summaries = self._rows(self.cut.spans) if self._offloads_summaries else 0
        return self.layers * (round(2 * spans * self.span_bytes) + tables + summaries)

    @property
    def zoom_rows(self) -> int:
        """Rows per KV head that are left for zooming."""
        if self.whole:
            return 0
        return max(0, self.budget.rows_for(self.tokens) - self.cut.exact - self._merged_rows)

    @property
    def slots(self) -> int:
        """Rows per KV head that zoomed spans take on the compute tier, C."""
        if self.config.summary_share < 1.0:
            return min(self.zoom_rows, self.cut.span_tokens)
        # A zoomed span gives up its summary, and every query head of a group may choose for itself.
        heads = 1 if self.config.share_group else self.geometry.num_heads // self.geometry.num_kv_heads
        length = max(2.0, self.cut.span_tokens / self.cut.spans)
        return min(round(heads * self.zoom_rows * length / (length - 1)), self.cut.span_tokens)

    def moved_bytes(self, expansion: float, reused: float) -> float:
        """Bytes from the host per token.

        Args:
            expansion: share of the rows left for zooming that a step zooms into.
            reused: share of those that an earlier step has left on the compute tier.
        """
        if self.whole:
            return 0.0
        spans = expansion * self.zoom_rows * self.cut.spans / self.cut.span_tokens  # of a KV head
        summaries = self._rows(1) * spans if self._offloads_summaries else 0.0
        return self.layers * (self.geometry.num_kv_heads * spans * (1.0 - reused) * 2 * self.span_bytes + summaries)

    @cached_property
    def cut(self) -> Cut:
        """How the context is expected to be cut."""
        return expected_cut(self.config, self.budget, self.tokens)

    @cached_property
    def span_bytes(self) -> float:
        """Mean bytes of the keys, or the values, of a span, all components whole.

        Lengths are taken to be spread evenly around their mean, up to the longest.
        """
        longest = self.cut.longest
        shortest = max(1, round(2 * self.cut.span_tokens / self.cut.spans) - longest)
        lengths = range(min(shortest, longest), longest + 1)
        return sum(map(self._bytes_of_span, lengths)) / len(lengths)

    def _bytes_of_span(self, length: int) -> int:
        """A basis where it is smaller than the rows, which stay raw elsewhere; in 8 bits with a step for each row."""
        dim = self.geometry.head_dim
        rows, numbers = length, length * dim
        if length >= shortest_factored(self.config.max_rank, dim):
            rows = min(self.config.max_rank, length, dim)
            numbers = rows * (length + dim)
        if self.config.basis_bits:
            return numbers * self.config.basis_bits // 8 + rows * _F32
        return numbers * self.element_bytes

    @property
    def _offloads_summaries(self) -> bool:
        """Summaries of single spans lie on the host unless spans are chosen by them."""
        return self.config.summary_share < 1.0 and self.config.index == "tokens"

    @property
    def _merged_rows(self) -> int:
        """Summary rows, M."""
        return self.config.cutting().summary_rows(self.budget.rows_for(self.tokens), self.cut.spans)

    @property
    def _index_bytes(self) -> int:
        """What a router knows of the spans."""
        if self.config.index == "tokens":
            numbers = self.config.routing_dim
            entry = -(-numbers * self.config.index_bits // 8)
            return self._per_head(self.cut.span_tokens * entry + _F32 * numbers)
        return self.geometry.num_heads * self.cut.spans * _F32

    @property
    def _table_bytes(self) -> int:
        """Index tables of the partition."""
        cut = self.cut
        padded = cut.spans * cut.longest
        # Two of the tables are views of larger ones: of a place for every padded token, and of one position more.
        turn = 2 * (cut.longest + 1) * self.geometry.head_dim * _F32 if self.config.rope == "pre" else 0
        numbers = cut.exact + 3 * cut.spans + 2 * padded + cut.span_tokens + 2
        return _INDEX * numbers + cut.exact + padded + cut.span_tokens + turn

    def _rows(self, n: int) -> int:
        """Keys and values of `n` rows of one layer."""
        return 2 * self._per_head(n) * self.geometry.head_dim * self.element_bytes

    def _per_head(self, n: int) -> int:
        return self.geometry.num_kv_heads * n
