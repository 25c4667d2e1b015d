from __future__ import annotations

import pytest

from sekv.corpus import builtin_english, is_held_out
from sekv.errors import DataError
from sekv.evaluation.needle import MIN_LENGTH, make_needle
from sekv.prompt import split_prompt


def prompt_length(tokenizer, needle) -> int:
    return len(split_prompt(tokenizer, needle.context, needle.question, needle.answer_prefix).ids)


@pytest.mark.parametrize("length", [400, 999, 4096, 60_000])
@pytest.mark.parametrize("depth", [0.0, 35.0, 100.0])
def test_the_whole_prompt_has_the_length_within_one_percent(tokenizer, length: int, depth: float) -> None:
    n = prompt_length(tokenizer, make_needle(tokenizer, length, depth, "0-0"))
    assert 0.99 * length <= n <= length


def test_the_needle_is_there_once_at_its_depth(tokenizer) -> None:
    for depth in (0.0, 25.0, 50.0, 75.0, 100.0):
        needle = make_needle(tokenizer, 12_000, depth, f"3-{depth}")
        assert needle.context.count(needle.answer) == 1
        sentence = f"{needle.answer_prefix} {needle.answer}."
        assert needle.context.count(sentence) == 1
        body = needle.context.split("\n\n", 1)[1]
        assert 100 * body.index(sentence) / (len(body) - len(sentence)) == pytest.approx(depth, abs=5.0)


def test_the_haystack_is_held_out_text_and_the_wording_is_not_rulers(tokenizer) -> None:
    needle = make_needle(tokenizer, 3000, 50.0, "0-0")
    held_out = "\n\n".join(document for document in builtin_english() if is_held_out(document))
    body = needle.context.split("\n\n", 1)[1].replace(f"{needle.answer_prefix} {needle.answer}. ", "")
    lines = [line for line in body.splitlines()[1:-1] if line.strip()]
    assert len(lines) > 20
    assert all(line in held_out for line in lines)
    assert "special magic number" not in " ".join([needle.context, needle.question, needle.answer_prefix])


def test_the_seed_fixes_everything(tokenizer) -> None:
    assert make_needle(tokenizer, 800, 50.0, "1-2") == make_needle(tokenizer, 800, 50.0, "1-2")
    assert make_needle(tokenizer, 800, 50.0, "1-2").answer != make_needle(tokenizer, 800, 50.0, "1-3").answer


def test_a_python_without_held_out_documentation_is_refused(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("sekv.corpus.is_held_out", lambda text: False)
    with pytest.raises(DataError, match="no held-out text"):
        make_needle(tokenizer, 800, 50.0, "0-0")


def test_a_length_that_the_question_alone_exceeds_is_refused(tokenizer) -> None:
    with pytest.raises(DataError, match=f"niah:{MIN_LENGTH} is too short: the question alone takes"):
        make_needle(tokenizer, MIN_LENGTH, 50.0, "0-0")  # one token per byte
