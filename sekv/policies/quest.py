"""Quest: pages of tokens on the host, retrieved per query by bounds of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sekv.policies.retrieval import RetrievalPolicy
from sekv.prefill import Prefill
from sekv.stores.plan import SpanPlan
from sekv.stores.retrieval import PageStore


@dataclass(kw_only=True)
class QuestPolicy(RetrievalPolicy):
    """Quest (arXiv 2406.10774): every query reads the pages whose keys could have the largest logits.

    A page of 16 tokens keeps the largest and the smallest key of each dimension on the compute tier; a query's logit
    with any key of the page is at most sum_i max(q_i max_i, q_i min_i).

    Departures: pages lie on the host, where the paper keeps them on the accelerator; sinks and tail are always read
    and count; every layer retrieves, where the paper leaves the first two whole; heads that share keys choose together,
    by the mass that a softmax over the bounds gives each page, summed over the heads.
    """

    name: ClassVar[str] = "quest"

    def ends(self, prefill: Prefill) -> Tensor | None:
        """Pages end by length alone."""
        return None

    def compress(self, prefill: Prefill, layer: int, plan: SpanPlan) -> PageStore:
        """Bounds, sinks and tail on the compute tier, pages on the host."""
        return PageStore(*prefill.key_value(layer), plan)
