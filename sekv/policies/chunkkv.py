"""ChunkKV: keep whole chunks of neighbouring tokens instead of single ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.scorer import ScorerPolicy
from sekv.policies.snapkv import SnapKVPolicy
from sekv.policies.wrapper import WrapperPolicy
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class ChunkKVPolicy(WrapperPolicy):
    """ChunkKV (arXiv 2502.00299): scores fixed chunks by the mean of a base scorer, SnapKV's window by default.

    score of every token of a chunk = mean of the base's scores over its tokens and the layer's KV heads, so all heads
    keep the same chunks. The last chunk that a budget reaches is cut to meet it exactly, first tokens first.
    With `reuse` = r, a group of r neighbouring layers keeps the chunks that its first layer chose.

    Choices where the paper is silent: chunks start at the first token of the context and the last one may be short;
    tokens that the base protects are protected one by one. Departure: the paper pools nothing within the window's
    attention, the default base pools as SnapKV does; `chunkkv:snapkv[kernel_size=1]` is the plain one.

    Attributes:
        chunk_length: tokens of a chunk; the paper's is 10.
        reuse: neighbouring layers that share one choice; 1 shares nothing.
    """

    name: ClassVar[str] = "chunkkv"

    base: ScorerPolicy = field(default_factory=SnapKVPolicy)
    chunk_length: int = 10
    reuse: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("chunk_length", "reuse"):
            if getattr(self, option) < 1:
                raise PolicyError(f"{self.name}: {option} must be 1 or more, got {getattr(self, option)}")

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """The chunk's score at each of its tokens [B, K, N], alike in all heads."""
        compressible = prefill.backbone.geometry.compressible
        index = compressible.index(layer)
        scores = self.base.score(prefill, compressible[index - index % self.reuse])
        real = prefill.mask[:, None]
        pooled = scores.mean(dim=1, keepdim=True).masked_fill(~real, 0.0)  # [B, 1, N]
        chunk = (prefill.positions // self.chunk_length)[:, None]
        sums = torch.zeros(*pooled.shape[:2], int(chunk.max()) + 1, device=pooled.device)
        sizes = torch.zeros_like(sums).scatter_add_(2, chunk, real.float())
        means = sums.scatter_add_(2, chunk, pooled) / sizes.clamp_min(1)
        return means.gather(2, chunk).expand_as(scores)
