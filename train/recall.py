"""What a router does: how much of the teacher's span mass it covers at equal rows, and how often it zooms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sekv.routing import group_sum, mean_margin, select_spans
from sekv.stores.spans import LayerTrace
from train.losses import masked_mean

ASKED, ZOOMED = "asked", "zoomed"


def router_recall(trace: LayerTrace, span_mass: Tensor, mined: Tensor) -> dict[str, Tensor]:
    """Share of the teacher's span mass that lies in the spans each router takes within the rows left for zooming.

    Every router takes spans in its own order until the same rows are used up, thresholds aside, so the figures compare
    the orders only.

    Args:
        trace: one layer's decisions over the window.
        span_mass: teacher's mass per span at the mined queries [B, H, M, S].
        mined: window positions of the mined queries [B, M].

    Returns:
        `learned`, `mean` (untrained inner product) and `oracle` (the teacher's own order), each [B]; 0 where there is
        no span mass.
    """
    kv_heads = trace.summary_key.shape[1]
    wanted = group_sum(span_mass, kv_heads)  # [B, K, M, S]
    margins = {
        "learned": group_sum(take_queries(trace.alpha, mined), kv_heads),
        "mean": mean_margin(take_queries(trace.query, mined), trace.summary_key, trace.span_length, trace.scaling),
        "oracle": wanted,
    }
    cost = trace.segmentation.zoom_cost
    return {name: covered_share(wanted, margin, cost, trace.zoom_rows) for name, margin in margins.items()}


def covered_share(wanted: Tensor, order: Tensor, cost: Tensor, rows: Tensor) -> Tensor:
    """Share of a mass that lies in the spans taken in an order until the rows are used up.

    Args:
        wanted: mass per span, summed over the heads that share a choice [B, K, M, S].
        order: the highest are taken first [B, K, M, S].
        cost: rows that zooming into a span adds [B, S].
        rows: rows left for zooming [B].

    Returns:
        [B]; 0 where there is no mass.
    """
    chosen = select_spans(order, cost[:, None, None], rows[:, None, None])
    total = wanted.sum(dim=-1)
    covered = (wanted * chosen).sum(dim=-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
    return masked_mean(covered, total > 0)


@torch.no_grad()
def zoom_rates(traces: Sequence[LayerTrace]) -> dict[str, Tensor]:
    """How often each head zooms into a span, averaged over queries and real spans.

    Args:
        traces: of all compressible layers, over the same documents.

    Returns:
        `asked`: share of spans with alpha >= tau [B, L, H]; `zoomed`: share taken within the rows left [B, L, K], or
        [B, L, H] without group sharing.
    """

    def rate(decision: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(dim=1)[:, None] * decision.shape[2]
        return (decision * mask[:, None, None]).sum(dim=(2, 3)) / count.clamp_min(1)

    return {
        ASKED: torch.stack([rate(t.alpha >= t.tau[:, None, None], t.span_mask) for t in traces], dim=1),
        ZOOMED: torch.stack([rate(t.expand.detach(), t.span_mask) for t in traces], dim=1),
    }


def take_queries(x: Tensor, position: Tensor) -> Tensor:
    """Picks window positions [B, M] out of [B, heads, Q, ...]: [B, heads, M, ...]."""
    index = position.reshape(position.shape[0], 1, -1, *[1] * (x.ndim - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))
