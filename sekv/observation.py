"""What policies learn from every query of a context while it is read: sums per layer, never the queries themselves.

A policy names the observers it needs; the prefill runs them layer by layer and leaves their results in
`Prefill.observed`. Memory grows with N, time with what an observer does: attention sums cost about as much as the
attention of the prefill itself.

Dimensions: B batch, H query heads, K KV heads, N context tokens, d head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sekv.attention import attention_rows, query_blocks
from sekv.backbone import Backbone
from sekv.cache import RecordingLayer
from sekv.errors import PolicyError
from sekv.rotary import unrotate


class Observation(ABC):
    """One observer's running result for one layer."""

    @abstractmethod
    def update(self, query: Tensor, key: Tensor) -> None:
        """Takes the next tokens.

        Args:
            query: rotated queries [B, H, n, d] of the last n tokens read.
            key: rotated keys [B, K, seen, d] of all tokens read so far.
        """

    @abstractmethod
    def result(self) -> Any:
        """What `Prefill.observed` keeps for the layer."""


class Observer(ABC):
    """A statistic over all queries of a context; equal observers are computed once for all policies."""

    @abstractmethod
    def start(self, backbone: Backbone, layer: int, mask: Tensor, positions: Tensor) -> Observation:
        """An empty observation of a layer, for contexts under a padding mask [B, N] at `positions` [B, N]."""


@dataclass(frozen=True)
class AttentionSum(Observer):
    """Attention that each token receives, summed over all queries of the context: [B, K, N] float32.

    Averaged over the query heads of a KV head. Computed in blocks of queries: N x N attention never exists.
    """

    def start(self, backbone: Backbone, layer: int, mask: Tensor, positions: Tensor) -> Observation:
        """Zeros for every token."""
        return _AttentionSum(mask, backbone.geometry.num_kv_heads, backbone.attention_scaling(layer))


class _AttentionSum(Observation):
    def __init__(self, mask: Tensor, kv_heads: int, scaling: float) -> None:
        self.mask, self.scaling = mask, scaling
        self.total = torch.zeros(mask.shape[0], kv_heads, mask.shape[1], device=mask.device)

    def update(self, query: Tensor, key: Tensor) -> None:
        """Adds the attention of the new queries."""
        seen = key.shape[2]
        first = seen - query.shape[2]
        token = torch.arange(seen, device=key.device)
        key = key.float()
        for block in query_blocks(query.shape[2], query.shape[0] * query.shape[1] * seen):
            start, end = first + block.start, first + block.stop  # keys after the block's last query stay out
            visible = (token[:end] <= token[start:end, None]) & self.mask[:, None, None, None, :end]
            weights = attention_rows(query[:, :, block], key[:, :, :end], visible, self.scaling)
            weights *= self.mask[:, None, None, start:end, None]  # padded queries do not count
            self.total[:, :, :end] += weights.sum(dim=3).mean(dim=2)

    def result(self) -> Tensor:
        """The sums."""
        return self.total


@dataclass(frozen=True)
class Moments:
    """Mean [B, H, d] and covariance [B, H, d, d] of queries, float32; zeros where a context has none."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class QueryMoments(Observer):
    """Mean and covariance of the queries before RoPE, per query head: `Moments`.

    Attributes:
        skip: first tokens of a context whose queries are left out.
    """

    skip: int

    def start(self, backbone: Backbone, layer: int, mask: Tensor, positions: Tensor) -> Observation:
        """No queries yet.

        Raises:
            PolicyError: RoPE cannot be undone on this backbone.
        """
        if not backbone.rotates_halves:
            raise PolicyError(
                f"'{backbone.name}' does not rotate queries in the half-split layout, so RoPE cannot be undone on them"
            )
        return _QueryMoments(backbone, mask & (positions >= self.skip), positions)


class _QueryMoments(Observation):
    """Blocks are merged by their means and scatter matrices, so that nothing is the difference of large sums."""

    def __init__(self, backbone: Backbone, counted: Tensor, positions: Tensor) -> None:
        self.backbone, self.counted, self.positions = backbone, counted, positions
        self.n = torch.zeros(len(counted), 1, 1, device=counted.device)
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def update(self, query: Tensor, key: Tensor) -> None:
        """Merges the new queries into the moments."""
        part = slice(key.shape[2] - query.shape[2], key.shape[2])
        cos, sin = (table[:, None] for table in self.backbone.rope(self.positions[:, part]))
        plain = unrotate(query.float(), cos, sin)
        weight = self.counted[:, None, part, None].float()
        n = weight.sum(dim=2)  # [B, 1, 1]
        mean = (plain * weight).sum(dim=2) / n.clamp_min(1)  # [B, H, d]
        centred = (plain - mean[:, :, None]) * weight
        scatter = centred.mT @ centred  # [B, H, d, d]
        if self.mean is None or self.scatter is None:
            self.n, self.mean, self.scatter = n, mean, scatter
            return
        total = (self.n + n).clamp_min(1)
        shift = mean - self.mean
        self.scatter = self.scatter + scatter
        self.scatter += shift[..., None] * shift[:, :, None] * (self.n * n / total)[..., None]
        self.mean = self.mean + shift * (n / total)
        self.n = self.n + n

    def result(self) -> Moments:
        """The moments; the covariance is the population's."""
        assert self.mean is not None and self.scatter is not None
        return Moments(self.mean, self.scatter / self.n.clamp_min(1)[..., None])


class ObservingLayer(RecordingLayer):
    """A recording layer that shows every query to its observations.

    Args:
        capacity: as for `RecordingLayer`.
        window: likewise.
        offload: likewise.
        observations: what to keep up to date.
    """

    def __init__(self, capacity: int, window: int, offload: bool, observations: dict[Observer, Observation]) -> None:
        super().__init__(capacity, window, offload)
        self.observations = observations

    def observe(self, query: Tensor) -> None:
        """Keeps the last queries and updates the observations."""
        super().observe(query)
        if not self.observations:
            return
        assert self.keys is not None
        key = self.keys[:, :, : self.used].to(query.device, non_blocking=True)
        for observation in self.observations.values():
            observation.update(query, key)
