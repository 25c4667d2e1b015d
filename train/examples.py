"""What routers can learn from one document without backpropagation through the backbone: a teacher's pass, kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.attention import RowSet, log_sum
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.memory import SpanTokens, span_rows, summarise, token_rows
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import Prefill
from sekv.routing import routing_logits, summary_norm
from sekv.span_index import TokenIndex
from sekv.stores.spans import SpanPlan
from train.objective import MiningConfig, mine_queries, read_document, teacher_mass, window_queries
from train.recall import take_queries


@dataclass(frozen=True)
class RouterExample:
    """What the routers of all layers can learn from one document.

    Dimensions: L layers, H query heads, K KV heads, M mined queries, S spans, T span tokens, d head dimension. Layers
    lie side by side on the head axis, because a document's spans are the same in all of them.

    Attributes:
        query: the teacher's rotated queries [1, L * H, M, d].
        key: what the index is made of [1, L * K, T or S, d]: the span tokens' keys in float16, or the summary keys.
        span: span of each token [1, T].
        length: tokens per span [1, S].
        cost: rows that zooming into each span adds [1, S].
        span_mass: the teacher's attention on each span [1, L * H, M, S].
        rest: log-sum of the exponentials of everything outside the spans [1, L * H, M].
        zoom_rows: rows left for zooming [1].
        scaling: factor on q.k.
    """

    query: Tensor
    key: Tensor
    span: Tensor
    length: Tensor
    cost: Tensor
    span_mass: Tensor
    rest: Tensor
    zoom_rows: Tensor
    scaling: float

    def at(self, queries: Tensor) -> RouterExample:
        """The same with some of the queries only, by index."""
        names = ("query", "span_mass", "rest")
        return replace(self, **{name: getattr(self, name).index_select(2, queries) for name in names})

    def logits(self, adapter: SeKVAdapter) -> tuple[Tensor | None, Tensor]:
        """Log shares, with an index of tokens, and logits of alpha for all layers' heads, both [1, L * H, M, S]."""
        router = adapter.joint_router()
        if router.key_projection is None:
            norm = summary_norm(router, self.key)
            return None, routing_logits(router, self.query, self.key, norm, self.length)
        index = TokenIndex.of(router, self.key)
        share = index.log_shares(router, self.query, self.span, self.length, self.rest, self.scaling)
        return share, share + router.bias[:, None, None]


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
    return make_example(document, adapter, window=window, budget=budget, mining=mining)


@torch.no_grad()
def make_example(
    document: Prefill, adapter: SeKVAdapter, *, window: int, budget: Budget, mining: MiningConfig
) -> RouterExample:
    """What a document that has been read teaches; arguments as in `read_example`."""
    context = document.narrow(document.n_tokens - window)
    policy = SeKVPolicy(adapter=adapter)
    plan = policy.prepare(context, budget)
    mined = mine_queries(document, window, mining)
    weights = policy.token_weights(context)
    n_exact = plan.segmentation.exact_index.shape[1]
    queries, keys, masses, rests = [], [], [], []
    for layer in adapter.layers:
        query = take_queries(window_queries(document, layer), mined)
        queries.append(query.float())
        rows = span_rows(context.key_value(layer)[0], plan.tokens)
        keys.append(_index_keys(rows, plan.tokens, weights, adapter.config.index))
        masses.append(teacher_mass(document, layer, plan.segmentation, mined, window)[..., n_exact:-1])
        rests.append(_rest(document, layer, query, plan, mined, window))
    return RouterExample(
        query=torch.cat(queries, dim=1),
        key=torch.cat(keys, dim=1),
        span=plan.tokens.span,
        length=plan.segmentation.span_length,
        cost=plan.segmentation.zoom_cost,
        span_mass=torch.cat(masses, dim=1),
        rest=torch.cat(rests, dim=1),
        zoom_rows=plan.zoom_rows,
        scaling=document.backbone.attention_scaling(adapter.layers[0]),
    )


def _index_keys(rows: Tensor, tokens: SpanTokens, weights: Tensor, index: str) -> Tensor:
    if index == "summary":
        return summarise(rows, tokens, weights).float()
    # Half the memory of many documents; the routers' own entries have 8 bits later on.
    limit = torch.finfo(torch.float16).max
    return token_rows(rows, tokens).clamp(-limit, limit).half()


def _rest(document: Prefill, layer: int, query: Tensor, plan: SpanPlan, mined: Tensor, window: int) -> Tensor:
    """Log-sum over exact context rows and the window as far as each query sees it [1, H, M]."""
    key = document.key_value(layer)[0]
    n_context, n_exact = document.n_tokens - window, plan.segmentation.exact_index.shape[1]
    seen = torch.cat([plan.segmentation.exact_rows(key), key[:, :, n_context:]], dim=2)
    visible = torch.ones(1, mined.shape[1], seen.shape[2], dtype=torch.bool, device=key.device)
    visible[:, :, n_exact:] = torch.arange(window, device=key.device) <= mined[..., None]
    return log_sum(
        query, [RowSet(seen, seen, visible=visible[:, None, None])], document.backbone.attention_scaling(layer)
    )
