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
                "warm start needs documents >= 0, steps >= 1 and lr > 0, "
                f"got {self.documents}, {self.steps} and {self.lr}"
            )


@dataclass(frozen=True)
class RouterExample:
    """What the routers of all layers can learn from one document.

    Dimensions: L layers, H query heads, K KV heads, M mined queries, S spans, d head dimension. Layers lie side by side
    on the head axis, because a document's spans are the same in all of them.

    Attributes:
        query: the teacher's rotated queries [1, L * H, M, d].
        summary_key: [1, L * K, S, d].
        length: tokens per span [1, S].
        span_mass: the teacher's attention on each span [1, L * H, M, S].
        zoom_rows: rows left for zooming [1].
    """

    query: Tensor
    summary_key: Tensor
    length: Tensor
    span_mass: Tensor
    zoom_rows: Tensor


def read_example(
    backbone: Backbone,
    adapter: SeKVAdapter,
    input_ids: Tensor,
    *,
    window: int,
    budget: Budget,
    mining: MiningConfig,
) -> RouterExample:
    """Reads one document; a single pass of the backbone.

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
    n_exact = plan.segmentation.exact_index.shape[1]
    queries, keys, masses = [], [], []
    for layer in adapter.layers:
        queries.append(take_queries(window_queries(document, layer), mined).float())
        keys.append(summarise(span_rows(context.key_value(layer)[0], plan.tokens), plan.tokens, weights).float())
        masses.append(teacher_mass(document, layer, plan.segmentation, mined, window)[..., n_exact:-1])
    return RouterExample(
        query=torch.cat(queries, dim=1),
        summary_key=torch.cat(keys, dim=1),
        length=plan.segmentation.span_length,
        span_mass=torch.cat(masses, dim=1),
        zoom_rows=plan.zoom_rows,
    )


def fit_routers(
    adapter: SeKVAdapter,
    examples: Sequence[RouterExample],
    config: WarmStartConfig,
    loss_config: LossConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Sets projections, scales, biases and thresholds of all layers in place.

    Args:
        adapter: its routers are overwritten; the rank gate is left alone.
        examples: one for each document.
        config: how long.
        loss_config: the zoom loss that is minimised.
        on_step: called with the step and the loss.
    """
    _start_from_statistics(adapter, examples)
    optimizer = torch.optim.Adam(
        [
            {"params": [adapter.projection], "lr": config.lr},
            {"params": [adapter.log_scale, adapter.length_raw, adapter.bias], "lr": 10 * config.lr},
        ]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    targets = [losses.zoom_targets(example.span_mass, loss_config) for example in examples]
    for step in range(config.steps):
        example, target = examples[step % len(examples)], targets[step % len(examples)]
        with torch.enable_grad():
            logits = example_logits(adapter, example)
            loss = losses.zoom(logits, target, example.length > 0, loss_config.positive).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, float(loss.detach()))
    optimizer.zero_grad()
    _set_thresholds(adapter, examples)


def example_logits(adapter: SeKVAdapter, example: RouterExample) -> Tensor:
    """Logits of alpha for all layers' heads [1, L * H, M, S]."""
    router = adapter.joint_router()
    norm = summary_norm(router, example.summary_key)
    return routing_logits(router, example.query, example.summary_key, norm, example.length)


@torch.no_grad()
def _start_from_statistics(adapter: SeKVAdapter, examples: Sequence[RouterExample]) -> None:
    """Projects onto the directions in which queries and summary keys vary together; scales logits like q.k."""
    n_layers, n_heads, routing_dim, dim = adapter.projection.shape
    query = torch.cat([example.query[0] for example in examples], dim=1)  # [L * H, samples, d]
    keys = torch.cat([example.summary_key[0, :, example.length[0] > 0] for example in examples], dim=1)
    keys = keys.repeat_interleave(len(query) // len(keys), dim=0)
    centred = keys - keys.mean(dim=1, keepdim=True)
    joint = (query.mT @ query / query.shape[1]) @ (centred.mT @ centred / keys.shape[1])
    directions = torch.linalg.eigh((joint + joint.mT) / 2).eigenvectors[..., -routing_dim:].mT
    norm = einsum(keys, directions, "h s d, h r d -> h s r").norm(dim=-1).mean(dim=-1)
    scale = norm.clamp_min(1e-6) * (routing_dim / dim) ** 0.5
    adapter.projection.copy_(directions.reshape_as(adapter.projection))
    adapter.log_scale.copy_(scale.log().reshape(n_layers, n_heads))
    adapter.bias.fill_(_STARTING_BIAS)


@torch.no_grad()
def _set_thresholds(adapter: SeKVAdapter, examples: Sequence[RouterExample]) -> None:
    """Sets each layer's thresholds to the alpha at which a query's rows are usually used up: the lower quartile."""
    n_layers = adapter.projection.shape[0]
    marginal = []
    for example in examples:
        alpha = group_max(torch.sigmoid(example_logits(adapter, example)), example.summary_key.shape[1])
        chosen = select_spans(alpha, example.length[:, None, None], example.zoom_rows[:, None, None])
        marginal.append(torch.where(chosen, alpha, 1.0).amin(dim=-1).reshape(n_layers, -1))
    level = torch.cat(marginal, dim=1).quantile(0.25, dim=1, keepdim=True)  # [L, 1]
    if adapter.threshold_logit.shape[0] == 1:  # one global threshold
        level = level.mean(dim=0, keepdim=True)
    adapter.threshold_logit.copy_(torch.logit(level, eps=1e-4).expand_as(adapter.threshold_logit))
