"""SnapKV: keep what the last queries of the context attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sekv.errors import PolicyError
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill

POOLINGS = ("avg", "max")
_LOGIT_BYTES = 64 * 2**20  # float32 attention rows that may exist at once


@dataclass(kw_only=True)
class SnapKVPolicy(ScorerPolicy):
    """SnapKV (arXiv 2404.14469): keeps the tokens that a window of last queries attends to, and the window itself.

    score_i = pool(mean over window queries of softmax(scaling * q.k)_i), averaged over the query heads of a KV head;
    each window query sees the tokens up to its own, and only tokens before the window are scored. The scaling is the
    backbone's, mostly 1 / sqrt(d). Window tokens get the layer's highest score and are protected.

    Departures: kernel 5 with average pooling, the defaults of the authors' code (their LongBench runs are
    `snapkv[window=32,kernel_size=7,pooling=max]`); scores are averaged over a group, where that code keeps keys per
    query head.

    Attributes:
        window: last queries of the context that vote.
        kernel_size: width of the pooling along tokens, odd.
        pooling: `avg` or `max`.
    """

    name: ClassVar[str] = "snapkv"

    window: int = 64
    kernel_size: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise PolicyError(f"{self.name}: window must be 1 or more, got {self.window}")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise PolicyError(f"{self.name}: kernel_size must be odd and positive, got {self.kernel_size}")
        if self.pooling not in POOLINGS:
            raise PolicyError(f"{self.name}: pooling '{self.pooling}' is unknown; give {' or '.join(POOLINGS)}")

    @property
    def protected_tail(self) -> int:
        """The window is always kept, as in the authors' code."""
        return max(self.tail, self.window)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Pooled window attention [B, K, N] in [0, 1].

        Raises:
            PolicyError: the prefill kept fewer queries than the window.
        """
        queries = prefill.queries[layer]
        n_window = min(self.window, prefill.n_tokens)
        if queries is None or queries.shape[2] < n_window:
            kept = 0 if queries is None else queries.shape[2]
            raise PolicyError(
                f"{self.name} needs the last {n_window} queries of the context and the prefill kept {kept}; "
                f"call prefill(..., window={self.window})"
            )
        key = prefill.key_value(layer)[0]
        attention = window_attention(
            queries[:, :, -n_window:], key, prefill.mask, prefill.backbone.attention_scaling(layer)
        )
        in_prefix = prefill.mask[:, None].clone()
        in_prefix[..., prefill.n_tokens - n_window :] = False
        pooled = self._pool(attention.masked_fill(~in_prefix, 0.0))
        pooled = pooled.unflatten(1, (key.shape[1], -1)).mean(dim=2).masked_fill(~in_prefix, 0.0)
        highest = pooled.amax(dim=(1, 2), keepdim=True)
        return torch.where(in_prefix, pooled, highest)

    def _pool(self, attention: Tensor) -> Tensor:
        if self.pooling == "max":
            return max_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return avg_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)


def window_attention(query: Tensor, key: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Mean attention of the last W tokens of each context to all its tokens, causal; never N x N.

    Args:
        query: rotated queries of the last W (padded) tokens [B, H, W, d].
        key: rotated keys [B, K, N, d].
        mask: True for real tokens [B, N], padding on the left.
        scaling: factor on q.k.

    Returns:
        Float32 [B, H, N], 0 at padding; the average over the W queries that are real tokens.
    """
    batch, heads, n_window, dim = query.shape
    kv_heads, n_tokens = key.shape[1:3]
    grouped = query.float().reshape(batch, kv_heads, -1, n_window, dim) * scaling
    transposed = key.float().mT
    token = torch.arange(n_tokens, device=key.device)
    total = torch.zeros(batch, kv_heads, heads // kv_heads, n_tokens, device=key.device)
    chunk = max(1, _LOGIT_BYTES // (4 * batch * heads * n_tokens))
    for rows, part in zip(token[-n_window:].split(chunk), grouped.split(chunk, dim=3), strict=True):
        visible = (token <= rows[:, None]) & mask[:, None, None, None]  # [B, 1, 1, w, N]
        # Queries of a group side by side, so that keys are not repeated to query heads.
        logits = (part.flatten(2, 3) @ transposed).unflatten(2, part.shape[2:4])  # [B, K, G, w, N]
        logits.masked_fill_(~visible, torch.finfo(torch.float32).min)
        weights = logits.softmax(dim=-1) * mask[:, rows][:, None, None, :, None]  # padded queries do not vote
        total += weights.sum(dim=3)
    voters = mask[:, -n_window:].sum(dim=1)[:, None, None]
    return total.flatten(1, 2) / voters
