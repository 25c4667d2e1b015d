"""The partition of the contexts as stores need it: index tables, and rows left to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sekv.memory import SpanTokens, Turn
from sekv.segmentation import Segmentation


@dataclass(frozen=True)
class SpanPlan:
    """What the stores of all layers share.

    Attributes:
        segmentation: the partition.
        tokens: index tables of its spans.
        zoom_rows: rows left after exact rows and summaries [B].
        lengths: true tokens of each context [B].
        n_tokens: padded length of the contexts.
        turn: rotation to undo before keys are factored; None when they are factored as they are.
        folded_rows: summary rows that the spans share since later tokens were folded [B]; None before.
    """

    segmentation: Segmentation
    tokens: SpanTokens
    zoom_rows: Tensor
    lengths: Tensor
    n_tokens: int
    turn: Turn | None = None
    folded_rows: Tensor | None = None

    @cached_property
    def folded(self) -> WeakValueDictionary[tuple[int, ...], Any]:
        """Blocks of later tokens that some layer has folded into spans behind these (`sekv.stores.folding`)."""
        return WeakValueDictionary()

    @cached_property
    def all_tokens_real(self) -> bool:
        """Whether the tables of tokens have no padding."""
        return bool(self.tokens.mask.all())

    def tensors(self) -> list[Tensor]:
        """The live tensors, for byte counts."""
        tables = [*self.segmentation.tensors(), *vars(self.tokens).values(), *(self.turn or ())]
        return [*tables, self.zoom_rows, self.lengths]


def visibility_bias(mask: Tensor) -> Tensor:
    """0 where `mask` is True, -inf elsewhere, float32."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
