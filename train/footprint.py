"""Bytes that one training step holds on its device, by part, computed from shapes alone.

The formulas follow the code of the step (`train.objective`); a test holds them against the tensors of real steps.

Dimensions: B documents of N tokens (C context, Q window), L layers, H query heads, K KV heads, d head dimension,
D hidden size, E exact rows, S spans of at most m tokens, T span tokens, r components, M mined queries, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.expected_cut import Cut, expected_cut
from sekv.prefill import LOGIT_BYTES

READING, TRAINING = "reading", "training"  # the two moments at which a step may be largest
_F32 = 4
_INDEX = 8


@dataclass(frozen=True)
class StepSize:
    """What a step works on, on one device.

    Attributes:
        batch: documents B.
        tokens: of each document, N.
        window: query tokens Q.
        mined: queries that the losses look at, M.
        budget: the largest one of the run.
        element_bytes: of a number in the backbone's dtype.
        checkpoint_attention: attention is computed again in the backward pass, so that one layer's is there at a time.
        shards: processes that the backbone's layers are dealt to.
    """

    batch: int
    tokens: int
    window: int
    mined: int
    budget: Budget
    element_bytes: int
    checkpoint_attention: bool = False
    shards: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest context, C."""
        return self.tokens - self.window


class Part(NamedTuple):
    """Some of the bytes.

    Attributes:
        name: for people.
        bytes: how many.
        moments: when they are there: while the document is read, while it is trained on, or both.
    """

    name: str
    bytes: int
    moments: tuple[str, ...]


def step_parts(backbone: Backbone, adapter: SeKVAdapter, size: StepSize) -> list[Part]:
    """All parts of a step.

    Args:
        backbone: may be on the meta device.
        adapter: what is trained.
        size: of the step.
    """
    both, reading, training = (READING, TRAINING), (READING,), (TRAINING,)
    layers = len(backbone.geometry.compressible)
    cut = expected_cut(adapter.config, size.budget, size.context)
    layer = _Layer(backbone, adapter.config, size, cut)
    kept = 1 if size.checkpoint_attention else layers
    weights = "backbone weights" if size.shards == 1 else f"backbone weights, of each layer 1/{size.shards}"
    return [
        Part(weights, weight_bytes(backbone, size.element_bytes, size.shards), both),
        Part("adapter with gradient and optimiser", adapter_bytes(adapter), both),
        Part("the document's keys, values and window queries", layers * layer.document(), both),
        Part("activations of one layer over the document", layer.reading(), reading),
        Part("surprisal, a chunk of logits", layer.surprisal(), reading),
        Part("memory: summaries, exact and raw rows, index", layers * layer.rows() + layer.rotation(), training),
        Part("memory: bases and gates", layers * layer.bases(), training),
        Part("student: rows rebuilt from bases", kept * layer.rebuilt(), training),
        Part("student: attention of the window over the rows", kept * layer.attention(), training),
        Part("student: activations of the window", layers * layer.decoder(), training),
        Part("losses of all layers", layers * layer.losses(), training),
        Part("one layer's teacher rows (Q x N) or gradients", layer.transient(), training),
        Part("next-token logits of the mined queries", layer.logits(), training),
    ]


def peak(parts: list[Part]) -> int:
    """Bytes at the larger of the two moments."""
    return max(moment_bytes(parts, moment) for moment in (READING, TRAINING))


def moment_bytes(parts: list[Part], moment: str) -> int:
    """Bytes at one moment."""
    return sum(part.bytes for part in parts if moment in part.moments)


def weight_bytes(backbone: Backbone, element_bytes: int, shards: int = 1) -> int:
    """Parameters, shared ones counted once, in the given dtype, and buffers in theirs.

    Of layers dealt to several processes one process holds its part, and one whole layer while that is computed.
    """
    buffers = sum(b.numel() * b.element_size() for b in backbone.model.buffers())
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in _decoder_layers(backbone)]
    held = backbone.num_parameters
    if shards > 1:
        held += max(sizes) + sum(sizes) // shards - sum(sizes)
    return held * element_bytes + buffers


def _decoder_layers(backbone: Backbone) -> nn.ModuleList:
    return cast(nn.ModuleList, backbone.model.get_decoder().get_submodule("layers"))


def adapter_bytes(adapter: SeKVAdapter) -> int:
    """Float32 parameters, their gradient and the two moments of AdamW."""
    return 4 * _F32 * adapter.num_parameters


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer."""

    backbone: Backbone
    config: SeKVConfig
    size: StepSize
    cut: Cut

    def document(self) -> int:
        """Keys and values of all tokens, and the window's queries."""
        shape, size = self.backbone.geometry, self.size
        key_value = 2 * shape.num_kv_heads * size.tokens
        return size.batch * shape.head_dim * size.element_bytes * (key_value + shape.num_heads * size.window)

    def reading(self) -> int:
        """Hidden states with their norm, and the MLP's gate, up and product, over all tokens."""
        config = self.backbone.model.config.get_text_config(decoder=True)
        hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
        return self.size.batch * self.size.tokens * self.size.element_bytes * (4 * hidden + 3 * inner)

    def surprisal(self) -> int:
        """Logits of as many tokens as may exist at once, in float32, and their log-probabilities."""
        chunk = min(LOGIT_BYTES, self.size.batch * self.size.tokens * self.backbone.geometry.vocab_size * _F32)
        return chunk * (2 if self.size.element_bytes == _F32 else 3)

    def rows(self) -> int:
        """Exact rows, summaries, and the spans' raw rows padded to the longest span; the index of routing."""
        cut, shape = self.cut, self.backbone.geometry
        key_value = 2 * self._per_kv_head(cut.exact + cut.spans + cut.spans * cut.longest) * shape.head_dim
        return key_value * self.size.element_bytes + self.index()

    def index(self) -> int:
        """Float32 keys of the spans' tokens and their projections; or, with an index of summaries, the norms."""
        shape = self.backbone.geometry
        if self.config.index == "tokens":
            return self._per_kv_head(self.cut.span_tokens) * (shape.head_dim + self.config.routing_dim) * _F32
        return self.size.batch * shape.num_heads * self.cut.spans * _F32

    def bases(self) -> int:
        """U, sigma and V^T of keys and values in float32, and their gates with the gate's hidden layer."""
        cut, dim, rank = self.cut, self.backbone.geometry.head_dim, self._rank
        basis = cut.longest * rank + rank + rank * dim
        gate = 4 * rank + 3 * self.config.gate_hidden + 2 * (self.config.max_rank + dim)
        return 2 * self._per_kv_head(cut.spans) * (basis + gate) * _F32

    def rebuilt(self) -> int:
        """Gated left factors in float32, and the rebuilt rows."""
        cut, dim = self.cut, self.backbone.geometry.head_dim
        factors = 2 * self._per_kv_head(cut.spans * cut.longest * self._rank) * _F32
        rows = 2 * self._per_kv_head(cut.span_tokens) * dim * self.size.element_bytes
        return factors + rows

    def rotation(self) -> int:
        """Cos and sin of the spans' tokens, which all layers share."""
        numbers = self.size.batch * self.cut.spans * self.cut.longest * self.backbone.geometry.head_dim
        return 2 * numbers * _F32 if self.config.rope == "pre" else 0

    def attention(self) -> int:
        """What the gradient needs of one softmax over all rows: exponentials, gated exponentials, masses, gates."""
        cut, shape, size = self.cut, self.backbone.geometry, self.size
        rows = cut.exact + size.window + cut.spans + cut.span_tokens
        scores = 3 * rows * shape.num_heads
        gates = cut.span_tokens * (shape.num_kv_heads if self.config.share_group else shape.num_heads)
        routing = 6 * cut.spans * shape.num_heads
        if self.config.index == "tokens":  # exponentials of the estimates, and logits of what is known exactly
            routing += (rows - cut.spans) * shape.num_heads
        if self.config.summary_share < 1.0:  # logits and weights of the summaries before they are merged, and masses
            routing += 3 * cut.spans * shape.num_heads
        total = size.batch * size.window * (scores + gates + routing) * _F32
        if size.element_bytes != _F32:  # keys and values in float32, for the products
            total += 2 * self._per_kv_head(rows) * shape.head_dim * _F32
        return total

    def decoder(self) -> int:
        """Activations of the window's tokens that the gradient needs."""
        config = self.backbone.model.config.get_text_config(decoder=True)
        hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
        heads = self.backbone.geometry.num_heads * self.backbone.geometry.head_dim
        numbers = (4 * hidden + 4 * inner + 6 * heads) * self.size.element_bytes + 4 * hidden * _F32
        return self.size.batch * self.size.window * numbers

    def losses(self) -> int:
        """Masses by row and routing probabilities at the mined queries."""
        cut, shape, size = self.cut, self.backbone.geometry, self.size
        rows = 5 * (cut.exact + cut.spans) + 3 * cut.spans
        return size.batch * shape.num_heads * _F32 * (size.mined * rows + size.window * (cut.exact + cut.spans))

    def transient(self) -> int:
        """The larger of: the teacher's rows while queries are mined, and gradients of the attention."""
        shape, size = self.backbone.geometry, self.size
        heads = size.batch * shape.num_heads * size.window * _F32
        keys = 0 if size.element_bytes == _F32 else self._per_kv_head(size.tokens) * shape.head_dim * _F32
        rows = self.cut.exact + size.window + self.cut.spans + self.cut.span_tokens
        return max(2 * heads * size.tokens + keys, 3 * heads * rows)

    def logits(self) -> int:
        """Teacher's and student's logits, their log-probabilities, and the terms of the divergence."""
        size = self.size
        return size.batch * size.mined * self.backbone.geometry.vocab_size * (2 * size.element_bytes + 6 * _F32)

    @property
    def _rank(self) -> int:
        return min(self.config.max_rank, self.cut.longest, self.backbone.geometry.head_dim)

    def _per_kv_head(self, rows: int) -> int:
        return self.size.batch * self.backbone.geometry.num_kv_heads * rows
