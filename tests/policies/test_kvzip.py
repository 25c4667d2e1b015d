"""KVzip against one plain pass over context, request and repetition with the full attention of transformers."""

from __future__ import annotations

import pytest
import torch

import sekv.attention
import sekv.policies.kvzip as kvzip_module
from sekv.backbone import Backbone
from sekv.errors import PolicyError
from sekv.policies.base import compress
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.kvzip import KVzipPolicy
from sekv.prefill import prefill
from sekv.prompt import template_parts


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def loop_scores(model, tokenizer, context: list[int], chunk_size: int, sinks: int, skip: int) -> torch.Tensor:
    """Scores [L, K, n] of one context, in the plainest way."""
    model.set_attn_implementation("eager")
    suffix = template_parts(tokenizer)[1]
    n, scores = len(context), torch.zeros(2, 2, len(context))
    for number, start in enumerate(range(skip, n, chunk_size)):
        chunk = context[start : start + chunk_size]
        prompt = "\n\nRepeat the previous context exactly."
        if number:
            prompt = "\n\nRepeat the part of the previous context exactly, starting with"
        request = tokenizer(prompt, add_special_tokens=False).input_ids
        request += context[max(0, start - 8) : start] if number else []
        read = [*context, *request, *suffix, *chunk]
        seen = [*range(min(sinks, start)), *range(start, start + len(chunk))]
        for layer, attention in enumerate(model(torch.tensor([read]), output_attentions=True).attentions):
            for h in range(4):
                for q in range(n, len(read)):
                    visible = [*seen, *range(n, q + 1)]  # the softmax is over these only
                    row = attention[0, h, q, visible]
                    row = row / row.sum()
                    place = min(sinks, start)
                    part = row[place : place + len(chunk)]
                    old = scores[layer, h // 2, start : start + len(chunk)]
                    scores[layer, h // 2, start : start + len(chunk)] = torch.maximum(old, part)
    return scores


@pytest.mark.parametrize(("chunk_size", "block_bytes"), [(100, 2**26), (11, 2**26), (11, 1)])
@pytest.mark.parametrize("templated", [False, True])
def test_scores_equal_the_plain_pass(make_tiny_model, tokenizer, monkeypatch, chunk_size, block_bytes, templated):
    monkeypatch.setattr(sekv.attention, "_BLOCK_BYTES", block_bytes)
    model = make_tiny_model("llama")
    head = template_parts(tokenizer)[0] if templated else []
    context = [*head, *ids(30)]
    expected = loop_scores(model, tokenizer, context, chunk_size, 4, len(head))
    state = prefill(Backbone.from_model(model, tokenizer, "tiny"), torch.tensor([context]))
    policy = KVzipPolicy(chunk_size=chunk_size)
    for layer in (0, 1):
        torch.testing.assert_close(policy.score(state, layer)[0], expected[layer], atol=1e-5, rtol=1e-4)


def test_contexts_of_a_batch_are_scored_as_if_alone(tiny_backbone):
    lengths = [40, 23, 3]
    tokens, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for b, n in enumerate(lengths):
        tokens[b, 40 - n :], mask[b, 40 - n :] = torch.tensor(ids(n, seed=b)), 1
    policy = KVzipPolicy(chunk_size=16)
    score = policy.score(prefill(tiny_backbone, tokens, mask), 1)
    for b, n in enumerate(lengths):
        alone = policy.score(prefill(tiny_backbone, torch.tensor([ids(n, seed=b)])), 1)
        torch.testing.assert_close(score[b, :, 40 - n :], alone[0], atol=1e-5, rtol=1e-4)
        assert not score[b, :, : 40 - n].any()


def test_one_pass_serves_every_budget_and_hubkv(tiny_backbone, monkeypatch):
    calls = []
    original = kvzip_module.reconstruct
    monkeypatch.setattr(kvzip_module, "reconstruct", lambda *args: calls.append(args[1:]) or original(*args))
    state = prefill(tiny_backbone, torch.tensor([ids(60)]))
    before = [state.key_value(layer)[0].clone() for layer in (0, 1)]
    policy = KVzipPolicy()
    caches = [compress(state, p, b) for p in (policy, HubKVPolicy(base=policy)) for b in (0.7, 0.8)]
    assert calls == [(2048, 4)]
    assert all(torch.equal(old, state.key_value(layer)[0]) for layer, old in enumerate(before))
    assert caches[0].stores[0].exact.tail_length == 0


def test_layers_with_a_cache_of_their_own_take_part(make_tiny_backbone):
    kinds = ["full_attention", "sliding_attention"]
    backbone = make_tiny_backbone("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=8)
    state = prefill(backbone, torch.tensor([ids(30)]))
    first = KVzipPolicy(chunk_size=10).score(state, 0)
    again = KVzipPolicy(chunk_size=10).score(prefill(backbone, torch.tensor([ids(30)])), 0)
    assert torch.equal(first, again)
    assert state.native[1].get_seq_length() == 30


def test_a_tokenizer_is_needed(make_tiny_model):
    state = prefill(Backbone.from_model(make_tiny_model("llama"), name="bare"), torch.tensor([ids(8)]))
    with pytest.raises(PolicyError, match="kvzip asks 'bare' to repeat, and it has no tokenizer"):
        KVzipPolicy().score(state, 0)


def test_chunk_size_out_of_range():
    with pytest.raises(PolicyError, match="chunk_size must be 1 or more, got 0"):
        KVzipPolicy(chunk_size=0)
