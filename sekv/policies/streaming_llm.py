"""StreamingLLM: the first tokens and the last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class StreamingLLMPolicy(ScorerPolicy):
    """StreamingLLM (arXiv 2309.17453): keeps the attention sinks and the most recent tokens.

    score_i = i; the sinks are protected by the base.

    Departure: kept tokens keep their true positions; the paper renumbers them inside its rolling cache.
    """

    name: ClassVar[str] = "streaming_llm"
    scores_keys: ClassVar[bool] = True

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Positions [B, K, N], exact in float32 up to 16 million tokens."""
        return prefill.positions.float()[:, None].expand(-1, prefill.backbone.geometry.num_kv_heads, -1)

    def score_keys(self, key: Tensor, mask: Tensor) -> Tensor:
        """Places: the order of the positions."""
        return torch.arange(key.shape[2], dtype=torch.float32, device=key.device).repeat(*key.shape[:2], 1)
