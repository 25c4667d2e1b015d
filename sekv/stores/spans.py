"""The span store: exact rows and summaries on the compute tier, bases on the host, zoomed into per query."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from sekv import kernels
from sekv.adapter import LayerRouter
from sekv.attention import Merge, RowSet, log_sum, mixed_attention
from sekv.bank_chain import BankChain
from sekv.host import BankSide, FactorBank
from sekv.memory import SpanMemory, SpanTokens, rebuild_rows, token_rows
from sekv.routing import (
    group_max,
    group_sum,
    log_length,
    mean_margin,
    routing_logits,
    select_spans,
    straight_through,
    sum_by_span,
    summary_norm,
)
from sekv.segmentation import Segmentation
from sekv.span_index import TokenIndex
from sekv.stores.base import ExactRows, Store
from sekv.stores.folding import FoldedBlock, fold
from sekv.stores.offloaded import OffloadedStore
from sekv.stores.plan import SpanPlan, visibility_bias
from sekv.stores.reader import SpanReader
from sekv.stores.slots import slots_needed
from sekv.stores.summaries import Summaries

MemoryBuilder = Callable[[Tensor, Tensor, SpanTokens, Tensor], SpanMemory]
"""Keys [B, K, N, d], values, where spans' tokens are, and summary weights [B, N] to summaries and bases."""


@dataclass(frozen=True)
class Routing:
    """How a store chooses spans.

    Attributes:
        mode: `learned`, `mean` or `oracle`.
        router: one layer's parameters, for `learned`.
        fill: zoom below the threshold too while rows are left.
        zoom: False never zooms: summaries only (ablation).
        share_group: all heads of a KV group attend to the union of their spans.
        summary_bias: added to the logits of summary rows, one number or one per query head [H].
        zoom_rows: rows left for zooming in this layer [B]; None: as the plan says.
    """

    mode: str
    router: LayerRouter | None = None
    zoom_rows: Tensor | None = None
    summary_bias: float | Tensor = 0.0
    fill: bool = False
    zoom: bool = True
    share_group: bool = True

    @cached_property
    def detached_router(self) -> LayerRouter | None:
        """The router without gradients."""
        return None if self.router is None else LayerRouter._make(x if x is None else x.detach() for x in self.router)


@dataclass(frozen=True)
class LayerTrace:
    """What a layer decided and attended to in a training step, float32.

    Dimensions: B batch, H query heads, K KV heads, Q window queries, S spans, E exact context rows, r components.

    Attributes:
        log_share: expected share of each head's attention per span, as a logarithm, with an index of tokens; None with
            one of summaries [B, H, Q, S].
        alpha_logit: logit of alpha_S [B, H, Q, S].
        alpha: expansion probability [B, H, Q, S].
        tau: thresholds [H].
        expand: decision, 0 or 1 with a straight-through gradient [B, K, Q, S].
        expand_soft: sigmoid((alpha - tau) / 0.1), strongest head of each group [B, K, Q, S].
        span_mass: attention mass on each span, as summary or zoomed [B, H, Q, S].
        exact_mass: attention mass on each exact context row [B, H, Q, E].
        window_mass: attention mass on the window's own tokens [B, H, Q].
        sigma_key: singular values of the keys [B, K, S, r].
        sigma_value: singular values of the values [B, K, S, r].
        gate_key: rank gates of the keys [B, K, S, r].
        gate_value: rank gates of the values [B, K, S, r].
        segmentation: the partition that the rows come from.
        query: the window's rotated queries [B, H, Q, d], detached.
        summary_key: [B, K, S, d].
        zoom_rows: rows left for zooming [B].
        scaling: factor on q.k of this layer.
    """

    log_share: Tensor | None
    alpha_logit: Tensor
    alpha: Tensor
    tau: Tensor
    expand: Tensor
    expand_soft: Tensor
    span_mass: Tensor
    exact_mass: Tensor
    window_mass: Tensor
    sigma_key: Tensor
    sigma_value: Tensor
    gate_key: Tensor
    gate_value: Tensor
    segmentation: Segmentation
    query: Tensor
    summary_key: Tensor
    zoom_rows: Tensor
    scaling: float

    @property
    def span_length(self) -> Tensor:
        """Tokens per span, 0 where there is none [B, S]."""
        return self.segmentation.span_length

    @property
    def span_mask(self) -> Tensor:
        """True where a span is real [B, S]."""
        return self.span_length > 0


class SpanStore(Store):
    """What inference and training share: exact rows, summaries, and the routing decision.

    Args:
        key: rotated keys of the context [B, K, N, d].
        value: [B, K, N, d].
        memory: summaries and bases of the spans.
        plan: partition and rows left for zooming.
        routing: how spans are chosen.
    """

    def __init__(self, key: Tensor, value: Tensor, memory: SpanMemory, plan: SpanPlan, routing: Routing) -> None:
        segmentation = plan.segmentation
        whole = bool(segmentation.exact_mask.all())
        exact_key, exact_value = (segmentation.exact_rows(x) for x in (key, value))
        exact = ExactRows(exact_key, exact_value, None if whole else segmentation.exact_mask)
        super().__init__(exact, plan.lengths)
        self.plan, self.routing = plan, routing
        router = routing.router
        self.index: TokenIndex | None = None
        self.norm: Tensor | None = None
        if router is not None and router.key_projection is not None:
            self.index = TokenIndex.of(router, token_rows(memory.raw_key, plan.tokens))
        elif router is not None:
            self.norm = summary_norm(router, memory.summary_key)

    @property
    @abstractmethod
    def summary_key(self) -> Tensor:
        """[B, K, S, d]."""

    @property
    @abstractmethod
    def summary_value(self) -> Tensor:
        """[B, K, S, d]."""

    @property
    def _length(self) -> Tensor:
        return self.plan.segmentation.span_length

    @property
    def _zoom_rows(self) -> Tensor:
        """Rows left for zooming [B]."""
        return self.plan.zoom_rows if self.routing.zoom_rows is None else self.routing.zoom_rows

    @abstractmethod
    def _exact_sets(self, n_queries: int, tail_mask: Tensor | None) -> list[RowSet]:
        """Exact context rows and the tail."""

    def _learned(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Log shares, where the index gives them, and logits of alpha, both [B, H, Q, S]."""
        router = self.routing.router
        assert router is not None
        if self.index is None:
            assert self.norm is not None
            return None, routing_logits(router, query, self.summary_key, self.norm, self._length)
        tokens = self.plan.tokens
        rest = self._log_exact(query, scaling, tail_mask)
        mask = None if self.plan.all_tokens_real else tokens.mask
        share = self.index.log_shares(router, query, tokens.span, self._length, rest, scaling, mask)
        return share, share + router.bias[:, None, None]

    def _log_exact(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Log-sum of the exponentials over everything that lies in no span [B, H, Q] float32."""
        return log_sum(query, self._exact_sets(query.shape[2], tail_mask), scaling)

    def _wish(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """The order in which spans are taken, and the margins alpha - tau, both [B, K or H, Q, S].

        The heads of a group that share rows add up their alphas, and the strongest margin counts.
        """
        router = self.routing.router
        assert router is not None
        margin = alpha - router.threshold[:, None, None]
        if not self.routing.share_group:
            return margin, margin
        kv_heads = self.exact.key.shape[1]
        return group_sum(alpha, kv_heads), group_max(margin, kv_heads)

    def _select(self, order: Tensor, margin: Tensor | None = None) -> Tensor:
        """Spans to zoom into [B, K or H, Q, S], within the rows left; where margins are given, only from 0 on."""
        if not self.routing.zoom:
            return torch.zeros_like(order, dtype=torch.bool)
        eligible = None if margin is None else margin >= 0
        cost = self.plan.segmentation.zoom_cost[:, None, None]
        return select_spans(order, cost, self._zoom_rows[:, None, None], eligible)


class OffloadedSpanStore(OffloadedStore, SpanStore):
    """The store of inference: bases on the host tier, only the chosen spans are fetched and rebuilt.

    Args:
        key: rotated keys of the context [B, K, N, d].
        value: [B, K, N, d].
        memory: summaries and bases of the spans.
        plan: partition and rows left for zooming.
        routing: how spans are chosen.
        bits: 8 stores spans on the host as whole numbers; None in the dtype of the keys.
        build: makes the memory of later tokens when they leave the tail, from keys, values, their spans and summary
            weights; None forgets them.
        choose_every: single-token steps that keep to one choice.
        index_bits: 4 or 8, of the index of tokens.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        memory: SpanMemory,
        plan: SpanPlan,
        routing: Routing,
        bits: int | None = None,
        build: MemoryBuilder | None = None,
        choose_every: int = 1,
        index_bits: int = 8,
    ) -> None:
        super().__init__(key, value, memory, plan, routing)
        self.choose_every = choose_every
        self._bits, self._build = bits, build
        self._lay_out(self._bank(memory, self._length), memory.summary_key, memory.summary_value)
        self.index = None if self.index is None else self.index.quantised(index_bits)
        # Evaluation only: the teacher's mass needs every exact key.
        self.span_keys = token_rows(memory.raw_key, plan.tokens) if routing.mode == "oracle" else None

    def _lay_out(self, bank: FactorBank, summary_key: Tensor, summary_value: Tensor) -> None:
        """Sets up everything that reads the bank; until then `exact` holds the exact rows alone."""
        plan, routing, kv_heads = self.plan, self.routing, summary_key.shape[1]
        self._block: FoldedBlock | None = None
        sharers = 1 if routing.share_group or routing.router is None else routing.router.bias.shape[0] // kv_heads
        self._set_costs(plan.segmentation.zoom_cost, self._zoom_rows, sharers * kv_heads)
        spared = 0 if plan.segmentation.merged else 1
        most = sharers * slots_needed(self._length, self._zoom_rows, spared) if routing.zoom else 0
        self.summaries = self._make_summaries(summary_key, summary_value)
        self.reader = SpanReader(
            bank,
            self._length,
            visibility_bias(plan.segmentation.exact_mask),
            kv_heads,
            min(most, int(self._length.sum(-1).max())),
            self.summaries,
        )
        self.exact = self.reader.layout(self.exact.key, self.exact.value)

    @classmethod
    def restored(
        cls,
        state: dict[str, Tensor],
        plan: SpanPlan,
        routing: Routing,
        bits: int | None = None,
        build: MemoryBuilder | None = None,
        choose_every: int = 1,
    ) -> OffloadedSpanStore:
        """The store whose `state` this is; the other arguments are the constructor's."""
        store = cls.__new__(cls)
        Store.__init__(store, ExactRows(state["exact_key"], state["exact_value"]), plan.lengths)
        store.plan, store.routing = plan, routing
        store._bits, store._build, store.choose_every = bits, build, choose_every
        kept = {name.removeprefix("bank."): tensor for name, tensor in state.items() if name.startswith("bank.")}
        summary_key = state["summary_key"]
        restored = FactorBank.restored(kept, store._length, summary_key.dtype, plan.turn)
        store._lay_out(restored, summary_key, state["summary_value"])
        store.index = TokenIndex(state["index"], state["index_step"]) if "index" in state else None
        router = routing.router
        store.norm = None if router is None or store.index is not None else summary_norm(router, summary_key)
        store.span_keys = state.get("span_keys")
        return store

    def state(self) -> dict[str, Tensor]:
        """Exact rows, summaries, the bank and what chooses spans; only before later tokens were taken in."""
        self._check_own_context()
        assert isinstance(self.reader.bank, FactorBank)
        exact = slice(0, self.reader.n_exact)
        found = {"exact_key": self.exact.key[:, :, exact], "exact_value": self.exact.value[:, :, exact]}
        found |= {"summary_key": self.summary_key, "summary_value": self.summary_value}
        found |= {f"bank.{name}": tensor for name, tensor in self.reader.bank.state().items()}
        if self.index is not None and self.index.step is not None:
            found |= {"index": self.index.keys, "index_step": self.index.step}
        return found if self.span_keys is None else found | {"span_keys": self.span_keys}

    def _make_summaries(self, key: Tensor, value: Tensor, n_rows: int | None = None) -> Summaries:
        """Summaries of the plan's spans, on the host where steps do not look at all of them."""
        bias, offload = self.routing.summary_bias, not self._routes_by_summaries
        return Summaries(key, value, self.plan.segmentation, bias, n_rows, offload)

    def _bank(self, memory: SpanMemory, length: Tensor) -> FactorBank:
        return FactorBank(
            BankSide(memory.raw_key, memory.key_basis, memory.key_gate),
            BankSide(memory.raw_value, memory.value_basis, memory.value_gate),
            length,
            self.plan.turn,
            self._bits,
        )

    @torch.no_grad()
    def _release(self, n: int, real: Tensor | None) -> None:
        """Folds the oldest tail tokens into spans behind those there are; what other stores share is not written."""
        if self._build is None:
            return
        block = fold(self.plan, n, real)
        key, value = self._oldest(n)
        memory = self._build(key, value, block.tokens, torch.ones(len(key), n, device=key.device))
        bank = self._bank(memory, block.length)
        chain = self.reader.bank if isinstance(self.reader.bank, BankChain) else BankChain((self.reader.bank,))
        # The block keeps the tables of all layers one and the same.
        self._block, self.plan, self.rewritten = block, block.plan, True
        summary_key, summary_value = (
            torch.cat([known.to(key.device), later], dim=2)
            for known, later in ((self.summary_key, memory.summary_key), (self.summary_value, memory.summary_value))
        )
        segmentation = self.plan.segmentation
        n_rows = self.summaries.n_rows  # the place for them stays as large
        self.summaries = self._make_summaries(summary_key, summary_value, n_rows)
        capacity = self.reader.slots.capacity
        if self.routing.zoom:  # a context kept whole has rows left, but no spans of its own to spend them on
            capacity = max(capacity, slots_needed(self._length, self._zoom_rows, spared=0))
        if capacity > self.reader.slots.capacity:
            self.exact.widen(capacity - self.reader.slots.capacity)
        self.reader = self.reader.extended(chain.extended(bank), self._length, capacity, self.summaries)
        self._set_costs(segmentation.zoom_cost, self._zoom_rows, key.shape[1])
        router = self.routing.router
        if self.index is not None:
            assert router is not None
            later = TokenIndex.of(router, token_rows(memory.raw_key, block.tokens))
            self.index = self.index.extended(later.quantised(self.index.bits))
        if self.norm is not None:
            assert router is not None
            self.norm = torch.cat([self.norm, summary_norm(router, memory.summary_key)], dim=2)
        if self.span_keys is not None:
            self.span_keys = torch.cat([self.span_keys, token_rows(memory.raw_key, block.tokens)], dim=2)

    @property
    def _routes_by_summaries(self) -> bool:
        """Whether every step looks at the summaries of all spans."""
        mode, router = self.routing.mode, self.routing.router
        return mode == "mean" or (router is not None and router.key_projection is None)

    @property
    def summary_key(self) -> Tensor:
        """[B, K, S, d], on the host unless spans are chosen by their summaries."""
        return self.summaries.key

    @property
    def summary_value(self) -> Tensor:
        """[B, K, S, d]."""
        return self.summaries.value

    def _choose(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Spans each query zooms into [B, K, Q, S], or [B, H, Q, S] without group sharing."""
        if self.routing.mode == "mean":
            return self._select(mean_margin(query, self.summary_key, self._length, scaling))
        if self.routing.mode == "oracle":
            return self._select(self._teacher_mass(query, scaling, tail_mask))
        if query.shape[2] == 1 and query.device.type == "cpu" and self.index is not None and self.routing.zoom:
            return self._choose_on_host(query, scaling, tail_mask)
        order, margin = self._wish(torch.sigmoid(self._learned(query, scaling, tail_mask)[1]))
        return self._select(order, None if self.routing.fill else margin)

    @torch.no_grad()
    def _choose_on_host(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """`_choose` of a single token on a CPU, with the index of tokens: the same choice in compiled loops."""
        router, tokens = self.routing.detached_router, self.plan.tokens
        assert router is not None and self.index is not None
        rest = self._log_exact(query, scaling, tail_mask)
        mask = None if self.plan.all_tokens_real else tokens.mask
        share = self.index.step_log_shares(router, query, tokens.span, self._length, rest, scaling, mask)
        sharers = query.shape[1] // self.exact.key.shape[1] if self.routing.share_group else 1
        order, eligible = kernels.wishes(share, router.bias.numpy(), router.threshold.numpy(), sharers)
        return self._take_on_host(order, np.ones_like(eligible) if self.routing.fill else eligible)

    def _select(self, order: Tensor, margin: Tensor | None = None) -> Tensor:
        """As in the base."""
        return self._take(order, margin) if self.routing.zoom else super()._select(order, margin)

    def _exact_sets(self, n_queries: int, tail_mask: Tensor | None) -> list[RowSet]:
        return self.reader.exact_sets(self.exact, n_queries, tail_mask)

    def _log_exact(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """As in the base; for a single token in a few operators."""
        if query.shape[2] > 1:
            return super()._log_exact(query, scaling, tail_mask)
        return self.reader.log_exact(query, scaling, self.exact, tail_mask)

    def _teacher_mass(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Mass that full attention puts on each span, summed over the heads of a group [B, K, Q, S]."""
        assert self.span_keys is not None
        tokens = RowSet(self.span_keys, self.span_keys, visible=self.plan.tokens.mask[:, None, None, None])
        exact = self._exact_sets(query.shape[2], tail_mask)
        mass = mixed_attention(query, [tokens, *exact], scaling)[1][0]
        return sum_by_span(mass.sum(dim=2), self.plan.tokens.span, self._length.shape[1])

    def resident_tensors(self) -> list[Tensor | None]:
        """Exact rows, summaries and slots, what routing needs, and the index tables that all layers share."""
        known = [self.norm, *(self.index.tensors() if self.index is not None else ())]
        known += [] if self._block is None else self._block.tensors()
        rows = [*self.exact.tensors(), *self.reader.tensors(), *self.summaries.tensors()]
        return [*rows, *known, self.span_keys, *self.plan.tensors()]


class DifferentiableSpanStore(SpanStore):
    """The store of training: every span is rebuilt and gated, decisions pass gradients straight through.

    After each `attend`, `trace` holds what the losses need.

    Args:
        key: rotated keys of the context [B, K, N, d].
        value: [B, K, N, d].
        memory: summaries and bases; its gates carry the gradient.
        plan: partition and rows left for zooming.
        routing: must be `learned`.
        checkpoint: rebuild rows and attend again in the backward pass instead of keeping what it needs.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        memory: SpanMemory,
        plan: SpanPlan,
        routing: Routing,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(key, value, memory, plan, routing)
        self.memory, self.checkpoint = memory, checkpoint
        self.trace: LayerTrace | None = None

    @property
    def summary_key(self) -> Tensor:
        """[B, K, S, d]."""
        return self.memory.summary_key

    @property
    def summary_value(self) -> Tensor:
        """[B, K, S, d]."""
        return self.memory.summary_value

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Attends to every row at every resolution, weighted by the decisions."""
        log_share, logit = self._kept(self._learned, query, scaling, tail_mask)
        order, margin = self._wish(torch.sigmoid(logit))
        hard = self._select(order.detach(), None if self.routing.fill else margin.detach())
        expand, soft = straight_through(hard, margin)
        self._count(hard)

        exact_rows = self._exact_rows(query.shape[2], tail_mask)
        gates = (self.memory.key_gate, self.memory.value_gate)
        output, exact, spans = self._kept(self._attend_all, query, expand, *gates, exact_rows, scaling)
        n_context = self.exact.n_context
        assert self.routing.router is not None
        self.trace = LayerTrace(
            log_share=log_share,
            alpha_logit=logit,
            alpha=torch.sigmoid(logit),
            tau=self.routing.router.threshold,
            expand=expand,
            expand_soft=soft,
            span_mass=spans,
            exact_mass=exact[..., :n_context],
            window_mass=exact[..., n_context:].sum(-1),
            sigma_key=self.memory.key_basis[1],
            sigma_value=self.memory.value_basis[1],
            gate_key=self.memory.key_gate,
            gate_value=self.memory.value_gate,
            segmentation=self.plan.segmentation,
            query=query.detach(),
            summary_key=self.summary_key,
            zoom_rows=self._zoom_rows,
            scaling=scaling,
        )
        return output

    def _kept(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """The function's result; with `checkpoint` what its gradient needs is computed again in the backward pass."""
        if self.checkpoint and torch.is_grad_enabled():
            return recompute(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)

    def _exact_rows(self, n_queries: int, tail_mask: Tensor | None) -> RowSet:
        """Exact context rows and the tail as one set."""
        visible = self.exact_mask(n_queries, tail_mask)
        return RowSet(self.exact.key, self.exact.value, visible=None if visible is None else visible[:, :, None])

    def _exact_sets(self, n_queries: int, tail_mask: Tensor | None) -> list[RowSet]:
        return [self._exact_rows(n_queries, tail_mask)]

    def _summary_rows(self, gate: Tensor) -> RowSet:
        """What stands for the spans as far as they are not zoomed into; `gate` is 1 where they are not."""
        segmentation = self.plan.segmentation
        bias = torch.as_tensor(self.routing.summary_bias, device=gate.device)
        bias = bias.reshape(1, self.summary_key.shape[1] if bias.ndim else 1, -1, 1, 1)
        if segmentation.merged:
            weight = self._length[:, None, None, None] * gate
            merge = Merge(segmentation.span_row, int(segmentation.summary_rows.max()), weight)
            return RowSet(self.summary_key, self.summary_value, bias=bias, merge=merge)
        # A row of its own is gated, not left out: so the decision keeps a gradient while the span is zoomed into.
        bias = bias + log_length(self._length)[:, None, None, None]
        visible = (self._length > 0)[:, None, None, None]
        return RowSet(self.summary_key, self.summary_value, bias=bias, visible=visible, gate=gate)

    def _per_group(self, x: Tensor) -> Tensor:
        """[B, K, Q, S] to [B, K, 1, Q, S]; [B, H, Q, S] to [B, K, G, Q, S]."""
        return rearrange(x, "b (k g) q s -> b k g q s", k=self.exact.key.shape[1])

    def _count(self, zoomed: Tensor) -> None:
        """Records rows attended: exact ones, summaries that still stand for a token, zoomed ones [B, K or H, Q, S]."""
        batch, heads, n_queries, _ = zoomed.shape
        kv_heads, segmentation = self.exact.key.shape[1], self.plan.segmentation
        length = self._length[:, None, None]
        left = sum_by_span((length * ~zoomed).float(), segmentation.span_row, int(segmentation.summary_rows.max()))
        rows = ((zoomed * length).sum() + (left > 0).sum()) * (kv_heads / heads)
        exact = segmentation.exact_mask.sum() * kv_heads * n_queries
        self.meter.queries += batch * n_queries * kv_heads
        self.meter.rows += float(exact + rows)

    def _attend_all(
        self, query: Tensor, expand: Tensor, key_gate: Tensor, value_gate: Tensor, exact_rows: RowSet, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rebuilds every span at its gates and attends to all resolutions.

        Args:
            query: [B, H, Q, d].
            expand: decisions [B, K or H, Q, S].
            key_gate: g [B, K, S, r].
            value_gate: g for the values.
            exact_rows: exact context rows and the window.
            scaling: factor on q.k.

        Returns:
            The output [B, H, Q, d], the mass on exact rows and window [B, H, Q, E], and that on spans [B, H, Q, S].
        """
        memory, tokens, turn = self.memory, self.plan.tokens, self.plan.turn
        keys = rebuild_rows(memory.key_basis, key_gate, memory.raw_key, turn)
        values = rebuild_rows(memory.value_basis, value_gate, memory.raw_value)
        key, value = (token_rows(x, tokens) for x in (keys, values))
        gate = self._per_group(expand)
        span = tokens.span[:, None, None, None].expand(*gate.shape[:4], -1)
        row_sets = [
            exact_rows,
            self._summary_rows(gate=1.0 - gate),
            RowSet(key, value, visible=tokens.mask[:, None, None, None], gate=gate.gather(-1, span)),
        ]
        output, masses = mixed_attention(query, row_sets, scaling)
        exact, summary, zoomed = (m.flatten(1, 2) for m in masses)
        # A copy: a view of the masses would keep those of all rows alive.
        return output, exact.clone(), summary + sum_by_span(zoomed, tokens.span, self._length.shape[1])

    def resident_tensors(self) -> list[Tensor | None]:
        """Exact rows, summaries, and the spans' raw rows: training keeps them all on the compute tier."""
        memory = self.memory
        index = [] if self.index is None else self.index.tensors()
        return [*self.exact.tensors(), self.summary_key, self.summary_value, memory.raw_key, memory.raw_value, *index]
