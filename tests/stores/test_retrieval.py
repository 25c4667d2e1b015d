"""Retrieval stores against a plain loop: which spans are read, and the answer."""

from __future__ import annotations

import pytest
import torch

from sekv.errors import BudgetError, PolicyError
from sekv.policies.base import compress
from sekv.policies.registry import build_policy
from sekv.policies.sentencekv import SentenceKVPolicy
from sekv.prefill import prefill
from sekv.stores.base import tensor_bytes
from tests.policies.specs import left_padding, randn

LENGTHS = [130, 97]


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def expected(store, key, value, query, n_tail):
    """Estimates, choice and attention, one query head after another."""
    cut, out = store.plan.segmentation, torch.zeros_like(query)
    for b in range(query.shape[0]):
        spans = [
            range(int(s), int(s + n)) for s, n in zip(cut.span_start[b], cut.span_length[b], strict=True) if int(n)
        ]
        for k in range(key.shape[1]):
            for q in range(query.shape[2]):
                mass = torch.zeros(len(spans))
                for h in range(2 * k, 2 * k + 2):
                    x = query[b, h, q] * 0.25
                    if store.index.shape[-1] == 2 * x.shape[0]:
                        tops = [key[b, k, list(s)].amax(0) for s in spans]
                        lows = [key[b, k, list(s)].amin(0) for s in spans]
                        logit = torch.stack(
                            [torch.maximum(x * t, x * low).sum() for t, low in zip(tops, lows, strict=True)]
                        )
                        exact = torch.stack([(key[b, k, list(s)] @ x).max() for s in spans])
                        assert bool((logit >= exact - 1e-5).all())
                    else:
                        logit = torch.stack([key[b, k, list(s)].mean(0) @ x for s in spans])
                    mass += logit.softmax(0)
                left, tokens = int(store.plan.zoom_rows[b]), []
                for _ in range(3):  # greedy passes: spans in order until one does not fit
                    total, room = 0, left
                    for s in mass.argsort(descending=True).tolist():
                        span = spans[s]
                        if span[0] in tokens or len(span) > room:
                            continue
                        total += len(span)
                        if total <= room:
                            tokens += span
                            left -= len(span)
                tokens += cut.exact_index[b][cut.exact_mask[b]].tolist()
                tail = slice(store.exact.n_context, store.exact.n_context + n_tail - query.shape[2] + q + 1)
                keys = torch.cat([key[b, k, tokens], store.exact.key[b, k, tail]])
                values = torch.cat([value[b, k, tokens], store.exact.value[b, k, tail]])
                for h in range(2 * k, 2 * k + 2):
                    out[b, h, q] = (keys @ query[b, h, q] * 0.25).softmax(0) @ values
    return out


@torch.no_grad()
@pytest.mark.parametrize("spec", ["quest[tail=8]", "sentencekv[tail=8,span=12]"])
@pytest.mark.parametrize("n_queries", [1, 4])
def test_equals_the_loop(tiny_backbone, spec, n_queries):
    state = prefill(tiny_backbone, ids(2, 130), left_padding(LENGTHS))
    store = compress(state, build_policy(spec), 0.4).stores[1].fork()
    key, value = state.key_value(1)
    for step in range(4):
        new = (randn(2, 2, n_queries, 16, seed=10 + step), randn(2, 2, n_queries, 16, seed=20 + step))
        store.append(*new)
        query = randn(2, 4, n_queries, 16, seed=step)
        want = expected(store, key, value, query, store.tail_length)
        torch.testing.assert_close(store.attend(query, 0.25, None), want, atol=1e-4, rtol=1e-4)
    assert store.meter.mean_rows <= 0.4 * sum(LENGTHS) / 2
    assert store.meter.moved_bytes > 0


@torch.no_grad()
def test_tokens_lie_on_the_host_and_bounds_on_the_compute_tier(tiny_backbone):
    cache = compress(prefill(tiny_backbone, ids(1, 1000)), build_policy("quest"), 0.1)
    row = 2 * 2 * 16 * 4  # KV heads, key and value, dimension, float32
    for store in cache.stores:
        assert 964 * row <= store.host_bytes <= 1.1 * 964 * row
        assert store.index.nbytes == 61 * row  # a largest and a smallest key per page of 16
        tables = tensor_bytes(store.plan.tensors())
        assert store.resident_bytes - tables == (36 + 64 + 61) * row


def test_a_budget_without_a_page_is_refused(tiny_backbone):
    with pytest.raises(
        BudgetError, match=r"quest \(sinks, tail and one span of up to 16 tokens\) needs at least 52 rows"
    ):
        compress(prefill(tiny_backbone, ids(1, 200)), build_policy("quest"), 51)


def test_sentences_end_where_the_text_says(tiny_backbone):
    text = "One two. Three? Four five six!\nSeven"
    state = prefill(tiny_backbone, tiny_backbone.tokenizer(text, return_tensors="pt").input_ids)
    ends = SentenceKVPolicy().ends(state)[0].nonzero().squeeze(1).tolist()
    assert ends == [i for i, c in enumerate(text) if c in ".?!\n"]


def test_sentences_need_a_tokenizer(tiny_backbone):
    state = prefill(type(tiny_backbone).from_model(tiny_backbone.model, None, "bare"), ids(1, 200))
    with pytest.raises(PolicyError, match="'bare' has no tokenizer"):
        compress(state, SentenceKVPolicy(), 0.6)
