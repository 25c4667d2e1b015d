"""KeyDiff and StreamingLLM scores against plain loops."""

from __future__ import annotations

import pytest
import torch

from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.streaming_llm import StreamingLLMPolicy
from tests.policies.specs import left_padding, plain_prefill, randn


def test_keydiff_equals_the_loop_and_ignores_padding():
    key, mask = randn(2, 3, 20, 8), left_padding([20, 13])
    key[1, :, :7] = 100.0  # whatever padding holds
    score = KeyDiffPolicy().score(plain_prefill(key, mask), 0)
    for b, n in enumerate((20, 13)):
        for k in range(3):
            real = key[b, k, 20 - n :]
            mean = sum((x / x.norm() for x in real), torch.zeros(8)) / n
            for i, x in enumerate(real):
                expected = -float(x @ mean) / float(x.norm() * mean.norm())
                assert float(score[b, k, 20 - n + i]) == pytest.approx(expected, abs=1e-5)


def test_keydiff_keeps_the_odd_key():
    key = torch.ones(1, 1, 50, 4)
    key[0, 0, 17] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert int(KeyDiffPolicy().score(plain_prefill(key), 0)[0, 0].argmax()) == 17


def test_streaming_llm_keeps_sinks_and_the_most_recent():
    mask = left_padding([60, 50])
    policy = StreamingLLMPolicy(sinks=3, tail=4)
    keep = policy.keep(plain_prefill(randn(2, 2, 60, 4), mask), 0, torch.tensor([10, 8]))
    for head in range(2):
        assert keep[0, head].nonzero().flatten().tolist() == [0, 1, 2, *range(53, 60)]
        assert keep[1, head].nonzero().flatten().tolist() == [10, 11, 12, *range(55, 60)]
