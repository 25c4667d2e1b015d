"""KVzip: keep what the model needs to repeat the context word for word."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sekv.attention import attention_rows, query_blocks
from sekv.cache import CompressedCache, StoreLayer
from sekv.errors import PolicyError
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill
from sekv.prompt import template_parts
from sekv.stores.full import FullStore

_FIRST_PROMPT = "\n\nRepeat the previous context exactly."
_LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8  # tokens of the chunk before that tell the model where to go on


@dataclass(kw_only=True)
class KVzipPolicy(ScorerPolicy):
    """KVzip (arXiv 2505.23416): keeps the tokens that get the most attention while the context is reconstructed.

    The context is read once more over its own full cache, chunk by chunk, each chunk after a request to repeat it.
    score_i = max over the pass's queries and the query heads of a KV head of the softmax over the sinks, the chunk's
    own tokens and the pass itself (the paper's chunked scoring): the work is linear in N, and nothing is trained.
    The scores do not depend on a budget, so one pass serves every budget and `hubkv:kvzip`, the variant HubKV's paper
    leads with. By default all heads of all layers compete, as in the paper; `kvzip[layers=uniform]` lets a layer's
    heads compete, `kvzip[layers=uniform,allocation=uniform]` none.

    Choices where the paper is silent: the head of the chat template is not context, is not reconstructed and scores 0;
    a context that fills the backbone's positions is repeated beyond them.

    Attributes:
        chunk_size: tokens reconstructed by each pass.
    """

    name: ClassVar[str] = "kvzip"

    allocation: str = "headwise"
    safeguard: float = 0.0
    layers: str = "pooled"
    chunk_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size < 1:
            raise PolicyError(f"{self.name}: chunk_size must be 1 or more, got {self.chunk_size}")

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Largest attention during reconstruction [B, K, N] in [0, 1]; the first call reads the context once more.

        Raises:
            PolicyError: the backbone has no tokenizer, so it cannot be asked to repeat anything.
        """
        found = ("kvzip", self.chunk_size, self.sinks)
        if found not in prefill.observed:
            if prefill.backbone.tokenizer is None:
                raise PolicyError(f"{self.name} asks '{prefill.backbone.name}' to repeat, and it has no tokenizer")
            prefill.observed[found] = reconstruct(prefill, self.chunk_size, self.sinks)
        return prefill.observed[found][layer]


@torch.no_grad()
def reconstruct(prefill: Prefill, chunk_size: int, sinks: int) -> list[Any]:
    """Largest attention that each token gets while the model reads its context again (class docstring).

    Args:
        prefill: of a backbone with a tokenizer.
        chunk_size: tokens of the context per pass.
        sinks: first tokens that compete in every pass.

    Returns:
        Per layer [B, K, N] float32, None for layers that cannot be compressed.
    """
    backbone, lengths = prefill.backbone, prefill.lengths
    passes = _Passes(prefill, chunk_size)
    scores: list[Any] = [None] * backbone.geometry.num_layers
    for index in backbone.geometry.compressible:
        scores[index] = torch.zeros(
            *prefill.mask.shape[:1], backbone.geometry.num_kv_heads, prefill.n_tokens, device=prefill.mask.device
        )
    for number in range(passes.count):
        ids, chunk, in_chunk, reads = passes.inputs(number)
        layers: list[Any] = []
        for index in range(len(scores)):
            if scores[index] is None:
                layers.append(copy.deepcopy(prefill.native[index]))
                continue
            key, value = prefill.key_value(index)
            store = _RepeatedStore(key, value, prefill.mask, scores[index], sinks, (chunk, in_chunk, reads))
            layers.append(StoreLayer(store, prefill.n_tokens))
        positions = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        # Shorter rows are padded on the right: causality keeps what is real from seeing it.
        backbone.hidden_states(ids, position_ids=positions, cache=CompressedCache(layers, prefill.n_tokens))
    return scores


class _Passes:
    """The chunks of each context and what is read to repeat them."""

    def __init__(self, prefill: Prefill, chunk_size: int) -> None:
        tokenizer: PreTrainedTokenizerBase = prefill.backbone.tokenizer  # type: ignore[assignment]
        self.ids, self.lengths, self.size = prefill.input_ids, prefill.lengths, chunk_size
        self.padding = prefill.n_tokens - self.lengths  # [B]
        head, tail = template_parts(tokenizer)
        self.tail = self._tensor(tail)
        self.prompts = [
            self._tensor(tokenizer(text, add_special_tokens=False).input_ids) for text in (_FIRST_PROMPT, _LATER_PROMPT)
        ]
        self.skip = self._head_length(self._tensor(head))  # [B]
        self.count = -(-int((self.lengths - self.skip).max()) // chunk_size)

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.ids.device)

    def _head_length(self, head: Tensor) -> Tensor:
        """Tokens of the chat template at the beginning of each context [B]; 0 where a context has none."""
        first = self._at(torch.arange(len(head), device=head.device))
        matches = (first == head).all(dim=1) & (self.lengths > len(head))
        return torch.where(matches, len(head), 0)

    def _at(self, position: Tensor) -> Tensor:
        """Token ids at positions [n] or [B, n]."""
        return self.ids.gather(1, self._index(position))

    def _index(self, position: Tensor) -> Tensor:
        index = self.padding[:, None] + position.expand(len(self.ids), -1)
        return index.clamp(0, self.ids.shape[1] - 1)

    def inputs(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What pass `number` reads.

        Returns:
            Token ids [B, Q]; padded index of the chunk's tokens [B, c] and which of them are real [B, c]; and which of
            the Q tokens are real.
        """
        batch = len(self.ids)
        start = self.skip + number * self.size
        length = (self.lengths - start).clamp(0, self.size)
        width = int(length.max())
        offset = torch.arange(width, device=self.ids.device)
        chunk, in_chunk = self._index(start[:, None] + offset), offset < length[:, None]
        parts = [self.prompts[min(number, 1)].expand(batch, -1)]
        if number:
            before = torch.arange(-min(_OVERLAP, self.size), 0, device=self.ids.device)
            parts.append(self._at(start[:, None] + before))
        parts.append(self.tail.expand(batch, -1))
        asked = sum(part.shape[1] for part in parts)
        parts.append(self.ids.gather(1, chunk))
        real = torch.cat([(length > 0)[:, None].expand(-1, asked), in_chunk], dim=1)
        return torch.cat(parts, dim=1), chunk, in_chunk, real


class _RepeatedStore(FullStore):
    """The full cache of a layer, which notes how strongly a pass attends to its chunk.

    Args:
        key: [B, K, N, d].
        value: [B, K, N, d].
        mask: [B, N].
        score: [B, K, N], written at the chunk's tokens.
        sinks: first tokens that compete.
        reading: the chunk, its real tokens and the real queries, from `_Passes.inputs`.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        score: Tensor,
        sinks: int,
        reading: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        super().__init__(key, value, mask)
        self.score, self.sinks, self.reading = score, sinks, reading

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """The full cache's answer; the tail is forgotten afterwards, so one layer at a time holds a copy."""
        output = super().attend(query, scaling, tail_mask)
        self._note(query, scaling)
        self.exact = self.exact.fork()
        return output

    def _note(self, query: Tensor, scaling: float) -> None:
        chunk, in_chunk, reads = self.reading
        key, n_context = self.exact.key, self.exact.n_context
        n_queries, device = query.shape[2], query.device
        padding = n_context - self.lengths  # [B]
        sink = torch.arange(min(self.sinks, n_context), device=device) + padding[:, None]
        is_sink = (sink < chunk[:, :1]) & (sink < n_context)  # a sink of the chunk itself counts once
        index = torch.cat([sink.clamp_max(n_context - 1), chunk], dim=1)
        picked = key.gather(2, index[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3]))
        rows = torch.cat([picked, key[:, :, n_context:]], dim=2)
        known = torch.cat([is_sink, in_chunk], dim=1)[:, None, None, None]  # [B, 1, 1, 1, s + c]
        own = torch.arange(n_queries, device=device)
        best = torch.zeros(*key.shape[:2], chunk.shape[1], device=device)
        for block in query_blocks(n_queries, query.shape[0] * query.shape[1] * rows.shape[2]):
            causal = (own <= own[block, None])[None, None, None]  # [1, 1, 1, q, Q]
            shape = (len(known), 1, 1, causal.shape[3], -1)
            visible = torch.cat([known.expand(shape), causal.expand(shape)], dim=-1)
            weights = attention_rows(query[:, :, block], rows, visible, scaling)[..., sink.shape[1] : index.shape[1]]
            weights = weights * reads[:, None, None, block, None]
            best = torch.maximum(best, weights.amax(dim=(2, 3)))
        best = best * in_chunk[:, None]
        # A row that ended before this pass points its chunk at tokens that are scored already: never lower them.
        self.score.scatter_reduce_(2, chunk[:, None].expand_as(best), best, "amax")
