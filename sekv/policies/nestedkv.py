"""NestedKV: keep the keys that are unusual at the scale of the document, the passage, or the moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from sekv.errors import PolicyError
from sekv.policies.keydiff import TINY, cosine_to_mean, unit_keys
from sekv.policies.scorer import ScorerPolicy, scale_to_unit
from sekv.prefill import Prefill

_PRIOR = (0.4, 0.4, 0.2)  # weights of the stable, episodic and current memory before a head's own gaps speak
_GAP_SHARE = 10  # the highest and the lowest tenth of the tokens define a gap
_EPISODES, _SHORTEST_EPISODE, _LONGEST_EPISODE = 32, 128, 256


@dataclass(kw_only=True)
class NestedKVPolicy(ScorerPolicy):
    """NestedKV (arXiv 2605.26678): key anomaly at three time scales, with heads competing for the layer's rows.

    Per layer and head, over the context's real tokens, with k_i the normalised keys (method section 3):
      memories  stable mu_s: mean of all k; episodic mu_e(i): mean of i's block of clip(floor(N / 32), 128, 256) tokens;
                current mu_c(i): mean of the last `current_window` tokens up to i
      anomaly   a_m(i) = -cos(k_i, mu_m(i)), min-max scaled to [0, 1]
      blend     sum of w_m a_m, w = softmax(log(0.4, 0.4, 0.2) + gap_weight * gap), gap_m = mean of a_m's top tenth
                minus mean of its bottom tenth
      gate      g_i = sigmoid(gate_slope * (u_i - gate_threshold)), u = std of the three, min-max scaled, minus its mean
      score_i = (1 - g_i) blend_i + g_i max_m a_m(i)
    Allocation is head-wise: each head keeps its own top safeguard * rows, the rest of the layer's budget goes to the
    highest scores of any head.

    Choices where the paper is silent: a tenth is floor(N / 10), at least one token; constant anomalies scale to 0; keys
    are taken after rotation; sinks and tail are protected.

    Attributes:
        current_window: tokens of the current memory, i itself included.
        gap_weight: how strongly a head prefers the scale that separates its tokens best.
        gate_slope: steepness of the surprise gate.
        gate_threshold: surprise above the head's mean at which the strongest scale takes over.
    """

    name: ClassVar[str] = "nestedkv"

    allocation: str = "headwise"
    current_window: int = 64
    gap_weight: float = 3.0
    gate_slope: float = 10.0
    gate_threshold: float = 0.60

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.current_window < 1:
            raise PolicyError(f"{self.name}: current_window must be 1 or more, got {self.current_window}")
        for option in ("gap_weight", "gate_slope"):
            if not 0.0 <= getattr(self, option) < math.inf:
                raise PolicyError(f"{self.name}: {option} must be 0 or more, got {getattr(self, option)}")

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Blended and gated anomaly [B, K, N] in [0, 1]."""
        real = prefill.mask[:, None]  # [B, 1, N]
        anomaly = self.anomalies(unit_keys(prefill.key_value(layer)[0], real), prefill)
        prior = torch.tensor(_PRIOR, device=anomaly.device).log()[:, None, None]
        weight = (prior + self.gap_weight * _gap(anomaly, real)).softmax(dim=0)  # [3, B, K]
        blend = (weight[..., None] * anomaly).sum(dim=0)
        # Three numbers per token: torch's std along a strided dimension takes longer than all else here.
        spread = (anomaly - anomaly.mean(dim=0)).square().mean(dim=0).sqrt()
        surprise = scale_to_unit(spread, real)
        surprise = surprise - surprise.sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True)
        gate = torch.sigmoid(self.gate_slope * (surprise - self.gate_threshold))
        return (1.0 - gate) * blend + gate * anomaly.amax(dim=0)

    def anomalies(self, unit: Tensor, prefill: Prefill) -> Tensor:
        """Scaled anomaly against the stable, episodic and current memory [3, B, K, N], from unit keys [B, K, N, d]."""
        current = _window_sums(unit, min(self.current_window, unit.shape[2]))
        # The sum serves as the mean; as a product of matrices, no array of N x d is made just to be added up.
        near = einsum(unit, current, "b k n d, b k n d -> b k n") / vector_norm(current, dim=-1).clamp_min(TINY)
        raw = -torch.stack([cosine_to_mean(unit), _episode_cosines(unit, prefill), near])
        return scale_to_unit(raw, prefill.mask[:, None])


def _episode_cosines(unit: Tensor, prefill: Prefill) -> Tensor:
    """Cosine of each unit key with the sum of its block [B, K, N]; blocks start at the first real token."""
    n = unit.shape[2]
    found = unit.new_zeros(unit.shape[:3])
    for row, length in enumerate(prefill.lengths.tolist()):  # contexts of a batch: their blocks differ in length
        size = min(max(length // _EPISODES, _SHORTEST_EPISODE), _LONGEST_EPISODE)
        real = unit[row, :, n - length :]
        blocks = pad(real, (0, 0, 0, -length % size)).unflatten(1, (-1, size))  # [K, n_blocks, size, d]
        found[row, :, n - length :] = cosine_to_mean(blocks).flatten(1)[:, :length]
    return found


def _window_sums(unit: Tensor, window: int) -> Tensor:
    """Sum of the unit keys in the window ending at each token [B, K, N, d].

    Running sums restart every `window` tokens, so that nothing is ever the small difference of two large sums.
    """
    n = unit.shape[2]
    chunks = pad(unit, (0, 0, 0, -n % window)).unflatten(2, (-1, window))  # [B, K, n_chunks, window, d]
    sums = chunks.cumsum(dim=3)
    sums[:, :, 1:] += sums[:, :, :-1, -1:] - sums[:, :, :-1]  # the part of the window in the chunk before
    return sums.flatten(2, 3)[:, :, :n]


def _gap(anomaly: Tensor, real: Tensor) -> Tensor:
    """Mean of the highest tenth minus mean of the lowest tenth of each head's anomalies [3, B, K, N] -> [3, B, K]."""
    length = real.sum(dim=-1, keepdim=True)  # [B, 1, 1]
    tenth = (length // _GAP_SHARE).clamp_min(1)
    most = int(tenth.max())
    counted = torch.arange(most, device=anomaly.device) < tenth

    def mean_of_top(values: Tensor) -> Tensor:
        found = values.masked_fill(~real, -torch.inf).topk(most, dim=-1).values
        return torch.where(counted, found, 0.0).sum(dim=-1) / tenth.squeeze(-1)

    return mean_of_top(anomaly) + mean_of_top(-anomaly)
