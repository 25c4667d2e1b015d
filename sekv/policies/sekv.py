"""SeKV: spans at two resolutions, zoomed into by a learned router (method section 1; arXiv 2606.31145)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.errors import BudgetError, PolicyError
from sekv.memory import SpanTokens, build_memory, shortest_factored, span_turn
from sekv.policies.base import Policy, check_minimum, compress
from sekv.prefill import Prefill
from sekv.routing import ROUTINGS
from sekv.segmentation import Segmentation, segment
from sekv.stores.base import Store
from sekv.stores.plan import SpanPlan, share_among_layers
from sekv.stores.spans import DifferentiableSpanStore, MemoryBuilder, OffloadedSpanStore, Routing


@dataclass(kw_only=True)
class SeKVPolicy(Policy):
    """Spans with a summary and a low-rank basis each; every query decides which spans to zoom into.

    Options left at None take the adapter's value, or the default of `SeKVConfig` without an adapter.

    Attributes:
        adapter: trained projections, thresholds and rank gate; needed by `learned` routing.
        routing: `learned`, `mean` (untrained inner product) or `oracle` (the teacher's own mass; evaluation only).
        fill: zoom into spans below their threshold too while rows are left; always so for `mean` and `oracle`.
        keep_raw: keep raw rows of a span where factors are not smaller; False forces factors.
        exact_spans: keep all spans raw, in the backbone's dtype, so that zooming gives their exact rows (to see what
            bases and 8 bits cost).
        alpha: anchors are tokens whose surprisal exceeds mean + alpha * standard deviation.
        min_span: shorter spans stay exact, in tokens.
        max_span: longer spans are split, in tokens.
        persistent_share: share of the budget for exact rows and summaries.
        summary_share: share of the budget for summary rows, which neighbouring spans share; 1 gives each its own.
        summary_bias: added to the logits of summary rows where no adapter has learned it.
        segmentation: `surprisal` or `fixed`.
        anchors: keep anchors exact.
        summary_weights: `surprisal` or `uniform`.
        max_rank: most components used of a basis.
        index_bits: 4 or 8 bits for each number of the index of tokens.
        basis_bits: 8 stores what is on the host as whole numbers, 0 in the backbone's dtype.
        rope: factor keys `pre` or `post` rotation.
        share_group: heads of a KV group share the union of their spans; `mean` and `oracle` always route by group.
        zoom: False never zooms.
        choose_every: tokens of an answer that keep to one choice of spans; 1 decides anew at every step, as the paper.
    """

    name: ClassVar[str] = "sekv"

    adapter: SeKVAdapter | None = field(default=None, repr=False)
    routing: str = "learned"
    fill: bool = False
    keep_raw: bool = True
    exact_spans: bool = False
    choose_every: int = 1
    alpha: float | None = None
    min_span: int | None = None
    max_span: int | None = None
    persistent_share: float | None = None
    summary_share: float | None = None
    summary_bias: float | None = None
    segmentation: str | None = None
    anchors: bool | None = None
    summary_weights: str | None = None
    max_rank: int | None = None
    index_bits: int | None = None
    basis_bits: int | None = None
    rope: str | None = None
    share_group: bool | None = None
    zoom: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routing not in ROUTINGS:
            raise PolicyError(f"routing '{self.routing}' is unknown; use one of {', '.join(ROUTINGS)}")
        if self.choose_every < 1:
            raise PolicyError(f"choose_every must be at least 1, got {self.choose_every}")
        if self.routing == "learned" and self.adapter is None:
            raise PolicyError("sekv routes with a trained adapter: give --adapter DIR, or use sekv[routing=mean]")
        base = self.adapter.config if self.adapter is not None else SeKVConfig()
        names = {f.name for f in fields(SeKVConfig)} & {f.name for f in fields(self)}
        given = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        self._config = replace(base, **given)
        if self.adapter is not None and self._config.max_rank > self.adapter.config.max_rank:
            raise PolicyError(f"max_rank {self._config.max_rank} exceeds the adapter's {self.adapter.config.max_rank}")
        if self.max_rows is not None and not self._config.share_group:
            raise PolicyError(
                "sekv: max_rows folds later tokens into spans that share summary rows, which needs share_group=true"
            )
        self._segmentation = self._config.cutting(sinks=self.sinks, tail=self.tail)

    @property
    def needs_surprisal(self) -> bool:
        """Not for equal chunks whose tokens weigh alike: then a prefill saves the LM head over every token."""
        return "surprisal" in (self._config.segmentation, self._config.summary_weights)

    def prepare(self, prefill: Prefill, budget: Budget) -> SpanPlan:
        """Cuts the contexts and sees what is left for zooming."""
        if self._config.rope == "pre" and not prefill.backbone.rotates_halves:
            raise PolicyError(
                f"'{prefill.backbone.name}' does not rotate keys in the half-split layout, so RoPE cannot be undone on "
                "them; use sekv[rope=post]"
            )
        rows, lengths = self.rows(prefill, budget), prefill.lengths
        minimum = torch.tensor([self._segmentation.minimum_rows(n) for n in lengths.tolist()], device=lengths.device)
        check_minimum(rows, minimum, lengths, "sekv (sinks, tail, summaries and one zoomed span)")
        breaks = prefill.backbone.line_breaks
        segmentation = segment(
            torch.zeros_like(prefill.mask, dtype=torch.float32) if prefill.surprisal is None else prefill.surprisal,
            prefill.mask,
            rows,
            self._segmentation,
            None if breaks is None else breaks[prefill.input_ids],
        )
        tokens = SpanTokens.of(segmentation)
        longest, last = tokens.padded_index.shape[2], lengths.max() - 1
        zoom_rows = (rows - segmentation.persistent_rows).clamp_min(0)
        return SpanPlan(
            segmentation=segmentation,
            tokens=tokens,
            zoom_rows=zoom_rows,
            layer_rows=self._layer_rows(zoom_rows, segmentation),
            lengths=lengths,
            n_tokens=prefill.n_tokens,
            turn=span_turn(prefill.backbone.rope, last, longest) if self._config.rope == "pre" else None,
        )

    def _layer_rows(self, zoom_rows: Tensor, segmentation: Segmentation) -> Tensor | None:
        """[L, B]; None where all layers have as many: without an adapter, and under a bound on every layer's rows."""
        if self.adapter is None or self.max_rows is not None:
            return None
        return share_among_layers(self.adapter.row_factor, zoom_rows, segmentation.zoom_cost.clamp_min(0).sum(dim=1))

    def compress(self, prefill: Prefill, layer: int, plan: SpanPlan) -> Store:
        """Summaries and exact rows on the compute tier, bases on the host."""
        with torch.no_grad():
            options = self._offloading(plan, prefill) | {"index_bits": self._config.index_bits}
            return self._store(OffloadedSpanStore, prefill, layer, plan, **options)

    @torch.no_grad()
    def restore(self, prefill: Prefill, layer: int, plan: SpanPlan, state: dict[str, Tensor]) -> Store:
        """As `compress` made it."""
        return OffloadedSpanStore.restored(state, plan, self._routing(layer, plan), **self._offloading(plan, prefill))

    def _offloading(self, plan: SpanPlan, prefill: Prefill) -> dict[str, Any]:
        bits = None if self.exact_spans else self._config.basis_bits or None
        return {"build": self._builder(plan, prefill), "bits": bits, "choose_every": self.choose_every}

    def _builder(self, plan: SpanPlan, prefill: Prefill) -> MemoryBuilder:
        dim = prefill.backbone.geometry.head_dim
        shortest = shortest_factored(self._config.max_rank, dim) if self.keep_raw else 1
        return partial(
            build_memory,
            max_rank=self._config.max_rank,
            gate=None if self.adapter is None else self.adapter.gate,
            turn=plan.turn,
            shortest=sys.maxsize if self.exact_spans else shortest,
        )

    def _store(self, kind: type, prefill: Prefill, layer: int, plan: SpanPlan, **options: Any) -> Store:
        key, value = prefill.key_value(layer)
        memory = self._builder(plan, prefill)(key, value, plan.tokens, self.token_weights(prefill))
        return kind(key, value, memory, plan, self._routing(layer, plan), **options)

    def _routing(self, layer: int, plan: SpanPlan) -> Routing:
        router = None if self.adapter is None else self.adapter.router(layer)
        rows = None
        if self.adapter is not None and plan.layer_rows is not None:
            rows = plan.layer_rows[self.adapter.layers.index(layer)]
        return Routing(
            mode=self.routing,
            router=router if self.routing == "learned" else None,
            zoom_rows=rows,
            summary_bias=self._config.summary_bias
            if router is None or self.summary_bias is not None
            else router.summary_bias,
            fill=self.fill,
            zoom=self._config.zoom,
            share_group=self._config.share_group,
        )

    def token_weights(self, prefill: Prefill) -> Tensor:
        """Weight of each token in its span's summary [B, N]: surprisal, or 1 under `summary_weights=uniform`."""
        if self._config.summary_weights == "uniform":
            return torch.ones_like(prefill.mask, dtype=torch.float32)
        assert prefill.surprisal is not None
        return prefill.surprisal


@dataclass(kw_only=True)
class DifferentiableSeKVPolicy(SeKVPolicy):
    """SeKV with stores that pass gradients to the adapter; used by training only."""

    checkpoint: bool = False

    def compress(self, prefill: Prefill, layer: int, plan: SpanPlan) -> Store:
        """Every resolution on the compute tier, decisions straight-through."""
        return self._store(DifferentiableSpanStore, prefill, layer, plan, checkpoint=self.checkpoint)


def training_cache(
    context: Prefill, adapter: SeKVAdapter, budget: Budget | str | float | int, checkpoint: bool = False
) -> CompressedCache:
    """A cache over a context whose answers are differentiable in the adapter (method section 1.6).

    Args:
        context: the context prefix, with surprisal.
        adapter: being trained.
        budget: rows for the context.
        checkpoint: compute each layer's attention again in the backward pass instead of keeping it.

    Returns:
        The cache; after a forward pass over the query window each store's `trace` holds what the losses need.

    Raises:
        BudgetError: the budget keeps a whole context, which leaves nothing to train on, or is too small.
    """
    budget = Budget.parse(budget)
    policy = DifferentiableSeKVPolicy(adapter=adapter, checkpoint=checkpoint)
    if bool((policy.rows(context, budget) >= context.lengths).all()):
        raise BudgetError(
            f"a budget of {budget} keeps these contexts whole: there is nothing to zoom into and nothing to learn"
        )
    return compress(context, policy, budget)
