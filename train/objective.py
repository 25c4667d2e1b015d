"""One training step's computation: teacher, student and losses for a batch of documents (method section 1.6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.errors import BackboneError
from sekv.policies.sekv import training_cache
from sekv.prefill import Prefill, prefill
from sekv.segmentation import Segmentation
from sekv.stores.spans import DifferentiableSpanStore, LayerTrace
from train import losses, teacher
from train.errors import ConfigError
from train.losses import LossConfig
from train.recall import router_recall, take_queries, zoom_rates

_SINKS = 4  # first tokens whose attention says nothing about a long-range need


@dataclass(frozen=True)
class MiningConfig:
    """Which window queries the losses look at.

    Attributes:
        queries: mined queries per document.
        distance: tokens before a query that count as near.
        layer_stride: every how many layers the teacher's attention is looked at to rank the queries.
    """

    queries: int = 64
    distance: int = 512
    layer_stride: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"mining constant '{name}' must be at least 1, got {value}")


@dataclass(frozen=True)
class Outcome:
    """Losses and figures of a batch.

    Attributes:
        losses: `logits`, `attention`, `zoom`, `recon`, `budget`, each per document [B].
        figures: what to watch, each per document [B], without gradient.
        maps: from `zoom_rates`, each [B, L, heads]; empty unless the routers are measured.
    """

    losses: dict[str, Tensor]
    figures: dict[str, Tensor]
    maps: dict[str, Tensor]


@dataclass(frozen=True)
class Student:
    """The forward pass over the memory.

    Attributes:
        hidden: final hidden states of the window [B, Q, D], with a gradient to the adapter.
        cache: the memory.
        traces: per compressible layer, what it decided and attended to.
    """

    hidden: Tensor
    cache: CompressedCache
    traces: list[LayerTrace]


def read_document(backbone: Backbone, input_ids: Tensor, mask: Tensor, window: int) -> Prefill:
    """The one pass without gradient that serves the teacher and builds the student's memory.

    Raises:
        BackboneError: some layers keep a cache of their own, which already holds the window and cannot be cut back.
    """
    if len(backbone.geometry.compressible) < backbone.geometry.num_layers:
        raise BackboneError(
            f"{backbone.name} has layers with sliding-window or linear attention; training needs full attention in "
            "every layer"
        )
    return prefill(backbone, input_ids, mask, surprisal=True, window=window)


def run_student(
    document: Prefill, adapter: SeKVAdapter, budget: Budget, window: int, checkpoint: bool = False
) -> Student:
    """Compresses the context and reads the window over it: every query sees the memory and, causally, the window.

    Args:
        document: context and window, windows aligned in the last columns.
        adapter: being trained.
        budget: rows for the context.
        window: query tokens Q.
        checkpoint: compute each layer's attention again in the backward pass.

    Returns:
        The student's hidden states and decisions.

    Raises:
        BudgetError: the budget does not fit the context.
    """
    backbone, n_context = document.backbone, document.n_tokens - window
    cache = training_cache(document.narrow(n_context), adapter, budget, checkpoint=checkpoint)
    hidden = backbone.hidden_states(
        document.input_ids[:, n_context:],
        attention_mask=None if bool(document.mask.all()) else document.mask.long(),
        position_ids=document.positions[:, n_context:],
        cache=cache,
    )
    traces = [s.trace for s in cache.stores if isinstance(s, DifferentiableSpanStore) and s.trace is not None]
    return Student(hidden, cache, traces)


def evaluate_batch(
    backbone: Backbone,
    adapter: SeKVAdapter,
    input_ids: Tensor,
    mask: Tensor,
    *,
    window: int,
    budget: Budget,
    mining: MiningConfig,
    config: LossConfig,
    recall: bool = False,
    checkpoint: bool = False,
) -> Outcome:
    """Losses and figures of a batch of documents.

    Args:
        backbone: frozen.
        adapter: being trained.
        input_ids: context and window [B, C + Q], padded on the left.
        mask: True for real tokens [B, C + Q].
        window: query tokens Q.
        budget: rows for the contexts.
        mining: which queries count.
        config: constants of the losses.
        recall: measure the routers too.
        checkpoint: compute each layer's attention again in the backward pass.

    Returns:
        One value per document and loss, so that the batch is worth the mean of its documents.

    Raises:
        BudgetError: the budget does not fit a context.
    """
    document = read_document(backbone, input_ids, mask, window)
    student = run_student(document, adapter, budget, window, checkpoint)
    with torch.no_grad():
        mined = mine_queries(document, window, mining)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for layer, trace in zip(backbone.geometry.compressible, student.traces, strict=True):
        for name, value in _layer_terms(document, layer, trace, mined, window, config, recall).items():
            parts[name].append(value)
    terms = {name: torch.stack(values).mean(dim=0) for name, values in parts.items()}
    terms["logits"] = _logit_loss(document, student, mined)
    terms["rows"] = torch.full_like(terms["logits"], student.cache.mean_rows)
    names = ("logits", "attention", "zoom", "recon", "budget")
    return Outcome(
        losses={name: terms[name] for name in names},
        figures={name: value.detach() for name, value in terms.items() if name not in names},
        maps=zoom_rates(student.traces) if recall else {},
    )


def mine_queries(document: Prefill, window: int, mining: MiningConfig) -> Tensor:
    """Window positions [B, M] of the queries with the most attention far behind them, ascending."""
    layers = document.backbone.geometry.compressible[:: mining.layer_stride]
    return teacher.mine(
        [window_queries(document, layer) for layer in layers],
        [document.key_value(layer)[0] for layer in layers],
        document.mask,
        document.backbone.attention_scaling(layers[0]),
        count=min(mining.queries, window),
        distance=mining.distance,
        sinks=_SINKS,
    )


def window_queries(document: Prefill, layer: int) -> Tensor:
    """The teacher's rotated queries of the window [B, H, Q, d]."""
    queries = document.queries[layer]
    assert queries is not None  # every layer is compressible and records its window
    return queries


def _layer_terms(
    document: Prefill, layer: int, trace: LayerTrace, mined: Tensor, window: int, config: LossConfig, recall: bool
) -> dict[str, Tensor]:
    """Losses and figures of one layer, each [B]."""
    n_exact, mask = trace.segmentation.exact_index.shape[1], trace.span_mask
    with torch.no_grad():
        mass = teacher_mass(document, layer, trace.segmentation, mined, window)  # [B, H, M, E + S + 1]
        span_mass = mass[..., n_exact:-1]
        measured = router_recall(trace, span_mass, mined) if recall else {}
    student = torch.cat([trace.exact_mass, trace.span_mass, trace.window_mass[..., None]], dim=-1)
    share = None if trace.log_share is None else take_queries(trace.log_share, mined)
    bases = ((trace.sigma_key, trace.gate_key), (trace.sigma_value, trace.gate_value))

    def mean_of(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        return torch.stack([function(sigma, gate, mask) for sigma, gate in bases]).mean(dim=0)

    rows = losses.expected_rows(trace.expand_soft, trace.span_length, mask)
    expanded = losses.masked_mean(trace.expand.detach(), mask[:, None, None])
    return {
        "attention": losses.distill_attention(mass, take_queries(student, mined)),
        "zoom": zoom_loss(share, take_queries(trace.alpha_logit, mined), span_mass, mask, config),
        "recon": mean_of(losses.recon),
        "budget": rows + config.rank * mean_of(losses.expected_rank),
        "expansion": expanded,
        "rank": mean_of(losses.effective_rank),
        **{f"recall_{name}": value for name, value in measured.items()},
    }


def zoom_loss(
    log_share: Tensor | None,
    alpha_logit: Tensor,
    span_mass: Tensor,
    span_mask: Tensor,
    config: LossConfig,
) -> Tensor:
    """The zoom loss of the configured labels [B].

    Args:
        log_share: the router's expected shares at the mined queries [B, H, M, S], or None with an index of summaries.
        alpha_logit: logit of alpha_S [B, H, M, S].
        span_mass: teacher's mass per span [B, H, M, S].
        span_mask: True for real spans [B, S].
        config: which labels.
    """
    if config.labels == "share" and log_share is not None:
        return losses.zoom_shares(log_share, span_mass, span_mask)
    targets = losses.zoom_targets(span_mass, config)
    return losses.zoom(alpha_logit, targets, span_mask, config.positive)


def teacher_mass(document: Prefill, layer: int, cut: Segmentation, mined: Tensor, window: int) -> Tensor:
    """The teacher's attention at the mined queries on exact rows, spans and the window [B, H, M, E + S + 1]."""
    n_context = document.n_tokens - window
    attention = teacher.attention_rows(
        take_queries(window_queries(document, layer), mined),
        document.key_value(layer)[0],
        n_context + mined,
        document.mask,
        document.backbone.attention_scaling(layer),
    )
    row = teacher.row_of_token(
        cut.exact_index, cut.exact_mask, cut.span_start, cut.span_length, cut.span_length > 0, n_context
    )
    return teacher.row_mass(attention, row, cut.exact_index.shape[1] + cut.span_length.shape[1])


def _logit_loss(document: Prefill, student: Student, mined: Tensor) -> Tensor:
    assert document.hidden is not None
    index = mined[..., None].expand(-1, -1, student.hidden.shape[-1])
    with torch.no_grad():
        target = document.backbone.logits(document.hidden.gather(1, index))
    return losses.distill_logits(target, document.backbone.logits(student.hidden.gather(1, index)))
