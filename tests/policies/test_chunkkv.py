"""ChunkKV: whole chunks, alike in all heads, and neighbouring layers that share a choice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sekv.errors import PolicyError
from sekv.policies.chunkkv import ChunkKVPolicy
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.snapkv import SnapKVPolicy
from tests.policies.specs import left_padding, plain_prefill, randn


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_scores_equal_the_loop(chunk):
    lengths = [40, 23, 2]
    state = plain_prefill(randn(3, 2, 40, 8), left_padding(lengths))
    base = KeyDiffPolicy()
    score = ChunkKVPolicy(base=base, chunk_length=chunk).score(state, 0)
    raw = base.score(state, 0).mean(dim=1)
    for b, n in enumerate(lengths):
        real = raw[b, 40 - n :].tolist()
        for i in range(n):
            start = i // chunk * chunk
            part = real[start : start + chunk]
            assert float(score[b, 0, 40 - n + i]) == pytest.approx(sum(part) / len(part), abs=1e-5)
    assert torch.equal(score[:, 0], score[:, 1])


def test_chunks_are_kept_whole_and_the_last_one_is_cut_to_the_budget():
    state = plain_prefill(randn(1, 2, 40, 8))
    policy = ChunkKVPolicy(base=KeyDiffPolicy(sinks=0, tail=0), chunk_length=4)
    best = policy.score(state, 0)[0, 0, ::4].argsort(descending=True)[:3] * 4
    keep = policy.keep(state, 0, torch.tensor([10]))[0]
    first, second, third = best.tolist()
    wanted = [*range(first, first + 4), *range(second, second + 4), third, third + 1]
    for head in range(2):
        assert keep[head].nonzero().flatten().tolist() == sorted(wanted)


def test_layers_of_a_group_keep_what_its_first_one_chose():
    class PerLayer(KeyDiffPolicy):
        def score(self, prefill, layer):
            return randn(1, 2, 40, seed=layer)

    state = plain_prefill(randn(1, 2, 40, 8))
    object.__setattr__(state, "backbone", SimpleNamespace(geometry=SimpleNamespace(compressible=(0, 2, 3, 5))))
    shared = ChunkKVPolicy(base=PerLayer(), reuse=2)
    scores = {layer: shared.score(state, layer) for layer in (0, 2, 3, 5)}
    assert torch.equal(scores[0], scores[2])
    assert torch.equal(scores[3], scores[5])
    assert not torch.equal(scores[0], scores[3])
    assert torch.equal(scores[3], ChunkKVPolicy(base=PerLayer()).score(state, 3))


def test_everything_else_is_the_bases():
    policy = ChunkKVPolicy(base=SnapKVPolicy(window=16, sinks=2, tail=5, allocation="headwise", layers="pooled"))
    assert (policy.window, policy.protected_tail, policy.sinks, policy.allocation, policy.layers) == (
        16,
        16,
        2,
        "headwise",
        "pooled",
    )
    with pytest.raises(PolicyError, match=r"chunkkv refines a scorer .*; hubkv is none"):
        ChunkKVPolicy(base=HubKVPolicy())


@pytest.mark.parametrize("option", ["chunk_length", "reuse"])
def test_options_out_of_range(option):
    with pytest.raises(PolicyError, match=f"{option} must be 1 or more, got 0"):
        ChunkKVPolicy(**{option: 0})
