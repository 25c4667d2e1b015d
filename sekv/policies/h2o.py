"""H2O: keep heavy hitters of accumulated attention, and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sekv.errors import PolicyError
from sekv.observation import AttentionSum, Observer
from sekv.policies.base import observed
from sekv.policies.scorer import ScorerPolicy
from sekv.policies.selection import protect
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class H2OPolicy(ScorerPolicy):
    """H2O (arXiv 2306.14048): half of the rows for the tokens with most accumulated attention, half for the last ones.

    score_i = sum over queries j >= i of softmax(scaling * q_j.k)_i, averaged over the query heads of a KV head. The
    sums are gathered in blocks while the context is read: N x N attention never exists.

    Departures: the paper evicts one token per step and sums what is left of the cache, here one pass ends the prefill
    and sums the full attention; sinks and tail stay as under every policy. Half and half is the paper's split.

    Attributes:
        recent_share: share of the rows that the last tokens take, at least the tail.
    """

    name: ClassVar[str] = "h2o"

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.recent_share <= 1.0:
            raise PolicyError(f"{self.name}: recent_share must be from 0 to 1, got {self.recent_share}")

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The attention that each token receives."""
        return (AttentionSum(),)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Accumulated attention [B, K, N]."""
        return observed(prefill, AttentionSum(), layer, self.name)

    def protected(self, scores: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Sinks, and the last floor(recent_share * rows) tokens, above all others."""
        recent = (self.recent_share * rows + 1e-6).long().clamp_min(self.tail)
        return protect(scores, mask, self.sinks, recent)
