"""Fitting the routers to the teacher's own queries, layer by layer, before any backpropagation through the backbone.

The teacher's queries, the keys of the spans and the attention mass on each span are plain tensors, so a router can be
fitted to them directly: one pass of the backbone over some documents, then hundreds of cheap steps. End-to-end
training starts from there. *(ours; the paper trains end to end from random projections)*
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from sekv.adapter import SHARE_BIAS, SeKVAdapter
from sekv.routing import group_max, group_sum, select_spans
from sekv.stores.plan import share_among_layers
from train.errors import ConfigError
from train.examples import RouterExample
from train.losses import LossConfig
from train.objective import zoom_loss

_STARTING_BIAS = {"tokens": SHARE_BIAS, "summary": -4.0}  # of the logits: few spans hold much of a head's attention
_BISECTIONS = 40
_SMALLEST_VARIANCE = 1e-4  # of a query direction, relative to the largest


@dataclass(frozen=True)
class WarmStartConfig:
    """How long and how fast the routers are fitted.

    Attributes:
        documents: training documents whose attention they are fitted to.
        retrieval: as many more documents with facts hidden in them and questions about these behind; with neither kind
            there is no warm start.
        steps: optimiser steps, each over one document and all layers; 0 leaves the routers as the statistics of queries
            and keys make them.
        queries: mined queries of the document that a step looks at.
        lr: learning rate of the projections; scale, offset and length coefficient learn ten times faster.
        layer_rows: how far the rows of the layers follow the attention that lies on spans there: 0 gives every layer
            the same, 1 as many as hold the attention above one level for all layers.
    """

    documents: int = 16
    retrieval: int = 0
    steps: int = 400
    queries: int = 24
    lr: float = 3e-3
    layer_rows: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.layer_rows <= 1:
            raise ConfigError(f"warm start's layer_rows is a share in [0, 1], got {self.layer_rows}")
        if min(self.documents, self.retrieval, self.steps) < 0 or self.queries < 1 or self.lr <= 0:
            raise ConfigError(
                "warm start needs documents, retrieval and steps >= 0, queries >= 1 and lr > 0, got "
                f"{self.documents}, {self.retrieval}, {self.steps}, {self.queries} and {self.lr}"
            )


def fit_routers(
    adapter: SeKVAdapter,
    examples: Sequence[RouterExample],
    config: WarmStartConfig,
    loss_config: LossConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Sets projections, scales, biases, thresholds and the rows of all layers in place.

    Args:
        adapter: its routers are overwritten; the rank gate is left alone.
        examples: one for each document.
        config: how long.
        loss_config: the zoom loss that is minimised.
        on_step: called with the step and the loss.
    """
    _start_from_statistics(adapter, examples)
    _share_rows(adapter, examples, config)
    if config.steps:
        _minimise(adapter, examples, config, loss_config, on_step)
    _set_thresholds(adapter, examples, config.queries)


def _minimise(
    adapter: SeKVAdapter,
    examples: Sequence[RouterExample],
    config: WarmStartConfig,
    loss_config: LossConfig,
    on_step: Callable[[int, float], None] | None,
) -> None:
    by_tokens = adapter.config.index == "tokens"
    slow = [adapter.projection, *([adapter.key_projection] if by_tokens else [])]
    fast = [adapter.log_scale, adapter.offset if by_tokens else adapter.length_raw]
    if loss_config.labels != "share":  # otherwise the bias has no part in the loss: it says how alpha is read
        fast.append(adapter.bias)
    optimizer = torch.optim.Adam([{"params": slow, "lr": config.lr}, {"params": fast, "lr": 10 * config.lr}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(config.steps):
        whole = examples[step % len(examples)]
        chosen = torch.randperm(whole.query.shape[2], generator=generator)[: config.queries]
        example = whole.at(chosen.to(whole.query.device))
        with torch.enable_grad():
            loss = zoom_loss(*example.logits(adapter), example.span_mass, example.length > 0, loss_config).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, float(loss.detach()))
    optimizer.zero_grad()


@torch.no_grad()
def _start_from_statistics(adapter: SeKVAdapter, examples: Sequence[RouterExample]) -> None:
    """Projections by second moments of queries and keys; scales as those of q.k."""
    adapter.bias.fill_(_STARTING_BIAS[adapter.config.index])
    if adapter.config.index == "tokens":
        _start_by_tokens(adapter, examples)
    else:
        _start_by_summaries(adapter, examples)


def _start_by_tokens(adapter: SeKVAdapter, examples: Sequence[RouterExample]) -> None:
    """The projections of rank r that change q.k least, over a group's queries and the span tokens' keys.

    With A the root of the queries' second moment and C the keys' covariance, E (q'k - q'Bk)^2 is least among matrices B
    of rank r for B = A^-1 U U' A, U the leading eigenvectors of A C A. Queries count by their attention on spans.
    """
    n_layers, n_heads, rank, dim = adapter.projection.shape
    groups = n_layers * adapter.key_projection.shape[1]
    moment, covariance = adapter.projection.new_zeros(2, groups, dim, dim)
    for example in examples:
        weighted = example.query[0] * example.span_mass[0].sum(-1, keepdim=True).sqrt()
        weighted = weighted.unflatten(0, (groups, -1)).flatten(1, 2)  # [L * K, G * M, d]
        moment += weighted.mT @ weighted / weighted.shape[1]
        centred = example.key[0].float()
        centred = centred - centred.mean(dim=1, keepdim=True)
        covariance += centred.mT @ centred / centred.shape[1]
    variance, axes = torch.linalg.eigh(moment)
    variance = variance.clamp_min(1e-12).maximum(variance[..., -1:] * _SMALLEST_VARIANCE)
    root = axes * variance.sqrt()[:, None] @ axes.mT
    inverse = axes * variance.rsqrt()[:, None] @ axes.mT
    leading = torch.linalg.eigh(root @ covariance @ root).eigenvectors[..., -rank:].mT
    queries, keys = leading @ inverse, leading @ root
    balance = (queries.norm(dim=(1, 2), keepdim=True) / keys.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)).sqrt()
    adapter.key_projection.copy_((keys * balance).view_as(adapter.key_projection))
    per_head = (queries / balance).repeat_interleave(n_layers * n_heads // groups, dim=0)
    adapter.projection.copy_(per_head.view_as(adapter.projection))
    adapter.log_scale.zero_()
    adapter.offset.zero_()


def _start_by_summaries(adapter: SeKVAdapter, examples: Sequence[RouterExample]) -> None:
    """Projects onto the directions in which queries and summary keys vary together."""
    n_layers, n_heads, routing_dim, dim = adapter.projection.shape
    query = torch.cat([example.query[0] for example in examples], dim=1)  # [L * H, samples, d]
    keys = torch.cat([example.key[0, :, example.length[0] > 0] for example in examples], dim=1)
    keys = keys.repeat_interleave(len(query) // len(keys), dim=0)
    centred = keys - keys.mean(dim=1, keepdim=True)
    joint = (query.mT @ query / query.shape[1]) @ (centred.mT @ centred / keys.shape[1])
    directions = torch.linalg.eigh((joint + joint.mT) / 2).eigenvectors[..., -routing_dim:].mT
    norm = einsum(keys, directions, "h s d, h r d -> h s r").norm(dim=-1).mean(dim=-1)
    scale = norm.clamp_min(1e-6) * (routing_dim / dim) ** 0.5
    adapter.projection.copy_(directions.reshape_as(adapter.projection))
    adapter.log_scale.copy_(scale.log().reshape(n_layers, n_heads))


@torch.no_grad()
def _share_rows(adapter: SeKVAdapter, examples: Sequence[RouterExample], config: WarmStartConfig) -> None:
    """Sets each layer's rows so that the last row zoomed into holds about as much attention in every layer.

    The attention per row above which all layers together use the rows that there are is found by bisection.
    """
    if not config.layer_rows:
        adapter.row_factor.fill_(1.0)
        return
    kv_heads = examples[0].key.shape[1] // len(adapter.layers)
    # Attention per row [L * K, M, S], and rows of each span.
    spans = [(group_sum(x.span_mass, x.key.shape[1])[0] / x.length[0].clamp_min(1), x.length[0]) for x in examples]
    available = float(torch.cat([x.zoom_rows for x in examples]).float().mean())

    def used(level: float) -> Tensor:
        rows = [((d > level) * n).sum(-1).float().mean(-1) for d, n in spans]
        return torch.stack(rows).mean(0).view(-1, kv_heads).mean(1)  # [L]

    low, high = -30.0, 0.0  # logarithms of the level
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(used(math.exp(middle)).mean()) > available else (low, middle)
    wanted = used(math.exp(low))
    if not bool(wanted.any()):  # nothing looks at spans: nothing tells the layers apart
        wanted = torch.ones_like(wanted)
    adapter.row_factor.copy_(1 - config.layer_rows + config.layer_rows * wanted / wanted.mean())


@torch.no_grad()
def _set_thresholds(adapter: SeKVAdapter, examples: Sequence[RouterExample], queries: int) -> None:
    """Sets each layer's thresholds to the alpha at which a query's rows are usually used up: the lower quartile."""
    marginal = [
        _marginal(adapter, example.at(some))
        for example in examples
        for some in torch.arange(example.query.shape[2], device=example.query.device).split(queries)
    ]
    level = torch.cat(marginal, dim=1).quantile(0.25, dim=1, keepdim=True)  # [L, 1]
    if adapter.threshold_logit.shape[0] == 1:  # one global threshold
        level = level.mean(dim=0, keepdim=True)
    adapter.threshold_logit.copy_(torch.logit(level, eps=1e-4).expand_as(adapter.threshold_logit))


def _marginal(adapter: SeKVAdapter, example: RouterExample) -> Tensor:
    """The alpha by which the last span that fits is taken, per KV head and query [L, K * M]; 1 where none fits."""
    alpha = torch.sigmoid(example.logits(adapter)[1])
    kv_heads = example.key.shape[1]
    most = example.cost.clamp_min(0).sum(dim=1)
    rows = share_among_layers(adapter.row_factor, example.zoom_rows, most)  # [L, 1]
    rows = rows.repeat_interleave(kv_heads // len(adapter.layers), dim=0).mT[..., None]
    chosen = select_spans(group_sum(alpha, kv_heads), example.cost[:, None, None], rows)
    strongest = torch.where(chosen, group_max(alpha, kv_heads), 1.0)
    return strongest.amin(dim=-1).reshape(len(adapter.layers), -1)
