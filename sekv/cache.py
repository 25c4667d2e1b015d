"""The transformers `Cache` made of stores, and the attention function that lets each store answer.

transformers calls `cache.update(key, value, layer)` and hands what it returns to the attention function. Our layers
return the key tensor with the layer itself attached to it; the attention function registered as `sekv` finds it there.
So no model code is touched, nothing global is patched, and a key without a layer gets the ordinary sdpa attention.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sekv.stores.base import Store, tensor_bytes

ATTENTION_NAME = "sekv"
_LAYER_ATTRIBUTE = "_sekv_layer"


def register_attention() -> None:
    """Registers the attention function under the name `sekv`; models opt in with `attn_implementation="sekv"`."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: by its store when the cache holds one, by sdpa otherwise.

    Args:
        module: the backbone's attention module.
        query: [B, H, Q, d], rotated.
        key: [B, K, Q, d] of the new tokens when a store answers, of all tokens otherwise.
        value: same shape as `key`.
        attention_mask: bool [B, 1, Q, tail] when a store answers, as sdpa expects otherwise.
        dropout: passed on to sdpa; a frozen backbone has none.
        scaling: factor on q.k; d ** -0.5 when None.
        kwargs: passed on to sdpa.

    Returns:
        The output [B, Q, H, d] and no attention weights.
    """
    layer = getattr(key, _LAYER_ATTRIBUTE, None)
    if isinstance(layer, StoreLayer):
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        output = layer.store.attend(query, scale, attention_mask)
        layer.store.settle(attention_mask)
        return output.transpose(1, 2).contiguous(), None
    if isinstance(layer, RecordingLayer):
        layer.observe(query)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _attach(key: Tensor, layer: CacheLayerMixin) -> Tensor:
    # A fresh view, so that the attribute never lands on a tensor that somebody else holds.
    tagged = key.view_as(key)
    setattr(tagged, _LAYER_ATTRIBUTE, layer)
    return tagged


class RecordingLayer(CacheLayerMixin):
    """A layer during prefill: keeps all keys and values, and the last `window` rotated queries.

    Args:
        capacity: tokens the prefill will write; the buffers are allocated once.
        window: last query tokens to keep [B, H, window, d]; 0 keeps none.
        offload: keep the buffers on the host and bring them back chunk by chunk.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, capacity: int, window: int = 0, offload: bool = False) -> None:
        super().__init__()
        self.capacity, self.window, self.offload_to_host = capacity, window, offload
        self.used = 0
        self.queries: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers in the dtype of the first keys."""
        device = torch.device("cpu") if self.offload_to_host else key_states.device
        pin = self.offload_to_host and key_states.is_cuda
        for name, like in (("keys", key_states), ("values", value_states)):
            shape = (*like.shape[:2], self.capacity, like.shape[3])
            setattr(self, name, torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pin))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores a chunk [B, K, n, d] and returns all rows so far, on the chunk's device."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        first, self.used = self.used == 0, end
        if first:  # nothing to bring back
            return _attach(key_states, self), value_states
        keys = self.keys[:, :, :end].to(key_states.device, non_blocking=True)
        return _attach(keys, self), self.values[:, :, :end].to(key_states.device, non_blocking=True)

    def observe(self, query: Tensor) -> None:
        """Keeps the last `window` of the queries seen so far."""
        if self.window:
            seen = query if self.queries is None else torch.cat([self.queries, query], dim=2)
            self.queries = seen[:, :, -self.window :].clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask must cover."""
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens stored so far."""
        return self.used

    def get_max_length(self) -> int:
        """Tokens the buffers can hold."""
        return self.capacity


class StoreLayer(CacheLayerMixin):
    """A layer after compression: new tokens join the store's exact tail, and the store answers.

    Args:
        store: the layer's memory.
        n_context: padded length of the context, so that positions stay the tokens' true positions.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, store: Store, n_context: int) -> None:
        super().__init__()
        self.store, self.n_context = store, n_context
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store exists."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends new tokens [B, K, n, d] to the tail."""
        if key_states.shape[0] != self.store.lengths.shape[0]:
            raise ValueError(
                f"batch of {key_states.shape[0]} sequences over a compressed memory of batch "
                f"{self.store.lengths.shape[0]}: compress one context for each sequence, beams and several return "
                "sequences included"
            )
        self.store.append(key_states, value_states)
        return _attach(key_states, self), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the tail only; the context's validity is the store's business."""
        return self.store.tail_length + query_length, self.n_context + self.store.forgotten

    def get_seq_length(self) -> int:
        """True length: context and every token after it, however few rows are kept."""
        return self.n_context + self.store.forgotten + self.store.tail_length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tail tokens (transformers counts negatively)."""
        self.store.crop(abs(tokens_to_remove))

    def reset(self) -> None:
        """Drops the tail; the context memory stays."""
        self.store.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: stores hold one context per sequence and do not move between beams."""
        raise NotImplementedError(
            "beam search over a compressed memory is not supported; use greedy decoding or sampling"
        )


class CompressedCache(Cache):
    """A transformers cache over a compressed context: pass it to `model.generate(..., cache=...)` with the full prompt.

    Args:
        layers: one per backbone layer; `StoreLayer` where the context was compressed, its own kind elsewhere.
        n_context: padded length of the context in tokens.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], n_context: int) -> None:
        super().__init__(layers=list(layers))
        self.n_context = n_context
        for store, following in pairwise(self.stores):
            store.precede(following)

    @property
    def stores(self) -> list[Store]:
        """The stores, in layer order; layers that could not be compressed have none."""
        return [layer.store for layer in self.layers if isinstance(layer, StoreLayer)]

    def fork(self) -> CompressedCache:
        """A cache for another question about the same context: memory shared and never written, tail empty.

        The original must not have been decoded into when the backbone has layers of its own kind (sliding window,
        linear attention), because those hold the decoded tokens themselves.
        """
        layers: list[Any] = [
            StoreLayer(layer.store.fork(), layer.n_context) if isinstance(layer, StoreLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return CompressedCache(layers, self.n_context)

    def record_zooms(self) -> dict[int, list[Tensor]]:
        """Begins to keep which spans every query zooms into, for this cache and its later forks; off until called.

        Returns:
            By number of the layer, a list that grows with every step: bool [B, K, Q, S], or [B, H, Q, S] where query
            heads choose for themselves. Layers that never choose are missing.
        """
        recorded = {
            number: layer.store.record_choices()
            for number, layer in enumerate(self.layers)
            if isinstance(layer, StoreLayer)
        }
        return {number: choices for number, choices in recorded.items() if choices is not None}

    @property
    def mean_rows(self) -> float:
        """Context rows attended per query, layer and KV head, averaged over everything decoded so far."""
        meters = [store.meter for store in self.stores]
        return sum(m.mean_rows for m in meters) / len(meters) if meters else 0.0

    @property
    def resident_bytes(self) -> int:
        """Bytes on the compute tier over all stores; what layers share counts once."""
        return tensor_bytes(t for store in self.stores for t in store.resident_tensors())

    @property
    def host_bytes(self) -> int:
        """Bytes on the host tier over all stores."""
        return tensor_bytes(t for store in self.stores for t in store.host_tensors())

    @property
    def moved_bytes(self) -> int:
        """Bytes brought from the host since the cache was made or forked."""
        return int(sum(store.meter.moved_bytes for store in self.stores))
