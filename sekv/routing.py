"""Which spans to zoom into: learned, untrained and oracle margins, and selection within the rows left."""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from sekv.adapter import LayerRouter
from sekv.kernels import PASSES

ROUTINGS = ("learned", "mean", "oracle")
_TEMPERATURE = 0.1  # of the straight-through estimator (method section 1.6)


def routing_logits(router: LayerRouter, query: Tensor, summary_key: Tensor, norm: Tensor, length: Tensor) -> Tensor:
    """Logit of alpha_S for every query head and span, with an index of summaries (method section 1.3).

    Args:
        router: one layer's parameters.
        query: [B, H, Q, d].
        summary_key: [B, K, S, d].
        norm: |W k_S| per query head [B, H, S], from `summary_norm`.
        length: tokens per span [B, S].

    Returns:
        [B, H, Q, S] float32.
    """
    batch, heads, n_queries, dim = query.shape
    kv_heads = summary_key.shape[1]
    # <Wq, Wk> = <W'Wq, k>: projecting the query twice saves keeping a projected key per query head.
    projected = query.float() @ router.projection.mT @ router.projection
    inner = projected.view(batch, kv_heads, -1, dim) @ summary_key.float().mT
    gain = router.scale[:, None] * router.projection.shape[1] ** -0.5 / norm.clamp_min(1e-6)
    assert router.length_coefficient is not None
    prior = router.length_coefficient[:, None] * log_length(length)[:, None] + router.bias[:, None]
    return torch.addcmul(prior[:, :, None], inner.view(batch, heads, n_queries, -1), gain[:, :, None])


def summary_norm(router: LayerRouter, summary_key: Tensor) -> Tensor:
    """|W k_S| for every query head [B, H, S] float32, from summary keys [B, K, S, d]."""
    heads, kv_heads = router.projection.shape[0], summary_key.shape[1]
    per_head = summary_key.float().repeat_interleave(heads // kv_heads, dim=1)
    return einsum(per_head, router.projection, "b h s d, h r d -> b h s r").norm(dim=-1)


def log_length(length: Tensor) -> Tensor:
    """log|S| in float32, 0 where there is no span."""
    return length.clamp_min(1).float().log()


def group_max(margin: Tensor, kv_heads: int) -> Tensor:
    """The strongest wish of any query head of each KV group: [B, H, Q, S] to [B, K, Q, S]."""
    return margin.unflatten(1, (kv_heads, -1)).amax(dim=2)


def group_sum(mass: Tensor, kv_heads: int) -> Tensor:
    """Adds up the query heads of each KV group: [B, H, Q, S] to [B, K, Q, S]."""
    return mass.unflatten(1, (kv_heads, -1)).sum(dim=2)


def mean_margin(query: Tensor, summary_key: Tensor, length: Tensor, scaling: float) -> Tensor:
    """Untrained routing: the mass that q.k_S + log|S| predicts for each span, summed over the heads of a KV group.

    Args:
        query: [B, H, Q, d].
        summary_key: [B, K, S, d].
        length: tokens per span [B, S]; 0 where there is none.
        scaling: factor on q.k.

    Returns:
        [B, K, Q, S] float32.
    """
    batch, heads, n_queries, dim = query.shape
    kv_heads = summary_key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, -1, dim) * scaling
    logits = grouped @ summary_key.float().mT + log_length(length)[:, None, None]
    logits = logits.masked_fill((length == 0)[:, None, None], torch.finfo(torch.float32).min)
    return group_sum(logits.softmax(dim=-1).reshape(batch, heads, n_queries, -1), kv_heads)


def sum_by_span(mass: Tensor, token_span: Tensor, n_spans: int) -> Tensor:
    """Adds attention mass over each span's tokens.

    Args:
        mass: [B, ..., T] on span tokens; padding tokens must carry 0.
        token_span: span index of each token [B, T].
        n_spans: S.

    Returns:
        [B, ..., S].
    """
    index = token_span.reshape(token_span.shape[0], *[1] * (mass.ndim - 2), -1).expand_as(mass)
    return mass.new_zeros(*mass.shape[:-1], n_spans).scatter_add(-1, index, mass)


def select_spans(margin: Tensor, cost: Tensor, rows: Tensor, eligible: Tensor | None = None) -> Tensor:
    """Takes spans by margin until the rows are used up.

    Args:
        margin: [..., S], higher is zoomed first.
        cost: rows that zooming into a span adds, broadcastable to [..., S]; negative where there is none.
        rows: rows left for zooming, broadcastable to [...].
        eligible: spans that may be taken [..., S]; None allows all.

    Returns:
        bool [..., S].
    """
    order = margin.argsort(dim=-1, descending=True)
    cost = cost.expand_as(margin).gather(-1, order)
    open_ = cost >= 0
    if eligible is not None:
        open_ = open_ & eligible.gather(-1, order)
    left = rows.expand(margin.shape[:-1]).clone()
    taken = torch.zeros_like(open_)
    for _ in range(PASSES):
        candidate = open_ & ~taken & (cost <= left[..., None])
        fits = candidate & ((cost * candidate).cumsum(-1) <= left[..., None])
        taken = taken | fits
        left = left - (cost * fits).sum(-1)
    return torch.zeros_like(taken).scatter(-1, order, taken)


def straight_through(hard: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Hard decision forward, sigmoid(margin / 0.1) backward (method section 1.6).

    Args:
        hard: decisions, bool.
        margin: alpha - tau, same shape.

    Returns:
        The decision as float32 with a straight-through gradient, and the soft decision.
    """
    soft = torch.sigmoid(margin / _TEMPERATURE)
    return hard.float() + (soft - soft.detach()), soft
