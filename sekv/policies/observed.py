"""Observed attention: keep what the context's own queries attended to, on average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sekv.observation import AttentionSum, Observer
from sekv.policies.base import observed
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class ObservedAttentionPolicy(ScorerPolicy):
    """Observed attention: the mean attention that a token gets from every query that can see it.

    score_i = sum over queries j >= i of softmax(scaling * q_j.k)_i, divided by their number n - i, averaged over the
    query heads of a KV head. The division takes away the head start of early tokens that H2O's plain sum
    (arXiv 2306.14048) gives them. The sums are gathered in blocks while the context is read.
    """

    name: ClassVar[str] = "observed"

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The attention that each token receives."""
        return (AttentionSum(),)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Mean received attention [B, K, N] in [0, 1]."""
        total = observed(prefill, AttentionSum(), layer, self.name)
        viewers = (prefill.lengths[:, None] - prefill.positions).clamp_min(1)
        return total / viewers[:, None]
