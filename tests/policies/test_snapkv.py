"""SnapKV's window attention and scores against full causal attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sekv.attention
from sekv.backbone import Backbone
from sekv.errors import PolicyError
from sekv.policies.snapkv import SnapKVPolicy, window_attention
from sekv.prefill import prefill
from tests.policies.specs import left_padding, plain_prefill, randn

G = 3


def full_attention(query: Tensor, key: Tensor) -> Tensor:
    """Causal attention [H, n, n] of one unpadded row; query [H, n, d], key [K, n, d]."""
    n = query.shape[1]
    logits = query @ key.repeat_interleave(G, dim=0).mT / query.shape[-1] ** 0.5
    return logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)


def loop_score(query: Tensor, key: Tensor, window: int, kernel: int, pooling: str) -> Tensor:
    """The scores [K, n] of one unpadded row, in plain Python."""
    n = query.shape[1]
    n_prefix = max(0, n - window)
    mean = full_attention(query, key)[:, n_prefix:].mean(dim=1)
    score = torch.zeros(key.shape[0], n)
    for k in range(key.shape[0]):
        for i in range(n_prefix):
            for h in range(k * G, (k + 1) * G):
                around = [
                    float(mean[h, j]) if 0 <= j < n_prefix else 0.0 for j in range(i - kernel // 2, i + kernel // 2 + 1)
                ]
                score[k, i] += (max(around) if pooling == "max" else sum(around) / kernel) / G
    score[:, n_prefix:] = score.max()
    return score


@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_window_attention_equals_full_attention(monkeypatch, block_bytes):
    monkeypatch.setattr(sekv.attention, "_BLOCK_BYTES", block_bytes)  # one query at a time, and all together
    lengths = [40, 23, 5]
    query, key = randn(3, 2 * G, 40, 8), randn(3, 2, 40, 8, seed=1)
    attention = window_attention(query[:, :, -8:], key, left_padding(lengths), 8**-0.5)
    for b, n in enumerate(lengths):
        expected = full_attention(query[b, :, 40 - n :], key[b, :, 40 - n :])[:, -8:].mean(dim=1)
        torch.testing.assert_close(attention[b, :, 40 - n :], expected)
        assert not attention[b, :, : 40 - n].any()


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 5])
def test_scores_equal_the_loop(pooling, kernel):
    lengths = [40, 23, 6, 1]
    query, key = randn(4, 2 * G, 40, 8), randn(4, 2, 40, 8, seed=1)
    # The prefill may have kept more queries than this policy asks for.
    state = plain_prefill(key, left_padding(lengths), query[:, :, -12:])
    score = SnapKVPolicy(window=8, kernel_size=kernel, pooling=pooling).score(state, 0)
    for b, n in enumerate(lengths):
        expected = loop_score(query[b, :, 40 - n :], key[b, :, 40 - n :], 8, kernel, pooling)
        torch.testing.assert_close(score[b, :, 40 - n :], expected)


def test_attention_is_scaled_as_the_backbone_scales_it(make_tiny_model):
    model = make_tiny_model("llama")
    for block in model.model.layers:
        block.self_attn.scaling = 0.07  # 1 / sqrt(d) is 0.25
    ids = torch.randint(3, 259, (1, 40), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    state = prefill(Backbone.from_model(model), ids, window=8)
    policy = SnapKVPolicy(window=8, kernel_size=1)
    for layer, attention in enumerate(attentions):
        expected = attention[:, :, -8:].mean(dim=2).unflatten(1, (2, 2)).mean(dim=2)[..., :-8]
        torch.testing.assert_close(policy.score(state, layer)[..., :-8], expected)


def test_the_window_is_kept_even_beyond_the_tail():
    state = plain_prefill(randn(1, 2, 60, 8), None, randn(1, 2 * G, 16, 8, seed=1))
    keep = SnapKVPolicy(window=16, sinks=2, tail=4).keep(state, 0, torch.tensor([20]))
    assert keep[..., -16:].all()
    assert keep[..., :2].all()


@pytest.mark.parametrize("queries", [None, randn(1, 2 * G, 8, 8)])
def test_too_few_queries_are_refused(queries):
    state = plain_prefill(randn(1, 2, 60, 8), None, queries)
    with pytest.raises(PolicyError, match=r"snapkv needs the last 16 queries .* window=16"):
        SnapKVPolicy(window=16).score(state, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"window": 0}, "window"), ({"kernel_size": 4}, "odd"), ({"pooling": "sum"}, "'sum' is unknown; give avg or max")],
)
def test_options_out_of_range(option, message):
    with pytest.raises(PolicyError, match=message):
        SnapKVPolicy(**option)
