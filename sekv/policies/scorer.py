"""Policies that score tokens: a method only says which tokens matter, the rest is here."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from sekv.budget import Budget
from sekv.errors import PolicyError
from sekv.policies.base import Policy
from sekv.policies.selection import keep_headwise, keep_uniform, pooled_rows, protect, pyramid_rows
from sekv.prefill import Prefill
from sekv.stores.evicted import EvictedStore, Rescore

ALLOCATIONS = ("uniform", "headwise")
LAYER_ALLOCATIONS = ("uniform", "pyramid", "pooled")
_ROUNDING = 1e-6  # relative spread below which float32 scores are the same


@dataclass(kw_only=True)
class ScorerPolicy(Policy):
    """A policy that drops the tokens with the lowest scores; a method implements `score`.

    A budget below sinks + tail keeps the sinks first and then the most recent tokens: nothing is ever refused.

    Attributes:
        allocation: `uniform` keeps the same number of rows in every head of a layer; `headwise` lets its heads compete.
        safeguard: share of the mean rows that no head can lose under `headwise` and `pooled`.
        layers: `uniform` gives every layer the same rows; `pyramid` gives early layers more; `pooled` lets all heads of
            all layers compete, and needs `allocation=headwise`. The mean over layers is the budget in each case.
        beta: steepness of the pyramid: the last layer gets 1 / beta of the mean.
    """

    scores_keys: ClassVar[bool] = False  # the score of a token follows from the keys alone, whichever of them are left

    allocation: str = "uniform"
    safeguard: float = 0.20
    layers: str = "uniform"
    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, values in (("allocation", ALLOCATIONS), ("layers", LAYER_ALLOCATIONS)):
            if getattr(self, option) not in values:
                known = f"{', '.join(values[:-1])} or {values[-1]}"
                raise PolicyError(f"{self.name}: {option} '{getattr(self, option)}' is unknown; give {known}")
        if not 0.0 <= self.safeguard <= 1.0:
            raise PolicyError(f"{self.name}: safeguard must be from 0 to 1, got {self.safeguard}")
        if not self.beta >= 1.0:
            raise PolicyError(f"{self.name}: beta must be 1 or more, got {self.beta}")
        if self.layers == "pooled" and self.allocation != "headwise":
            raise PolicyError(f"{self.name}: layers=pooled lets heads compete; give allocation=headwise with it")

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

    def ranking(self, prefill: Prefill, layer: int, rows: Tensor) -> Tensor:
        """The scores that select [B, K, N]; they may depend on the layer's rows [B]."""
        return self.score(prefill, layer)

    def protected(self, scores: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Scores [B, K, N] with sinks and tail above all others."""
        return protect(scores, mask, self.sinks, self.protected_tail)

    def select(self, scores: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """The tokens to keep: sinks and tail first, then by score.

        Args:
            scores: [B, K, N].
            mask: True for real tokens [B, N].
            rows: rows per head [B], whole numbers under `uniform`.

        Returns:
            Bool [B, K, N]; rows[b] per head on average, and in every head under `uniform`.
        """
        scores = self.protected(scores, mask, rows)
        if self.allocation == "headwise":
            return keep_headwise(scores, rows, self.safeguard)
        return keep_uniform(scores, rows)

    def keep(self, prefill: Prefill, layer: int, rows: Tensor) -> Tensor:
        """The tokens of a layer to keep [B, K, N], for `rows` [B] in that layer."""
        return self.select(self.ranking(prefill, layer, rows), prefill.mask, rows)

    def prepare(self, prefill: Prefill, budget: Budget) -> LayerRows:
        """The rows of every layer; a policy that pools them computes its scores when the first one is asked for."""
        return LayerRows(self, prefill, self.rows(prefill, budget))

    def compress(self, prefill: Prefill, layer: int, plan: LayerRows) -> EvictedStore:
        """A store of the kept rows."""
        keep = self.keep(prefill, layer, plan.of(layer))
        key, value = prefill.key_value(layer)
        return EvictedStore(key, value, keep, prefill.lengths, self._competition)

    def restore(self, prefill: Prefill, layer: int, plan: LayerRows, state: dict[str, Tensor]) -> EvictedStore:
        """As `compress` made it."""
        return EvictedStore.restored(state, prefill.lengths, self._competition)

    @property
    def _competition(self) -> Rescore | None:
        """How tokens that leave the tail compete with the rows that are kept, if they do."""
        return self._rescore if self.scores_keys and self.max_rows is not None else None

    def score_keys(self, key: Tensor, mask: Tensor) -> Tensor:
        """The same importance from keys alone, for methods with `scores_keys`.

        Under `max_rows` tokens that leave the tail compete by it with the rows that are kept, head by head; without it
        they are forgotten, the oldest first.

        Args:
            key: rotated keys of kept rows and later tokens, in the order of their positions [B, K, R, d].
            mask: True for real ones [B, K, R].

        Returns:
            Finite float32 [B, K, R]; anything where `mask` is False.
        """
        raise NotImplementedError(f"{self.name} does not score keys alone")

    def _rescore(self, key: Tensor, mask: Tensor) -> Tensor:
        scores = self.score_keys(key, mask)
        scores[..., : self.sinks] = torch.inf  # rows lie in the order of their positions
        return scores


@dataclass
class LayerRows:
    """How a policy's budget is spread over the compressible layers.

    Attributes:
        policy: whose layer allocation it is.
        prefill: the context.
        mean: mean rows per layer and head [B].
    """

    policy: ScorerPolicy
    prefill: Prefill
    mean: Tensor

    def of(self, layer: int) -> Tensor:
        """Rows per head [B] of one compressible layer."""
        return self._per_layer[:, self.prefill.backbone.geometry.compressible.index(layer)]

    @cached_property
    def _per_layer(self) -> Tensor:
        policy, prefill, mean = self.policy, self.prefill, self.mean
        compressible = prefill.backbone.geometry.compressible
        if policy.layers == "pyramid":
            protected = policy.sinks + policy.protected_tail
            return pyramid_rows(mean, prefill.lengths, protected, len(compressible), policy.beta)
        if policy.layers == "pooled":
            scores = [
                policy.protected(policy.ranking(prefill, layer, mean), prefill.mask, mean) for layer in compressible
            ]
            return pooled_rows(scores, mean, policy.safeguard)
        return mean[:, None].expand(-1, len(compressible))


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
