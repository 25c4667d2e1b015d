"""Policies that score tokens: a method only says which tokens matter, the rest is here."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.base import Policy
from sekv.policies.selection import keep_headwise, keep_uniform, protect
from sekv.prefill import Prefill
from sekv.stores.evicted import EvictedStore

ALLOCATIONS = ("uniform", "headwise")
_ROUNDING = 1e-6  # relative spread below which float32 scores are the same


@dataclass(kw_only=True)
class ScorerPolicy(Policy):
    """A policy that drops the tokens with the lowest scores; a method implements `score`.

    A budget below sinks + tail keeps the sinks first and then the most recent tokens: nothing is ever refused.

    Attributes:
        allocation: `uniform` keeps the same number of rows in every head of a layer; `headwise` lets its heads compete.
        safeguard: share of the mean rows that no head can lose under `headwise`.
    """

    allocation: str = "uniform"
    safeguard: float = 0.20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allocation not in ALLOCATIONS:
            known = " or ".join(ALLOCATIONS)
            raise PolicyError(f"{self.name}: allocation '{self.allocation}' is unknown; give {known}")
        if not 0.0 <= self.safeguard <= 1.0:
            raise PolicyError(f"{self.name}: safeguard must be from 0 to 1, got {self.safeguard}")

    @property
    def protected_tail(self) -> int:
        """Last tokens that are always kept; a method that scores with a window of its own may protect more."""
        return self.tail

    @abstractmethod
    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Importance of each token of a compressible layer.

        Returns:
            Finite float32 [B, K, N], higher is kept first; anything at padding.
        """

    def select(self, scores: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """The tokens to keep: sinks and tail first, then by score.

        Args:
            scores: [B, K, N].
            mask: True for real tokens [B, N].
            rows: rows per head [B].

        Returns:
            Bool [B, K, N]; rows[b] per head on average, and in every head under `uniform`.
        """
        scores = protect(scores, mask, self.sinks, self.protected_tail)
        if self.allocation == "headwise":
            return keep_headwise(scores, rows, self.safeguard)
        return keep_uniform(scores, rows)

    def keep(self, prefill: Prefill, layer: int, rows: Tensor) -> Tensor:
        """The tokens of a layer to keep [B, K, N], for a budget of `rows` [B]."""
        return self.select(self.score(prefill, layer), prefill.mask, rows)

    def compress(self, prefill: Prefill, layer: int, plan: Tensor) -> EvictedStore:
        """A store of the kept rows; `plan` is the rows per head [B]."""
        keep = self.keep(prefill, layer, plan)
        key, value = prefill.key_value(layer)
        return EvictedStore(key, value, keep, prefill.lengths)


def scale_to_unit(values: Tensor, mask: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Min-max scaling to [0, 1] over real tokens; values that differ by rounding only become 0.

    Args:
        values: [..., N].
        mask: True for real tokens, broadcastable to `values`.
        dims: dimensions that share one minimum and one maximum.

    Returns:
        Shape of `values`, 0 at padding.
    """
    low = values.masked_fill(~mask, torch.inf).amin(dim=dims, keepdim=True)
    high = values.masked_fill(~mask, -torch.inf).amax(dim=dims, keepdim=True)
    span = high - low
    constant = span <= _ROUNDING * torch.maximum(low.abs(), high.abs())
    scaled = (values - low) / span.masked_fill(constant, 1.0)
    return scaled.masked_fill(~mask | constant, 0.0)
