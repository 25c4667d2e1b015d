"""One pass over a context: keys and values per layer, chunked surprisal, the last queries (method section 1.1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from sekv.backbone import Backbone
from sekv.errors import DataError
from sekv.observation import Observer, ObservingLayer

LOGIT_BYTES = 192 * 2**20  # float32 logits that may exist at once while surprisal is computed


@dataclass(frozen=True)
class Prefill:
    """What one pass over a context leaves behind, padding on the left whatever side it came on.

    Dimensions: B batch, N padded context length, K KV heads, H query heads, W window, d head dimension, D hidden size.

    Attributes:
        backbone: the model that made it.
        keys: per layer [B, K, N, d], rotated, on the host when offloaded; None for layers that cannot be compressed.
        values: per layer, shaped as `keys`.
        queries: per layer the last W rotated queries [B, H, W, d], or None when none were asked for.
        hidden: final hidden states of the last W tokens [B, W, D], or None when none were asked for.
        surprisal: nats [B, N] float32, 0 for each first token and for padding; None when not asked for.
        input_ids: [B, N], padding on the left.
        mask: True for real tokens [B, N].
        native: the backbone's own cache layers, by index, for layers that cannot be compressed.
        observed: results per layer by observer, None for layers that cannot be compressed. Policies that read the
            context once more keep what they found here too, so that every budget shares it.
    """

    backbone: Backbone
    keys: list[Tensor | None]
    values: list[Tensor | None]
    queries: list[Tensor | None]
    hidden: Tensor | None
    surprisal: Tensor | None
    input_ids: Tensor
    mask: Tensor
    native: dict[int, CacheLayerMixin]
    observed: dict[Hashable, list[Any]] = field(default_factory=dict)

    @classmethod
    def blank(cls, backbone: Backbone, input_ids: Tensor, surprisal: Tensor | None = None) -> Prefill:
        """Contexts [B, N] without padding and without keys: what `Policy.prepare` looks at, and nothing else."""
        none: list[Tensor | None] = [None] * backbone.geometry.num_layers
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        return cls(backbone, none, none, none, None, surprisal, input_ids, mask, {})

    @property
    def n_tokens(self) -> int:
        """Padded context length N."""
        return self.mask.shape[1]

    @property
    def lengths(self) -> Tensor:
        """True tokens of each context [B]."""
        return self.mask.sum(dim=1)

    @property
    def positions(self) -> Tensor:
        """True position of each token [B, N]; padding has 0."""
        return positions_of(self.mask)

    def key_value(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, N, d] of a compressible layer, on the compute tier."""
        key, value = self.keys[layer], self.values[layer]
        if key is None or value is None:
            raise ValueError(f"layer {layer} of {self.backbone.name} cannot be compressed and keeps its own cache")
        device = self.mask.device
        return key.to(device, non_blocking=True), value.to(device, non_blocking=True)

    def narrow(self, n: int) -> Prefill:
        """The first `n` of the N (padded) tokens as a prefill of their own: views, nothing that queries left behind."""
        return replace(
            self,
            keys=[None if k is None else k[:, :, :n] for k in self.keys],
            values=[None if v is None else v[:, :, :n] for v in self.values],
            queries=[None] * len(self.queries),
            hidden=None,
            surprisal=None if self.surprisal is None else self.surprisal[:, :n],
            input_ids=self.input_ids[:, :n],
            mask=self.mask[:, :n],
            observed={},
        )


def positions_of(mask: Tensor) -> Tensor:
    """True positions [B, N] of the tokens under a padding mask [B, N]; padding has 0."""
    return (mask.long().cumsum(dim=1) - 1).clamp_min(0)


def left_padded(input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Moves each row's padding to the left, keeping token order. Both [B, N] in and out."""
    order = mask.long().argsort(dim=1, stable=True)
    return input_ids.gather(1, order), mask.gather(1, order)


@torch.no_grad()
def prefill(
    backbone: Backbone,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    surprisal: bool = True,
    window: int = 0,
    chunk_size: int | None = None,
    offload: bool = False,
    observers: Sequence[Observer] = (),
) -> Prefill:
    """Runs the backbone once over a batch of contexts.

    Args:
        backbone: the frozen model.
        input_ids: [B, N] token ids.
        attention_mask: 1 for real tokens [B, N], padding on either side; None when there is none.
        surprisal: compute -log p of each token, in chunks, so that N x vocabulary logits never exist.
        window: how many last queries and hidden states to keep.
        chunk_size: tokens per forward pass; None runs the whole context at once.
        offload: keep keys and values on the host, layer by layer, as they are made.
        observers: statistics over all queries, as policies ask for them.

    Returns:
        The prefill, padding moved to the left.

    Raises:
        DataError: a context is empty, or longer than the backbone's positions.
    """
    if chunk_size is not None and chunk_size < 1:
        raise DataError(f"chunk_size must be at least 1 token, got {chunk_size}; None reads the context at once")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise DataError(f"the context is empty: input_ids has shape {list(input_ids.shape)}, expected [batch, tokens]")
    input_ids = input_ids.to(backbone.device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(backbone.device)
    mask = mask.bool()
    if not bool(mask.any(dim=1).all()):
        raise DataError(
            f"the context of batch row {int((~mask.any(dim=1)).nonzero()[0])} is empty; give at least one token"
        )
    n = input_ids.shape[1]
    backbone.check_length(int(mask.sum(dim=1).max()))
    right_padded = not bool((mask.long().diff(dim=1) >= 0).all())
    if right_padded:
        input_ids, mask = left_padded(input_ids, mask)

    positions = positions_of(mask)
    layers = backbone.native_cache_layers()
    for index in backbone.geometry.compressible:
        started = {observer: observer.start(backbone, index, mask, positions) for observer in observers}
        layers[index] = ObservingLayer(n, window, offload, started)
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = layers, None
    padded = not bool(mask.all())
    nats = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device) if surprisal else None
    hidden: Tensor | None = None
    for start in range(0, n, chunk_size or n):
        end = min(n, start + (chunk_size or n))
        states = backbone.hidden_states(
            input_ids[:, start:end],
            attention_mask=mask[:, :end].long() if padded else None,
            position_ids=positions[:, start:end],
            cache=cache,
        )
        if nats is not None:
            # The token after position t is known for all but the last one.
            stop = min(end + 1, n)
            nats[:, start + 1 : stop] = token_surprisal(
                backbone, states[:, : stop - start - 1], input_ids[:, start + 1 : stop]
            )
        if window:
            hidden = states if hidden is None else torch.cat([hidden, states], dim=1)
            hidden = hidden[:, -window:].clone()  # a view would keep all states alive
    if nats is not None:
        nats = nats.masked_fill(~mask | (positions == 0), 0.0)

    recorded = [layer if isinstance(layer, ObservingLayer) else None for layer in layers]
    return Prefill(
        backbone=backbone,
        keys=[None if r is None else r.keys for r in recorded],
        values=[None if r is None else r.values for r in recorded],
        queries=[None if r is None else r.queries for r in recorded],
        hidden=hidden,
        surprisal=nats,
        input_ids=input_ids,
        mask=mask,
        native={i: layer for i, layer in enumerate(layers) if recorded[i] is None},
        observed={o: [None if r is None else r.observations[o].result() for r in recorded] for o in observers},
    )


def token_surprisal(backbone: Backbone, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p(target | context) in nats, float32.

    Args:
        backbone: supplies the LM head.
        hidden: final hidden states [B, n, D]; position t predicts `targets[:, t]`.
        targets: [B, n] token ids.

    Returns:
        [B, n]. At most about 192 MiB of logits exist at once.
    """
    chunk = max(1, LOGIT_BYTES // (4 * backbone.geometry.vocab_size * hidden.shape[0]))
    parts = [
        # Token by token in memory: a softmax over a strided vocabulary takes as long as the LM head itself.
        torch.nn.functional.cross_entropy(
            backbone.logits(h).float().flatten(0, 1), t.flatten(), reduction="none"
        ).view_as(t)
        for h, t in zip(hidden.split(chunk, dim=1), targets.split(chunk, dim=1), strict=True)
    ]
    return torch.cat(parts, dim=1) if parts else hidden.new_zeros(targets.shape, dtype=torch.float32)
