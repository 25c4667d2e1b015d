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
        layer_rows: rows left for zooming of each layer [L, B], where they differ; None: `zoom_rows` in all of them.
        folded_rows: summary rows that the spans share since later tokens were folded [B]; None before.
    """

    segmentation: Segmentation
    tokens: SpanTokens
    zoom_rows: Tensor
    lengths: Tensor
    n_tokens: int
    turn: Turn | None = None
    layer_rows: Tensor | None = None
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
        return [*tables, self.zoom_rows, self.lengths, *([] if self.layer_rows is None else [self.layer_rows])]


def share_among_layers(factor: Tensor, rows: Tensor, most: Tensor) -> Tensor:
    """Rows of each layer in proportion to its factor, as many on average as given, none more than it can use.

    What a layer cannot use goes to the others, so that a budget large enough for everything gives everything.

    Args:
        factor: of each layer, positive [L].
        rows: of a layer, on average [B].
        most: that a layer can use [B].

    Returns:
        int64 [L, B].
    """
    weight = factor.double()[:, None] / factor.double().mean()
    share, total = weight * rows, len(factor) * rows.minimum(most)
    for _ in range(len(factor)):
        share = share.minimum(most)
        spare = total - share.sum(dim=0)
        if bool((spare < 1e-6).all()):
            break
        open_ = weight * (share < most)
        share = share + spare * open_ / open_.sum(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    # Whole rows, none above the mean; rounding errors of what is whole already are not lost.
    return (share + 1e-6).floor().long()


def visibility_bias(mask: Tensor) -> Tensor:
    """0 where `mask` is True, -inf elsewhere, float32."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
