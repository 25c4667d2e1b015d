"""The policies that the tests of this folder run through, and a prefill made of plain tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from sekv.backbone import Backbone
from sekv.prefill import Prefill

EVICTING = (
    "streaming_llm",
    "keydiff",
    "keydiff[allocation=headwise]",
    "snapkv",
    "snapkv[window=16,kernel_size=7,pooling=max]",
    "nestedkv",
    "nestedkv[allocation=uniform]",
    "hubkv",
    "hubkv:snapkv",
    "hubkv:nestedkv",
    "hubkv:kvzip",
    "h2o",
    "observed",
    "tova",
    "expected_attention[allocation=headwise]",
    "pyramidkv[window=8,tail=8,beta=5]",
    "chunkkv[chunk_length=4,reuse=2]",
    "kvzip[chunk_size=50]",
)
"""Policies that drop tokens; they work at every budget."""

SMALLEST_SHARE = {
    "full": 0.0,
    **dict.fromkeys(EVICTING, 0.0),
    "sekv[routing=mean,tail=8,basis_bits=0]": 0.5,
    "sekv[routing=oracle,tail=8,max_span=16,basis_bits=0]": 0.5,
    "semanticache[tail=8]": 0.5,
    "quest[tail=8]": 0.5,
    "sentencekv[tail=8,span=24]": 0.5,
}
"""Every policy of the matrix, and the share of a context of 90 tokens below which it refuses a budget."""


def left_padding(lengths: list[int]) -> Tensor:
    """Mask [B, N] of contexts with these lengths, padding on the left."""
    n = max(lengths)
    return torch.arange(n) >= n - torch.tensor(lengths)[:, None]


def plain_prefill(key: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Prefill:
    """A prefill of one layer with keys [B, K, N, d]; values are the keys."""
    batch, kv_heads, n, _ = key.shape
    backbone = SimpleNamespace(
        name="plain",
        geometry=SimpleNamespace(num_layers=1, num_kv_heads=kv_heads, compressible=(0,)),
        attention_scaling=lambda layer: key.shape[-1] ** -0.5,
    )
    return Prefill(
        backbone=cast(Backbone, backbone),
        keys=[key],
        values=[key],
        queries=[queries],
        hidden=None,
        surprisal=None,
        input_ids=torch.zeros(batch, n, dtype=torch.long),
        mask=torch.ones(batch, n, dtype=torch.bool) if mask is None else mask,
        native={},
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that depend on nothing but the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
