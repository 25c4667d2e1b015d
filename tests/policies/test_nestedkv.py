"""NestedKV against the plainest reading of method section 3, and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.nestedkv import NestedKVPolicy
from tests.policies.specs import left_padding, plain_prefill, randn


def scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    constant = high - low <= 1e-6 * max(abs(low), abs(high))
    return [0.0 if constant else (v - low) / (high - low) for v in values]


def loop_score(key: Tensor) -> list[float]:
    """Scores of one unpadded head [n, d], token by token, in double precision."""
    n = len(key)
    k = [x / max(float(x.norm()), 1e-12) for x in key.double()]
    stack = torch.stack(k)

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b) / max(1e-12, float(a.norm() * b.norm()))

    block = min(256, max(128, n // 32))
    anomalies: list[list[float]] = [[], [], []]
    for i in range(n):
        first = i // block * block
        memories = (stack.mean(0), stack[first : first + block].mean(0), stack[max(0, i - 63) : i + 1].mean(0))
        for m, memory in enumerate(memories):
            anomalies[m].append(-cosine(k[i], memory))
    anomalies = [scaled(a) for a in anomalies]

    tenth = max(1, n // 10)
    weights = []
    for prior, a in zip((0.4, 0.4, 0.2), anomalies, strict=True):
        ordered = sorted(a)
        gap = sum(ordered[-tenth:]) / tenth - sum(ordered[:tenth]) / tenth
        weights.append(prior * math.exp(3.0 * gap))
    weights = [w / sum(weights) for w in weights]

    surprise = []
    for i in range(n):
        mean = sum(a[i] for a in anomalies) / 3
        surprise.append(math.sqrt(sum((a[i] - mean) ** 2 for a in anomalies) / 3))
    surprise = scaled(surprise)
    average = sum(surprise) / n
    scores = []
    for i in range(n):
        gate = 1 / (1 + math.exp(-10 * (surprise[i] - average - 0.60)))
        blend = sum(w * a[i] for w, a in zip(weights, anomalies, strict=True))
        scores.append((1 - gate) * blend + gate * max(a[i] for a in anomalies))
    return scores


def drifting_keys(*shape: int, seed: int = 0) -> Tensor:
    """Keys whose mean moves along the text, so that the three scales disagree."""
    steps = randn(*shape, seed=seed)
    return steps + 0.15 * steps.roll(1, dims=-2).cumsum(dim=-2) + 1.0


@pytest.mark.parametrize("lengths", [[300, 129, 64, 9], [1, 2, 3], [700]])
def test_scores_equal_the_loop(lengths):
    n = max(lengths)
    key, mask = drifting_keys(len(lengths), 2, n, 8), left_padding(lengths)
    score = NestedKVPolicy().score(plain_prefill(key, mask), 0)
    for b, length in enumerate(lengths):
        for head in range(2):
            expected = torch.tensor(loop_score(key[b, head, n - length :]))
            torch.testing.assert_close(score[b, head, n - length :], expected, atol=1e-4, rtol=1e-4)


def test_blocks_grow_with_the_text():
    key = drifting_keys(1, 1, 5000, 4)  # blocks of 156 tokens
    score = NestedKVPolicy().score(plain_prefill(key), 0)
    torch.testing.assert_close(score[0, 0], torch.tensor(loop_score(key[0, 0])), atol=2e-4, rtol=2e-4)


def test_gate_takes_the_strongest_scale_and_leaves_agreement_alone():
    key = drifting_keys(1, 2, 400, 8)
    state = plain_prefill(key)
    always, never = NestedKVPolicy(gate_threshold=-100.0), NestedKVPolicy(gate_threshold=100.0)
    anomaly = always.anomalies(torch.nn.functional.normalize(key, dim=-1), state)
    torch.testing.assert_close(always.score(state, 0), anomaly.amax(dim=0))
    blend = never.score(state, 0)
    assert ((blend >= anomaly.amin(dim=0) - 1e-6) & (blend <= anomaly.amax(dim=0) + 1e-6)).all()
    score = NestedKVPolicy().score(state, 0)
    assert ((score >= blend - 1e-6) & (score <= anomaly.amax(dim=0) + 1e-6)).all()


def test_a_key_odd_only_in_its_passage_is_found():
    # Two topics; the last topic's direction, dropped into the first one, is common in the document and rare around it.
    key = torch.zeros(1, 1, 512, 8)
    key[..., :256, 0], key[..., 256:, 1] = 1.0, 1.0
    key += 0.05 * randn(1, 1, 512, 8)
    key[0, 0, 100] = key[0, 0, 400]
    assert int(NestedKVPolicy().score(plain_prefill(key), 0)[0, 0, :256].argmax()) == 100


def test_heads_compete_but_keep_their_safeguard():
    key = drifting_keys(1, 4, 400, 8)
    key[0, 0] = key[0, 0].cumsum(dim=0) * 0.01 + 5.0  # one head with hardly any anomaly
    rows = torch.tensor([60])
    counts = NestedKVPolicy().keep(plain_prefill(key), 0, rows).sum(-1)
    assert int(counts.sum()) == 4 * 60
    assert int(counts.min()) >= 12
    assert len(set(counts[0].tolist())) > 1
    assert NestedKVPolicy(allocation="uniform").keep(plain_prefill(key), 0, rows).sum(-1).tolist() == [[60] * 4]


def test_constant_and_zero_keys_give_finite_scores():
    for key in (torch.ones(1, 2, 200, 8), torch.zeros(1, 2, 200, 8), torch.full((1, 2, 200, 8), 1e-30)):
        assert NestedKVPolicy().score(plain_prefill(key), 0).isfinite().all()


def test_options_out_of_range():
    with pytest.raises(PolicyError, match="current_window must be 1 or more"):
        NestedKVPolicy(current_window=0)
