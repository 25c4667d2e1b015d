"""SnapKV: keep what the last queries of the context attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sekv.attention import attention_rows, query_blocks
from sekv.errors import PolicyError
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill

POOLINGS = ("avg", "max")


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
        attention = last_queries_attention(prefill, layer, self.window, self.name)
        n_window = min(self.window, prefill.n_tokens)
        in_prefix = prefill.mask[:, None].clone()
        in_prefix[..., prefill.n_tokens - n_window :] = False
        pooled = self._pool(attention.masked_fill(~in_prefix, 0.0))
        pooled = (
            pooled.unflatten(1, (prefill.backbone.geometry.num_kv_heads, -1)).mean(dim=2).masked_fill(~in_prefix, 0.0)
        )
        highest = pooled.amax(dim=(1, 2), keepdim=True)
        return torch.where(in_prefix, pooled, highest)

    def _pool(self, attention: Tensor) -> Tensor:
        if self.pooling == "max":
            return max_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return avg_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)


def last_queries_attention(prefill: Prefill, layer: int, window: int, name: str) -> Tensor:
    """Mean attention [B, H, N] of a context's last `window` tokens, from the queries that the prefill kept.

    Raises:
        PolicyError: the prefill kept fewer; `name` says who needs them.
    """
    queries = prefill.queries[layer]
    n_window = min(window, prefill.n_tokens)
    if queries is None or queries.shape[2] < n_window:
        kept = 0 if queries is None else queries.shape[2]
        raise PolicyError(
            f"{name} needs the last {n_window} queries of the context and the prefill kept {kept}; "
            f"call prefill(..., window={window})"
        )
    key = prefill.key_value(layer)[0]
    scaling = prefill.backbone.attention_scaling(layer)
    return window_attention(queries[:, :, -n_window:], key, prefill.mask, scaling)


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
    batch, heads, n_window, _ = query.shape
    kv_heads, n_tokens = key.shape[1:3]
    token = torch.arange(n_tokens, device=key.device)
    voters = mask[:, None, None, -n_window:, None]
    total = torch.zeros(batch, kv_heads, heads // kv_heads, n_tokens, device=key.device)
    for block in query_blocks(n_window, batch * heads * n_tokens):
        visible = (token <= token[-n_window:][block, None]) & mask[:, None, None, None]  # [B, 1, 1, w, N]
        weights = attention_rows(query[:, :, block], key, visible, scaling)
        total += (weights * voters[..., block, :]).sum(dim=3)  # padded queries do not vote
    return total.flatten(1, 2) / mask[:, -n_window:].sum(dim=1)[:, None, None]
