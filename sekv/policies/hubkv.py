"""HubKV: refine any scorer so that near neighbours of a kept token do not use up the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from sekv.errors import PolicyError
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.scorer import ScorerPolicy, scale_to_unit
from sekv.policies.wrapper import WrapperPolicy
from sekv.prefill import Prefill


@dataclass(kw_only=True)
class HubKVPolicy(WrapperPolicy):
    """HubKV (paper draft): discounts the neighbours of local score peaks before the base scorer's own top-k.

    With s the base's scores, min-max scaled to [0, 1] over the layer, and r the share removed (method, section 2):
      hubs      h_i = (s_i equals the maximum of the `kernel_size` tokens around i)
      discount  q_i = s_i for hubs, gamma * s_i for others
      heads     c_h = std(s_h) / mean(s_h), beta_h = clip((c_h / mean c)^exponent, weight_low, weight_high)
      z_i = s_i + r^gate_power (beta_h q_i - s_i)
    It is a local proxy of marginal gain and inherits no guarantee of greedy coverage.

    Sinks, tail and allocation are the base's: `hubkv:snapkv[allocation=headwise]`. The paper's main variant is
    `hubkv:kvzip`; without a base it refines KeyDiff, which like KVzip does not depend on where the context ends, and
    costs no second pass.

    Choices where the paper is silent: std is the population's; a layer whose heads are all constant has beta 1.

    Attributes:
        base: the scorer to refine.
        kernel_size: tokens around i, itself included, odd.
        gamma: factor on the score of tokens that are no hubs.
        exponent: how strongly a head's selectivity counts.
        weight_low: smallest head weight.
        weight_high: largest head weight.
        gate_power: power of the compression ratio that opens the gate.
    """

    name: ClassVar[str] = "hubkv"

    base: ScorerPolicy = field(default_factory=KeyDiffPolicy)
    kernel_size: int = 5
    gamma: float = 0.5
    exponent: float = 0.5
    weight_low: float = 0.8
    weight_high: float = 1.2
    gate_power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise PolicyError(f"{self.name}: kernel_size must be odd and positive, got {self.kernel_size}")
        if not 0.0 <= self.gamma <= 1.0:
            raise PolicyError(f"{self.name}: gamma must be from 0 to 1, got {self.gamma}")
        if not 0.0 <= self.weight_low <= self.weight_high < math.inf:
            raise PolicyError(
                f"{self.name}: weight_low must be from 0 to weight_high, got {self.weight_low} and {self.weight_high}"
            )
        for option in ("exponent", "gate_power"):
            if not 0.0 <= getattr(self, option) < math.inf:
                raise PolicyError(f"{self.name}: {option} must be 0 or more, got {getattr(self, option)}")

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """The base's scores [B, K, N], min-max scaled to [0, 1] over all heads of the layer."""
        return scale_to_unit(self.base.score(prefill, layer), prefill.mask[:, None], dims=(-2, -1))

    def ranking(self, prefill: Prefill, layer: int, rows: Tensor) -> Tensor:
        """Refined scores [B, K, N]; r is the share that this layer removes."""
        return self.refine(self.score(prefill, layer), prefill.mask, 1.0 - rows / prefill.lengths)

    def refine(self, scores: Tensor, mask: Tensor, ratio: Tensor) -> Tensor:
        """The scores z of the class docstring.

        Args:
            scores: [B, K, N] in [0, 1], 0 at padding.
            mask: True for real tokens [B, N].
            ratio: share of rows removed [B].

        Returns:
            [B, K, N].
        """
        real = mask[:, None]
        padding = self.kernel_size // 2
        around = max_pool1d(scores.masked_fill(~real, -torch.inf), self.kernel_size, stride=1, padding=padding)
        discounted = torch.where(scores == around, scores, self.gamma * scores)
        gate = ratio[:, None, None] ** self.gate_power
        return scores + gate * (self.head_weights(scores, real) * discounted - scores)

    def head_weights(self, scores: Tensor, real: Tensor) -> Tensor:
        """beta_h [B, K, 1] of scores [B, K, N] that are 0 where `real` [B, 1, N] is False."""
        n = real.sum(dim=-1, keepdim=True)
        mean = scores.sum(dim=-1, keepdim=True) / n
        std = ((scores - mean).masked_fill(~real, 0.0).square().sum(dim=-1, keepdim=True) / n).sqrt()
        selectivity = std / mean.masked_fill(mean == 0, 1.0)  # a head of zeros has std 0 too
        average = selectivity.mean(dim=1, keepdim=True)
        relative = torch.where(average == 0, 1.0, selectivity / average.masked_fill(average == 0, 1.0))
        return relative.pow(self.exponent).clamp(self.weight_low, self.weight_high)
