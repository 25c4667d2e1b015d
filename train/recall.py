"""How much of the teacher's span mass a router covers at equal rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sekv.routing import group_max, group_sum, mean_margin, select_spans
from sekv.stores.spans import LayerTrace
from train.losses import masked_mean


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
        "learned": group_max(take_queries(trace.alpha, mined) - trace.tau[:, None, None], kv_heads),
        "mean": mean_margin(take_queries(trace.query, mined), trace.summary_key, trace.span_length, trace.scaling),
        "oracle": wanted,
    }
    total = wanted.sum(dim=-1)
    recall = {}
    for name, margin in margins.items():
        chosen = select_spans(margin, trace.span_length[:, None, None], trace.zoom_rows[:, None, None])
        covered = (wanted * chosen).sum(dim=-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
        recall[name] = masked_mean(covered, total > 0)
    return recall


def take_queries(x: Tensor, position: Tensor) -> Tensor:
    """Picks window positions [B, M] out of [B, heads, Q, ...]: [B, heads, M, ...]."""
    index = position.reshape(position.shape[0], 1, -1, *[1] * (x.ndim - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))
