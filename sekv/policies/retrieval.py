"""What policies share that retrieve tokens from the host without training."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.budget import Budget
from sekv.errors import PolicyError
from sekv.memory import SpanTokens
from sekv.policies.base import Policy, check_minimum
from sekv.prefill import Prefill
from sekv.segmentation import uniform_pages
from sekv.stores.plan import SpanPlan


@dataclass(kw_only=True)
class RetrievalPolicy(Policy):
    """Sinks and tail exact, everything else on the host in spans; a method says how spans are cut and judged.

    Attributes:
        span: most tokens of a span.
    """

    span: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span < 1:
            raise PolicyError(f"{self.name}: span must be 1 token or more, got {self.span}")

    @abstractmethod
    def ends(self, prefill: Prefill) -> Tensor | None:
        """True for tokens that end a span [B, N]; None when length alone decides."""

    def prepare(self, prefill: Prefill, budget: Budget) -> SpanPlan:
        """Cuts the contexts; what sinks and tail leave of the rows is for retrieval."""
        rows, lengths = self.rows(prefill, budget), prefill.lengths
        exact = torch.full_like(lengths, self.sinks + self.tail)
        what = f"{self.name} (sinks, tail and one span of up to {self.span} tokens)"
        check_minimum(rows, torch.minimum(exact + self.span, lengths), lengths, what)
        segmentation = uniform_pages(prefill.mask, self.span, self.sinks, self.tail, self.ends(prefill))
        return SpanPlan(
            segmentation=segmentation,
            tokens=SpanTokens.of(segmentation),
            zoom_rows=(rows - segmentation.exact_mask.sum(1)).clamp_min(0),
            lengths=lengths,
            n_tokens=prefill.n_tokens,
        )
