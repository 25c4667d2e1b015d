"""Expected attention against the formula, one query head and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.expected_attention import ExpectedAttentionPolicy
from sekv.prefill import prefill
from sekv.rotary import unrotate


def rotation(backbone, position: int) -> Tensor:
    """R [d, d] at a position."""
    cos, sin = (t[0, 0] for t in backbone.rope(torch.tensor([[position]])))
    half = len(cos) // 2
    matrix = torch.diag(cos)
    for i in range(half):
        matrix[i, half + i], matrix[half + i, i] = -sin[i], sin[half + i]
    return matrix


@pytest.mark.parametrize(
    "options", [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.02}, {"sinks": 0, "future": 3}]
)
def test_scores_equal_the_loop(tiny_backbone, options):
    n = 30
    tokens = torch.randint(3, 259, (1, n), generator=torch.Generator().manual_seed(1))
    policy = ExpectedAttentionPolicy(**{"future": 8, **options})
    state = prefill(tiny_backbone, tokens, window=n, observers=policy.observers)
    cos, sin = tiny_backbone.rope(torch.arange(n)[None])
    average = torch.stack([rotation(tiny_backbone, n + i) for i in range(policy.future)]).mean(dim=0)
    for layer in (0, 1):
        key, value = (t[0] for t in state.key_value(layer))
        queries = unrotate(state.queries[layer][0], cos, sin)[:, policy.sinks :]
        score = policy.score(state, layer)[0]
        for k in range(2):
            expected = torch.zeros(n - policy.sinks)
            for h in (2 * k, 2 * k + 1):
                mean = average @ queries[h].mean(dim=0)
                spread = average @ torch.cov(queries[h].T, correction=0) @ average.T
                logits = []
                for i in range(policy.sinks, n):
                    logit = float(key[k, i] @ mean) / 4
                    if policy.covariance:
                        logit += float(key[k, i] @ spread @ key[k, i]) / 16 / 2
                    logits.append(math.exp(logit))
                expected += torch.tensor(logits) / sum(logits) / 2
            expected += policy.epsilon
            if policy.value_norm:
                expected *= value[k, policy.sinks :].norm(dim=-1)
            torch.testing.assert_close(score[k, policy.sinks :], expected, atol=1e-5, rtol=1e-3)


def test_a_context_of_sinks_only_has_finite_scores(tiny_backbone):
    policy = ExpectedAttentionPolicy()
    state = prefill(tiny_backbone, torch.tensor([[5, 6, 7]]), observers=policy.observers)
    assert policy.score(state, 0).isfinite().all()


@pytest.mark.parametrize(("option", "message"), [({"future": 0}, "future"), ({"epsilon": -1.0}, "epsilon")])
def test_options_out_of_range(option, message):
    with pytest.raises(PolicyError, match=message):
        ExpectedAttentionPolicy(**option)
