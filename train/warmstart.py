"""Fitting the routers to the teacher's own queries, layer by layer, before any backpropagation through the backbone.

The teacher's queries, the spans' summaries and the attention mass on each span are plain tensors, so a router can be
fitted to them directly: one pass of the backbone over a few documents, then hundreds of cheap steps. End-to-end
training starts from there. *(ours; the paper trains end to end from random projections)*
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.memory import span_rows, summarise
from sekv.policies.sekv import SeKVPolicy
from sekv.routing import group_max, routing_logits, select_spans, summary_norm
from train import losses
from train.errors import ConfigError
from train.losses import LossConfig
from train.objective import MiningConfig, mine_queries, read_document, teacher_mass, window_queries
from train.recall import take_queries

_STARTING_BIAS = -4.0  # of the logits: few spans hold much of a head's attention


@dataclass(frozen=True)
class WarmStartConfig:
    """How long and how fast the routers are fitted.

    Attributes:
        documents: training documents whose attention they are fitted to; 0 skips the warm start.
        steps: optimiser steps, each over one document and all layers.
        lr: learning rate of the projections; scale, length coefficient and bias learn ten times faster.
    """

    documents: int = 16
    steps: int = 400
    lr: float = 3e-3

    def __post_init__(self) -> None:
        if self.documents < 0 or self.steps < 1 or self.lr <= 0:
            raise ConfigError(
                f"warm start needs documents >= 0, steps >= 1 and lr > 0, got {self.documents}, {self.steps} and {self.lr}"
            )


@dataclass(frozen=True)
class RouterExample:
    """What one layer's router is fitted to, from one document.

    Attributes:
        query: the teacher's rotated queries [1, H, M, d].
        summary_key: [1, K, S, d].
        length: tokens per span [1, S].
        span_mass: the teacher's attention on each span [1, H, M, S].
        zoom_rows: rows left for zooming [1].
    """

    query: Tensor
    summary_key: Tensor
    length: Tensor
    span_mass: Tensor
    zoom_rows: Tensor


def fit_routers(
    adapter: SeKVAdapter,
    documents: Sequence[Sequence[RouterExample]],
    config: WarmStartConfig,
    loss_config: LossConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Sets projections, scales, biases and thresholds of all layers in place.

    Args:
        adapter: its routers are overwritten; the rank gate is left alone.
        documents: per document, one example for each of the adapter's layers.
        config: how long.
        loss_config: the zoom loss that is minimised.
        on_step: called with the step and the loss.
    """
    with torch.no_grad():
        for i, examples in enumerate(zip(*documents, strict=True)):
            _start_from_statistics(adapter, i, examples)
    slow = [adapter.projection]
    fast = [adapter.log_scale, adapter.length_raw, adapter.bias]
    optimizer = torch.optim.Adam([{"params": slow, "lr": config.lr}, {"params": fast, "lr": 10 * config.lr}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    with torch.enable_grad():
        for step in range(config.steps):
            examples = documents[step % len(documents)]
            terms = [
                losses.zoom(
                    _logits(adapter, layer, example),
                    losses.zoom_targets(example.span_mass, loss_config),
                    example.length > 0,
                    loss_config.positive,
                )
                for layer, example in zip(adapter.layers, examples, strict=True)
            ]
            loss = torch.cat(terms).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if on_step is not None:
                on_step(step, float(loss.detach()))
    optimizer.zero_grad()
    with torch.no_grad():
        levels = [
            _marginal_alpha(adapter, layer, examples)
            for layer, examples in zip(adapter.layers, zip(*documents, strict=True), strict=True)
        ]
        levels_per_head = torch.stack(levels)[:, None].expand(len(levels), adapter.bias.shape[1])
        if adapter.threshold_logit.shape[0] == 1:  # one global threshold
            levels_per_head = levels_per_head.mean().reshape(1, 1)
        adapter.threshold_logit.copy_(torch.logit(levels_per_head, eps=1e-4))


def read_examples(
    backbone: Backbone,
    adapter: SeKVAdapter,
    input_ids: Tensor,
    *,
    window: int,
    budget: Budget,
    mining: MiningConfig,
) -> list[RouterExample]:
    """What the routers of all layers can learn from one document; a single pass of the backbone.

    Args:
        backbone: frozen.
        adapter: says how contexts are cut and summarised.
        input_ids: one document without padding [1, C + Q].
        window: query tokens Q.
        budget: rows for the context.
        mining: which queries count.
    """
    document = read_document(backbone, input_ids, torch.ones_like(input_ids, dtype=torch.bool), window)
    context = document.narrow(document.n_tokens - window)
    policy = SeKVPolicy(adapter=adapter)
    plan = policy.prepare(context, budget)
    mined = mine_queries(document, window, mining)
    weights = policy.token_weights(context)
    examples = []
    for layer in adapter.layers:
        rows = span_rows(context.key_value(layer)[0], plan.tokens)
        mass = teacher_mass(document, layer, plan.segmentation, mined, window)
        examples.append(
            RouterExample(
                query=take_queries(window_queries(document, layer), mined).float(),
                summary_key=summarise(rows, plan.tokens, weights),
                length=plan.segmentation.span_length,
                span_mass=mass[..., plan.segmentation.exact_index.shape[1] : -1],
                zoom_rows=plan.zoom_rows,
            )
        )
    return examples


def _logits(adapter: SeKVAdapter, layer: int, example: RouterExample) -> Tensor:
    router = adapter.router(layer)
    norm = summary_norm(router, example.summary_key)
    return routing_logits(router, example.query, example.summary_key, norm, example.length)


def _start_from_statistics(adapter: SeKVAdapter, i: int, examples: Sequence[RouterExample]) -> None:
    """Projects onto the directions in which queries and (centred) summary keys vary together; scales logits like q.k."""
    heads, routing_dim, dim = adapter.projection.shape[1:]
    query = torch.cat([example.query[0] for example in examples], dim=1)  # [H, samples, d]
    keys = torch.cat([example.summary_key[0, :, example.length[0] > 0].float() for example in examples], dim=1)
    keys = keys.repeat_interleave(heads // keys.shape[0], dim=0)
    centred = keys - keys.mean(dim=1, keepdim=True)
    query_moment = query.mT @ query / query.shape[1]
    key_moment = centred.mT @ centred / keys.shape[1]
    joint = query_moment @ key_moment
    directions = torch.linalg.eigh((joint + joint.mT) / 2).eigenvectors[..., -routing_dim:]
    adapter.projection[i] = directions.mT
    norm = einsum(keys, adapter.projection[i], "h s d, h r d -> h s r").norm(dim=-1).mean(dim=-1)
    adapter.log_scale[i] = torch.log(norm.clamp_min(1e-6) * (routing_dim / dim) ** 0.5)
    adapter.bias[i] = _STARTING_BIAS


def _marginal_alpha(adapter: SeKVAdapter, layer: int, examples: Sequence[RouterExample]) -> Tensor:
    """The level of alpha at which a query's rows are usually used up: the lower quartile over queries and groups."""
    marginal = []
    for example in examples:
        alpha = group_max(torch.sigmoid(_logits(adapter, layer, example)), example.summary_key.shape[1])
        chosen = select_spans(alpha, example.length[:, None, None], example.zoom_rows[:, None, None])
        marginal.append(torch.where(chosen, alpha, 1.0).amin(dim=-1).flatten())
    return torch.cat(marginal).quantile(0.25)
