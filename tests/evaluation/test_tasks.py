from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sekv.errors import DataError
from sekv.evaluation.sample import MAX_NEW_TOKENS
from sekv.evaluation.tasks import parse_tasks, split_tasks
from sekv.prompt import split_prompt

GOOD = {"task": "t", "context": "c", "question": "q", "answer_prefix": "p", "answers": ["a"]}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_in_order_with_defaults_and_overrides(tmp_path, tokenizer) -> None:
    path = write(
        tmp_path / "x.jsonl", GOOD | {"note": 1}, "", GOOD | {"index": 7, "max_new_tokens": 3, "answers": ["b", "c"]}
    )
    (task,) = parse_tasks([str(path)])
    first, second = task.samples(tokenizer, 4096, None, 0)
    assert (first.task, first.index, first.max_new_tokens, first.answers, first.depth) == (
        "t",
        0,
        MAX_NEW_TOKENS,
        ("a",),
        None,
    )
    assert (second.index, second.max_new_tokens, second.answers) == (7, 3, ("b", "c"))


def test_the_limit_holds_for_each_task_of_a_file(tmp_path, tokenizer) -> None:
    lines = [GOOD | {"task": name, "question": str(i)} for i in range(3) for name in ("a", "b")]
    (task,) = parse_tasks([str(write(tmp_path / "x.jsonl", *lines))])
    assert task.names == ("a", "b")
    assert [(s.task, s.question) for s in task.samples(tokenizer, 4096, 2, 0)] == [
        ("a", "0"),
        ("a", "1"),
        ("b", "0"),
        ("b", "1"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not valid JSON"),
        ("[1]", r"line 2: expected a JSON object, found list"),
        ({key: GOOD[key] for key in ("task", "context", "answers")}, r"line 2: lacks question, answer_prefix"),
        (GOOD | {"question": 3}, r"line 2: question is int, expected text"),
        (GOOD | {"context": " \n"}, r"line 2: context is empty"),
        (GOOD | {"task": ""}, r"line 2: task is empty"),
        (GOOD | {"answers": "a"}, r"line 2: answers must be a list"),
        (GOOD | {"answers": []}, r"line 2: answers must be a list"),
        (GOOD | {"answers": ["a", ""]}, r"line 2: answers must be a list"),
        (GOOD | {"answers": ["a", " \n"]}, r"line 2: answers must be .* none of them empty or blank"),
        (GOOD | {"max_new_tokens": 0}, r"line 2: max_new_tokens is 0, expected a whole number of at least 1"),
        (GOOD | {"max_new_tokens": True}, r"line 2: max_new_tokens is True"),
        (GOOD | {"index": "x"}, r"line 2: index is 'x'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line: dict[str, Any] | str, message: str) -> None:
    path = write(tmp_path / "x.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError, match=message):
        parse_tasks([str(path)])


def test_a_separator_inside_a_text_is_no_new_line(tmp_path, tokenizer) -> None:
    path = write(tmp_path / "x.jsonl", json.dumps(GOOD | {"context": "one\u2028two\x85three"}, ensure_ascii=False))
    (task,) = parse_tasks([str(path)])
    assert task.samples(tokenizer, 4096, None, 0)[0].context == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", r"unknown task 'nope'; a task is a JSONL file, niah:LENGTH"),
        ("gone.jsonl", r"task file 'gone.jsonl' does not exist"),
        ("some/folder", r"task file 'some/folder' does not exist"),
        ("niah", r"task 'niah' needs a length of at least 256"),
        ("niah:x", r"task 'niah:x' needs a length"),
        ("niah:-4096", r"needs a length"),
        ("niah:255", r"needs a length of at least 256"),
    ],
)
def test_an_unknown_task_is_refused_with_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_tasks([spec])


def test_empty_unreadable_and_repeated_tasks_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="is empty"):
        parse_tasks([str(write(tmp_path / "empty.jsonl", ""))])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        parse_tasks([str(tmp_path / "binary.jsonl")])
    with pytest.raises(DataError, match="is a folder; a task is a JSONL file"):
        parse_tasks([str(tmp_path)])
    with pytest.raises(DataError, match="no task given"):
        parse_tasks([])
    with pytest.raises(DataError, match="two tasks are called niah:512"):
        parse_tasks(["niah:512", "niah:512"])


def test_files_with_the_same_task_name_are_told_apart_by_their_file_names(tmp_path, tokenizer) -> None:
    one, two = write(tmp_path / "short.jsonl", GOOD), write(tmp_path / "long.jsonl", GOOD, GOOD | {"task": "u"})
    tasks = parse_tasks([str(one), str(two)])
    assert [task.names for task in tasks] == [("short",), ("long/t", "long/u")]
    assert [sample.task for sample in tasks[1].samples(tokenizer, 4096, None, 0)] == ["long/t", "long/u"]
    with pytest.raises(DataError, match="two tasks are called short"):
        parse_tasks([str(one), str(one)])


def test_needle_samples_sweep_the_depth_whatever_the_limit(tokenizer) -> None:
    (task,) = parse_tasks(["niah:500"])
    assert [s.depth for s in task.samples(tokenizer, 4096, None, 0)] == [10.0 * i for i in range(11)]
    assert [s.depth for s in task.samples(tokenizer, 4096, 3, 0)] == [0.0, 50.0, 100.0]
    assert [s.depth for s in task.samples(tokenizer, 4096, 1, 0)] == [50.0]
    assert task.samples(tokenizer, 4096, 2, 1) == task.samples(tokenizer, 4096, 2, 1)
    assert task.samples(tokenizer, 4096, 2, 1) != task.samples(tokenizer, 4096, 2, 2)


def test_a_needle_prompt_leaves_room_for_its_answer_within_one_percent(tokenizer) -> None:
    (task,) = parse_tasks(["niah:4096"])
    (sample,) = task.samples(tokenizer, 4096, 1, 0)
    n = len(split_prompt(tokenizer, sample.context, sample.question, sample.answer_prefix).ids)
    assert 0.985 * 4096 <= n <= 4096 - sample.max_new_tokens
    with pytest.raises(DataError, match="give at most niah:2016"):
        task.samples(tokenizer, 2048, 1, 0)


def test_a_line_may_leave_the_chat_template_out(tmp_path, tokenizer) -> None:
    (task,) = parse_tasks([str(write(tmp_path / "x.jsonl", GOOD | {"chat": False}, GOOD))])
    assert [sample.chat for sample in task.samples(tokenizer, 4096, None, 0)] == [False, True]
    with pytest.raises(DataError, match="line 1: chat is 'no', expected true or false"):
        parse_tasks([str(write(tmp_path / "y.jsonl", GOOD | {"chat": "no"}))])


def test_a_file_names_its_metric_and_published_qa_samples_have_alternatives(tmp_path, tokenizer) -> None:
    path = write(tmp_path / "x.jsonl", GOOD | {"task": "qa_1"}, GOOD | {"metric": "match_any"}, GOOD)
    (task,) = parse_tasks([str(path)])
    metrics = [(sample.task, sample.metric) for sample in task.samples(tokenizer, 4096, None, 0)]
    assert metrics == [("qa_1", "match_any"), ("t", "match_any"), ("t", "match_all")]
    with pytest.raises(DataError, match="line 1: metric is 'x'; known: match_all, match_any"):
        parse_tasks([str(write(tmp_path / "y.jsonl", GOOD | {"metric": "x"}))])


def test_tasks_are_split_at_commas_outside_brackets() -> None:
    assert split_tasks("niah:512, ruler:x:1[a=b,c=d],,y.jsonl") == ["niah:512", "ruler:x:1[a=b,c=d]", "y.jsonl"]
