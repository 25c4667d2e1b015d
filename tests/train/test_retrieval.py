"""Synthetic retrieval documents: what is asked can be found, and nothing is taken from a benchmark."""

from __future__ import annotations

import random
import re

import pytest

from sekv.corpus import builtin_english
from tests.conftest import byte_tokenizer
from train import retrieval
from train.retrieval import FACTS, Fact, make_document, retrieval_sequence

TEXT = builtin_english()[0][:4000]


@pytest.fixture
def recorded(monkeypatch) -> list[Fact]:
    """Every fact that is made."""
    facts: list[Fact] = []

    def recording(make):
        def made(rng):
            facts.append(make(rng))
            return facts[-1]

        return made

    monkeypatch.setattr(retrieval, "FACTS", tuple(recording(make) for make in FACTS))
    return facts


@pytest.fixture
def plain_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("make", FACTS, ids=lambda make: make.__name__)
def test_a_fact_says_its_answer_and_nothing_of_a_benchmark(make):
    rng = random.Random(0)
    for _ in range(1000):
        fact = make(rng)
        assert fact.answer and fact.answer in fact.text
        for text in (fact.text, fact.question, fact.prefix, fact.answer):
            assert not re.search(r"magic|special|needle|\buuid\b|important", text, re.IGNORECASE)
            assert not re.search(r"(?<!\d)\d{7}(?!\d)", text), text


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("template", [True, False])
def test_what_is_asked_stands_in_the_context(tokenizer, plain_tokenizer, recorded, seed, template):
    used = tokenizer if template else plain_tokenizer
    document = make_document(used, TEXT, random.Random(seed))
    context, window = used.decode(document.context_ids), used.decode(document.window_ids)
    by_question = {}
    for fact in recorded:
        by_question.setdefault(fact.question, fact)
    assert len(by_question) >= len(TEXT) // 1200
    assert all(fact.text in context for fact in by_question.values())
    asked = [
        fact for fact in by_question.values() if f"\n{fact.question}\n" in window or f" {fact.question}\n" in window
    ]
    assert len(asked) == 4
    for fact in asked:
        assert f"{fact.prefix} {fact.answer}." in window
        assert window.index(fact.question) < window.index(f"{fact.prefix} {fact.answer}.")
        assert fact.question not in context


@pytest.mark.parametrize("seed", range(4))
def test_the_window_begins_where_the_context_ends(tokenizer, seed):
    """The head of the template belongs to the context; the question, its tail and every later turn to the window."""
    document = make_document(tokenizer, TEXT, random.Random(seed), questions=3)
    context, window = tokenizer.decode(document.context_ids), tokenizer.decode(document.window_ids)
    assert context.startswith("<bos>[user] ") and "[assistant]" not in context
    assert window.startswith("\n") and window.count("[assistant] ") == 3 and window.count("[user] ") == 2
    assert window.endswith(".") and "<bos>" not in window


def test_no_two_facts_answer_the_same_question(tokenizer, monkeypatch):
    """Although names run out."""
    made = iter([Fact(f"A is {i}.", f"What is {i // 2}?", "It is", str(i)) for i in range(40)])
    monkeypatch.setattr(retrieval, "FACTS", (lambda rng: next(made),))
    document = make_document(tokenizer, "One. Two. Three.", random.Random(0))
    context = tokenizer.decode(document.context_ids)
    assert [i for i in range(8) if f"A is {i}." in context] == [0, 2, 4, 6]


def test_a_document_depends_on_nothing_but_the_seed(tokenizer):
    one, again, other = (make_document(tokenizer, TEXT, random.Random(seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_sequence_is_shortened_within_its_limits(tokenizer):
    ids = tokenizer(TEXT).input_ids
    lengths = set()
    for seed in range(12):
        sequence, window = retrieval_sequence(tokenizer, ids, random.Random(seed), 3000, 10_000)
        document = make_document(tokenizer, TEXT, random.Random(seed))
        assert 0 < window < len(sequence) and len(sequence) - window >= 3000
        assert tokenizer.decode(sequence[-window:]).startswith("\n")
        lengths.add(len(sequence) - window)
        assert max(lengths) < len(document.context_ids) + 2000
    assert len(lengths) > 6
    whole, window = retrieval_sequence(tokenizer, ids, random.Random(0), 100, 10_000)
    cut, same = retrieval_sequence(tokenizer, ids, random.Random(0), 100, 1500)
    assert same == window and cut == whole[-1500:]
