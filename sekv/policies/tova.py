"""TOVA: keep what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sekv.policies.scorer import ScorerPolicy
from sekv.policies.snapkv import last_queries_attention
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class TOVAPolicy(ScorerPolicy):
    """TOVA (arXiv 2401.06104): keeps the tokens that the context's last token attends to, the same in every head.

    score_i = softmax(scaling * q_last.k)_i, averaged over all query heads of the layer.

    Departures: the paper drops one token per decoding step, here one pass ends the prefill; sinks and tail stay, the
    last token with them, whose own weight the paper leaves to chance.
    """

    name: ClassVar[str] = "tova"

    @property
    def window(self) -> int:
        """The last token's query."""
        return 1

    @property
    def protected_tail(self) -> int:
        """At least the last token."""
        return max(1, self.tail)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """The last token's attention [B, K, N] in [0, 1], alike in all heads.

        Raises:
            PolicyError: the prefill kept no queries.
        """
        attention = last_queries_attention(prefill, layer, self.window, self.name).mean(dim=1, keepdim=True)
        return attention.expand(-1, prefill.backbone.geometry.num_kv_heads, -1)
