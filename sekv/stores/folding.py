"""Folding: the oldest tail tokens become spans of the memory, so that a long generation stays within its rows *(ours)*.

A block of the tail is cut into pieces of equal length, no longer than the longest span of the context: the store
knows nothing of the tokens' surprisal, so their summaries weigh them alike. The pieces take no rows of their own. The
summary rows that the context has are shared out anew among all spans, and zooming into folded tokens uses the rows
that are left for zooming: what a query attends to beside the tail never grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sekv.memory import SpanTokens
from sekv.segmentation import Segmentation, shared_rows
from sekv.stores.plan import SpanPlan


@dataclass(frozen=True)
class FoldedBlock:
    """A block of tail tokens as spans; the same for all layers.

    Attributes:
        tokens: where the tokens of its spans are within the block.
        length: tokens per span [B, P].
        plan: of the memory with these spans behind those that it has.
    """

    tokens: SpanTokens
    length: Tensor
    plan: SpanPlan

    def tensors(self) -> list[Tensor]:
        """The tables of the block alone, for byte counts."""
        return [*vars(self.tokens).values(), self.length]


def fold(plan: SpanPlan, n: int, real: Tensor | None) -> FoldedBlock:
    """Cuts the next `n` tokens behind a memory into spans.

    All layers fold the same tokens: while one holds the result, the others receive it and share its tables.

    Args:
        plan: of the memory.
        n: tokens in the block.
        real: False for padding, which is on the left [B, n]; None when there is none.
    """
    batch = len(plan.lengths)
    pads = [0] * batch if real is None else (n - real.expand(batch, -1).sum(dim=1)).tolist()
    key = (n, *pads)
    block = plan.folded.get(key)
    if block is None:
        block = plan.folded[key] = _fold(plan, n, plan.lengths.new_tensor(pads))
    return block


def _fold(plan: SpanPlan, n: int, pads: Tensor) -> FoldedBlock:
    old, device = plan.segmentation, plan.lengths.device
    pieces = -(-n // plan.tokens.padded_index.shape[2])
    edge = torch.arange(pieces + 1, device=device) * n // pieces
    start = torch.maximum(edge[:-1], pads[:, None])  # [B, P]
    length = (edge[1:] - start).clamp_min(0)
    start = start.masked_fill(length == 0, 0)
    block = replace(old, span_start=start, span_length=length)
    tokens = SpanTokens.of(block)
    # A context kept whole has no summary row yet: its first one comes out of what it has left for zooming.
    before = old.summary_rows if plan.folded_rows is None else plan.folded_rows
    allowed = before.clamp_min(1)
    lengths = torch.cat([old.span_length, length], dim=1)
    segmentation: Segmentation = replace(
        old,
        span_start=torch.cat([old.span_start, (start + plan.n_tokens).masked_fill(length == 0, 0)], dim=1),
        span_length=lengths,
        span_row=shared_rows(lengths, allowed),
        merged=True,
    )
    return FoldedBlock(
        tokens,
        length,
        replace(
            plan,
            segmentation=segmentation,
            tokens=plan.tokens.followed_by(tokens, plan.n_tokens),
            zoom_rows=(plan.zoom_rows - allowed + before).clamp_min(0),
            folded_rows=allowed,
            lengths=plan.lengths + length.sum(dim=1),
            n_tokens=plan.n_tokens + n,
        ),
    )
