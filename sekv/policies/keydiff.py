"""KeyDiff: keep the keys that differ most from the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill

TINY = 1e-12  # least length that a key is divided by


@dataclass(kw_only=True)
class KeyDiffPolicy(ScorerPolicy):
    """KeyDiff (arXiv 2504.15364): keeps the keys least similar to the mean key; needs no attention.

    score_i = -cos(k_i, mean_j k_j / |k_j|), per head, over the context's real tokens and on rotated keys.

    Departures: the paper evicts block by block while it reads, here one pass ends the prefill, and blocks follow only
    for decoded tokens under `max_rows`; sinks and tail stay.
    """

    name: ClassVar[str] = "keydiff"
    scores_keys: ClassVar[bool] = True

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """-cos to the mean direction, [B, K, N] in [-1, 1]."""
        return self.score_keys(prefill.key_value(layer)[0], prefill.mask[:, None])

    def score_keys(self, key: Tensor, mask: Tensor) -> Tensor:
        """-cos to the mean direction of the real keys."""
        return -cosine_to_mean(unit_keys(key, mask))


def unit_keys(key: Tensor, mask: Tensor) -> Tensor:
    """Keys [B, K, N, d] scaled to length 1 in float32; 0 at padding of [B, 1 or K, N], and near 0 where a key is."""
    key = key.float()
    return key * (mask / vector_norm(key, dim=-1).clamp_min(TINY))[..., None]


def cosine_to_mean(unit: Tensor) -> Tensor:
    """Cosine of each unit key with the mean of all of them [..., n], from [..., n, d]."""
    # The sum serves as the mean: a cosine does not see lengths.
    return (unit @ normalize(unit.sum(dim=-2), dim=-1)[..., None]).squeeze(-1)
