"""Expected attention: keep what queries that are still to come will attend to, if they are like those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.observation import Moments, Observer, QueryMoments
from sekv.policies.base import observed
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill
from sekv.rotary import rotate


@dataclass(kw_only=True)
class ExpectedAttentionPolicy(ScorerPolicy):
    """Expected attention (arXiv 2510.00636): scores a token by the attention that Gaussian future queries would pay it.

    Per query head, the queries of the context before RoPE have mean m and covariance C. With R the rotation averaged
    over the next `future` positions and s the attention's scaling:
      a_i = softmax over i of s k_i.(R m) + s^2 k_i.(R C R^T k_i) / 2
      score_i = (mean of a_i over the query heads of the KV head + epsilon) * |v_i|
    Mean and covariance are gathered in blocks while the context is read; sinks give no query and get no share of a.

    Choices where the paper is silent: sinks are the policy's own first tokens; the norm is that of v, not of what the
    output projection makes of it; future positions count from the context's own length, in a padded batch too. The
    paper recommends competing heads: `expected_attention[allocation=headwise]`.

    Attributes:
        future: positions after the context that the rotation is averaged over.
        covariance: False leaves out the second term.
        value_norm: False leaves out |v|.
        epsilon: added to the attention, so that large values count where no attention is expected.
    """

    name: ClassVar[str] = "expected_attention"

    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future < 1:
            raise PolicyError(f"{self.name}: future must be 1 or more, got {self.future}")
        if not 0.0 <= self.epsilon <= 1.0:
            raise PolicyError(f"{self.name}: epsilon must be from 0 to 1, got {self.epsilon}")

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Mean and covariance of the queries after the sinks."""
        return (QueryMoments(self.sinks),)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """Expected attention, times the length of the value [B, K, N]."""
        key, value = prefill.key_value(layer)
        moments = self.future_moments(prefill, observed(prefill, QueryMoments(self.sinks), layer, self.name))
        scaling = prefill.backbone.attention_scaling(layer)
        key = key.float()[:, :, None]  # [B, K, 1, N, d]
        mean = moments.mean.unflatten(1, (key.shape[1], -1))  # [B, K, G, d]
        logits = (key @ mean[..., None])[..., 0] * scaling  # [B, K, G, N]
        if self.covariance:
            spread = moments.covariance.unflatten(1, (key.shape[1], -1))
            logits += ((key @ spread) * key).sum(dim=-1) * (scaling**2 / 2)
        scored = prefill.mask & (prefill.positions >= self.sinks)
        attention = logits.masked_fill(~scored[:, None, None], torch.finfo(torch.float32).min).softmax(dim=-1)
        expected = attention.mean(dim=2) + self.epsilon
        return expected * value.float().norm(dim=-1) if self.value_norm else expected

    def future_moments(self, prefill: Prefill, moments: Moments) -> Moments:
        """R m [B, H, d] and R C R^T [B, H, d, d]."""
        ahead = torch.arange(self.future, device=prefill.mask.device)
        tables = prefill.backbone.rope(prefill.lengths[:, None] + ahead)
        cos, sin = (table.mean(dim=1)[:, None] for table in tables)  # a mean of rotations turns like one
        turned = rotate(moments.covariance, cos[:, None], sin[:, None])  # C R^T
        return Moments(rotate(moments.mean, cos, sin), rotate(turned.mT, cos[:, None], sin[:, None]).mT)
