from __future__ import annotations

import pytest
import torch
from transformers import TextStreamer

from sekv.budget import Budget
from sekv.errors import DataError
from sekv.generation import answer, ask, memory_ids, read_context
from sekv.policies.base import FullPolicy, compress
from sekv.policies.registry import build_policy
from sekv.prompt import split_prompt

POLICIES = ("full", "keydiff", "streaming_llm", "snapkv", "nestedkv", "hubkv:keydiff", "sekv[routing=mean]")


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return split_prompt(tokenizer, "The quick brown fox jumps over the lazy dog. " * 4, "What jumps?", "It is")


def plain_generate(backbone, ids: list[int], n: int) -> list[int]:
    row = torch.tensor([ids])
    output = backbone.model.generate(
        row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=n, pad_token_id=0
    )
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("query_aware", [False, True])
@pytest.mark.parametrize("spec", POLICIES)
def test_budget_one_gives_the_tokens_of_plain_generate(tiny_backbone, prompt, spec: str, query_aware: bool) -> None:
    policy = build_policy(spec)
    context = read_context(tiny_backbone, memory_ids(prompt, query_aware), [policy])
    found = ask(context, policy, Budget.parse(1.0), prompt, 12, query_aware=query_aware)
    assert found.ids == plain_generate(tiny_backbone, prompt.ids, 12)
    assert found.rows == context.n_tokens


@pytest.mark.parametrize("query_aware", [False, True])
def test_what_is_compressed(prompt, query_aware: bool) -> None:
    ids = memory_ids(prompt, query_aware)
    assert ids == (prompt.ids[:-1] if query_aware else prompt.context_ids)
    assert len(prompt.ids) > len(ids)


def test_one_prefill_serves_policies_with_different_needs(tiny_backbone, prompt) -> None:
    policies = [
        build_policy(spec) for spec in ("snapkv[window=7]", "keydiff", "sekv[routing=mean]", "snapkv[window=9]")
    ]
    context = read_context(tiny_backbone, prompt.context_ids, policies)
    assert context.surprisal is not None
    assert context.queries[0] is not None
    assert context.queries[0].shape[2] == 9
    bare = read_context(tiny_backbone, prompt.context_ids, [FullPolicy()])
    assert bare.surprisal is None
    assert bare.queries[0] is None


def test_the_same_memory_answers_twice_alike_and_stays_as_it_was(tiny_backbone, prompt) -> None:
    policy = build_policy("keydiff")
    cache = compress(read_context(tiny_backbone, prompt.context_ids, [policy]), policy, 0.5)
    before = [store.exact.key.clone() for store in cache.stores]
    first, second = (answer(tiny_backbone, cache, prompt.context_ids, prompt.question_ids, 8) for _ in range(2))
    assert (first.ids, first.rows, first.text) == (second.ids, second.rows, second.text)
    assert all(torch.equal(a, store.exact.key) for a, store in zip(before, cache.stores, strict=True))
    assert all(store.tail_length == 0 for store in cache.stores)
    assert first.rows == pytest.approx(len(prompt.context_ids) // 2)
    assert (
        first.resident_bytes
        < compress(read_context(tiny_backbone, prompt.context_ids, []), FullPolicy(), 1.0).resident_bytes
    )


def test_an_answer_stops_at_the_end_of_text(make_tiny_backbone, prompt) -> None:
    backbone = make_tiny_backbone("llama")
    free = plain_generate(backbone, prompt.ids, 6)
    backbone.model.generation_config.eos_token_id = free[3]
    policy = FullPolicy()
    found = ask(read_context(backbone, prompt.context_ids, [policy]), policy, Budget.parse(1.0), prompt, 6)
    assert found.ids == free[: free.index(free[3]) + 1]
    assert found.text == backbone.tokenizer.decode(found.ids, skip_special_tokens=True)


def test_sampling_follows_the_seed(tiny_backbone, prompt) -> None:
    policy = FullPolicy()
    context = read_context(tiny_backbone, prompt.context_ids, [policy])

    def draw(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return ask(context, policy, Budget.parse(1.0), prompt, 12, do_sample=True, temperature=2.0).ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_streamer_sees_the_answer_only(tiny_backbone, prompt, capsys) -> None:
    policy = build_policy("keydiff")
    context = read_context(tiny_backbone, prompt.context_ids, [policy])
    streamer = TextStreamer(tiny_backbone.tokenizer, skip_prompt=True, skip_special_tokens=True)
    found = ask(context, policy, Budget.parse(0.5), prompt, 8, streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == found.text


def test_bytes_moved_are_counted_per_token_fed(tiny_backbone, prompt) -> None:
    policy = build_policy("sekv[routing=mean,max_span=16]")
    cache = compress(read_context(tiny_backbone, prompt.context_ids, [policy]), policy, 0.6)
    found = answer(tiny_backbone, cache, prompt.context_ids, prompt.question_ids, 5)
    fed = len(prompt.question_ids) + len(found.ids) - 1
    assert found.host_bytes == cache.host_bytes > 0
    assert found.moved_bytes_per_token * fed == pytest.approx(round(found.moved_bytes_per_token * fed))
    assert found.moved_bytes_per_token > 0


def test_ids_that_do_not_belong_to_the_memory_are_refused(tiny_backbone, prompt) -> None:
    policy = FullPolicy()
    cache = compress(read_context(tiny_backbone, prompt.context_ids, [policy]), policy, 1.0)
    with pytest.raises(DataError, match="question_ids is empty"):
        answer(tiny_backbone, cache, prompt.context_ids, [], 4)
    with pytest.raises(DataError, match=f"3 tokens, but the compressed context has {len(prompt.context_ids)}"):
        answer(tiny_backbone, cache, [1, 2, 3], [4], 4)
    with pytest.raises(DataError, match="4096"):
        answer(tiny_backbone, cache, prompt.context_ids, prompt.question_ids, 5000)
