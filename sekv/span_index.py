"""What a router knows of spans without fetching them: a projected key of each token (method section 1.3).

A mean key hides what a single token says, and retrieval looks for single tokens. So the index keeps, per token and KV
head, the key in the few directions that queries ask about (4 or 8 bits at inference), and a span's share of the
attention is estimated by the sum over its tokens. *(ours; the paper's index is the summary key, `routing_logits`)*

Dimensions: B batch, H query heads, K KV heads (H = G * K), Q queries, S spans, T span tokens, r routing dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from einops import einsum
from numpy.typing import NDArray
from torch import Tensor

from sekv import kernels
from sekv.adapter import LayerRouter
from sekv.kernels import NO_SPAN, Floats
from sekv.routing import sum_by_span

_LARGEST = {4: 7, 8: 127}  # whole number by bits
_ZERO = 8  # what stands for zero in four bits, which have no sign


@dataclass(frozen=True)
class TokenIndex:
    """Projected keys of the tokens of all spans.

    Attributes:
        keys: direction by direction, as queries read them [B, K, r, T]: float32 with a gradient in training, int8, or
            two directions in each uint8 [B, K, ceil(r / 2), T], the second half of them in the upper four bits.
        step: what one unit of a whole number is worth, by direction [B, K, r, 1]; None for float32.
        later: tokens behind these ones, with a step of their own; in whole numbers only.
    """

    keys: Tensor
    step: Tensor | None = None
    later: TokenIndex | None = None

    @classmethod
    def of(cls, router: LayerRouter, token_key: Tensor) -> TokenIndex:
        """From rotated keys of the span tokens [B, K, T, d]; rows at padding may be anything finite."""
        assert router.key_projection is not None
        return cls(einsum(token_key.float(), router.key_projection, "b k t d, k r d -> b k r t"))

    def quantised(self, bits: int) -> TokenIndex:
        """The same in whole numbers of 4 or 8 bits."""
        most = _LARGEST[bits]
        step = self.keys.abs().amax(dim=3, keepdim=True).clamp_min(1e-12) / most
        return TokenIndex(_packed((self.keys / step).round(), bits), step)

    def extended(self, later: TokenIndex) -> TokenIndex:
        """With more tokens behind those there are; all in whole numbers. The first ones are shared, not copied."""
        return replace(self, later=later if self.later is None else self.later._joined(later))

    def _joined(self, other: TokenIndex) -> TokenIndex:
        """One index of both, in the larger step of each direction: what changes its step is rounded once more."""
        assert self.step is not None and other.step is not None
        step = torch.maximum(self.step, other.step)
        keys = [(x._numbers() * (x.step / step)).round() for x in (self, other) if x.step is not None]
        return TokenIndex(_packed(torch.cat(keys, dim=3), self.bits), step)

    @property
    def bits(self) -> int:
        """Of a whole number: 4 or 8."""
        return 4 if self.keys.dtype == torch.uint8 else 8

    def _numbers(self) -> Tensor:
        """The whole numbers [B, K, r, T] float32."""
        if self.bits == 8:
            return self.keys.float()
        assert self.step is not None
        both = torch.cat([self.keys & 15, self.keys >> 4], dim=2)[:, :, : self.step.shape[2]]
        return both.float() - _ZERO

    def tensors(self) -> list[Tensor | None]:
        """The live tensors, for byte counts."""
        return [self.keys, self.step, *(self.later.tensors() if self.later is not None else ())]

    def _logits(self, grouped: Tensor) -> Tensor:
        """Inner products [B, K, n, T] with projected queries [B, K, n, r]."""
        scaled = grouped if self.step is None else grouped * self.step.mT
        if self.bits == 4:
            # What stands for zero is taken off once per query instead of once per token.
            low, high = scaled.tensor_split([self.keys.shape[2]], dim=-1)
            upper = self.keys[:, :, : high.shape[-1]] >> 4
            logits = low @ (self.keys & 15).float() + high @ upper.float() - _ZERO * scaled.sum(dim=-1, keepdim=True)
        else:
            logits = scaled @ self.keys.float()
        return logits if self.later is None else torch.cat([logits, self.later._logits(grouped)], dim=-1)

    def step_log_shares(
        self,
        router: LayerRouter,
        query: Tensor,
        span: Tensor,
        length: Tensor,
        rest: Tensor,
        scaling: float,
        mask: Tensor | None = None,
    ) -> Floats:
        """`log_shares` of a single token [B * H, S], on a CPU and from whole numbers: the same in compiled loops.

        The router's parameters must be detached.
        """
        assert router.offset is not None
        logits = self._step_logits(router, query, scaling)
        if mask is not None:
            per_row = logits.reshape(len(mask), -1, logits.shape[1])
            np.copyto(per_row, -np.inf, where=~mask.numpy()[:, None])
        peak = kernels.exponentials(logits)
        scale, offset = router.scale.numpy(), router.offset.numpy()
        return kernels.span_log_shares(logits, peak, span.numpy(), length.numpy(), rest.numpy().ravel(), scale, offset)

    @cached_property
    def _on_host(self) -> tuple[Floats, NDArray[np.uint8]]:
        """Steps [B * K, r] and codes [B * K, ceil(r / 2), T] for compiled loops: views, made once."""
        assert self.step is not None
        return self.step.flatten(0, 1).squeeze(-1).numpy(), self.keys.flatten(0, 1).numpy()

    def _step_logits(self, router: LayerRouter, query: Tensor, scaling: float) -> Floats:
        """Inner products [B * H, T] of a single token's projected query."""
        assert self.step is not None
        if self.bits == 4:
            scaled = (query.float() * scaling).flatten(0, 2).numpy()
            step, codes = self._on_host
            logits = np.empty((len(scaled), codes.shape[2]), dtype=np.float32)
            kernels.index_logits(scaled, router.projection.numpy(), step, codes, logits)
        else:
            projected = (query.float() * scaling) @ router.projection.mT
            grouped = projected.reshape(*self.keys.shape[:2], -1, projected.shape[-1])
            logits = replace(self, later=None)._logits(grouped).flatten(0, 2).numpy()
        if self.later is None:
            return logits
        return np.concatenate([logits, self.later._step_logits(router, query, scaling)], axis=1)

    def log_shares(
        self,
        router: LayerRouter,
        query: Tensor,
        span: Tensor,
        length: Tensor,
        rest: Tensor,
        scaling: float,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logarithm of the share of its attention that each query head is expected to give each span.

        Args:
            router: one layer's parameters, with projections of queries and keys.
            query: [B, H, Q, d].
            span: span of each token [B, T].
            length: tokens per span [B, S]; 0 where there is none.
            rest: log-sum of the exponentials of everything outside the spans, which is known exactly [B, H, Q].
            scaling: factor on q.k.
            mask: True where a token is real [B, T]; None when all are.

        Returns:
            [B, H, Q, S] float32; with the rest they sum to one.
        """
        batch, heads, n_queries, _ = query.shape
        kv_heads = self.keys.shape[1]
        projected = (query.float() * scaling) @ router.projection.mT  # [B, H, Q, r]
        grouped = projected.reshape(batch, kv_heads, -1, projected.shape[-1])
        logits = self._logits(grouped).view(batch, heads, n_queries, -1)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
        peak = logits.detach().amax(dim=-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)  # a context without spans: its gradient would be NaN
        tiny = torch.finfo(torch.float32).tiny
        total = sum_by_span(torch.exp(logits - peak), span, length.shape[1]).clamp_min(tiny).log() + peak
        assert router.offset is not None
        total = total * router.scale[:, None, None] + router.offset[:, None, None]
        total = total.masked_fill((length == 0)[:, None, None], float(NO_SPAN))
        return total - torch.logaddexp(total.logsumexp(dim=-1), rest)[..., None]


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers [B, K, r, T] as they are kept."""
    if bits == 8:
        return numbers.to(torch.int8)
    half = (numbers.shape[2] + 1) // 2
    low, high = (x.to(torch.int16) + _ZERO for x in numbers.tensor_split([half], dim=2))
    packed = low.to(torch.uint8)
    packed[:, :, : high.shape[2]] |= (high << 4).to(torch.uint8)
    return packed
