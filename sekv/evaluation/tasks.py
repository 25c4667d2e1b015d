"""Evaluation tasks by their names: JSONL files and generated tasks, checked before any model is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from sekv.evaluation.benchmarks.task import BENCHMARKS, BenchmarkTask
from sekv.evaluation.files import FileTask
from sekv.evaluation.needle import MIN_LENGTH, make_needle
from sekv.evaluation.perplexity import PerplexityTask
from sekv.evaluation.ruler.task import RulerTask
from sekv.evaluation.sample import Sample, Task

_NEEDLE_DEPTHS = 11  # samples of the needle task when no limit is given: depths 0, 10, ..., 100 percent
_NEEDLE_NEW_TOKENS = 32
_ALLOWED = (
    "a JSONL file, niah:LENGTH such as niah:4096 (the generated needle task, LENGTH in tokens), ruler:NAME:LENGTH "
    "such as ruler:vt:4096, ppl:LENGTH, or a benchmark such as longbench:hotpotqa or gsm8k"
)


class NeedleTask(Task):
    """`niah:LENGTH`: one fact in `length` tokens of English, at depths from 0 to 100 percent."""

    seeded = True

    def __init__(self, length: int) -> None:
        self.length = length
        self.names = (f"niah:{length}",)

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """Samples spread over the depths, whatever the limit."""
        prompt = min(self.length, max_positions - _NEEDLE_NEW_TOKENS)
        if prompt < 0.99 * self.length:
            raise DataError(
                f"{self.names[0]} does not fit the backbone: it reads at most {max_positions} tokens; "
                f"give at most niah:{max_positions - _NEEDLE_NEW_TOKENS}"
            )
        n = limit or _NEEDLE_DEPTHS
        depths = [100.0 * i / (n - 1) for i in range(n)] if n > 1 else [50.0]
        made = (make_needle(tokenizer, prompt, depth, f"{seed}-{i}") for i, depth in enumerate(depths))
        return [
            Sample(
                task=self.names[0],
                index=i,
                context=needle.context,
                question=needle.question,
                answer_prefix=needle.answer_prefix,
                answers=(needle.answer,),
                max_new_tokens=_NEEDLE_NEW_TOKENS,
                depth=needle.depth,
            )
            for i, needle in enumerate(made)
        ]


def split_tasks(text: str) -> list[str]:
    """Splits `a:1[x=1,y=2],b.jsonl` at the commas outside brackets; empty parts are left out."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def parse_tasks(specs: Sequence[str]) -> list[Task]:
    """Reads task names and files.

    Args:
        specs: `niah:LENGTH`, `ruler:NAME:LENGTH[option=value,...]`, or paths of JSONL files.

    Raises:
        DataError: a name is unknown, a file is missing or malformed, or a task is given twice.
    """
    if not specs:
        raise DataError(f"no task given; a task is {_ALLOWED}")
    tasks = [_parse_task(spec) for spec in specs]
    clashing = _repeated(tasks)
    for task in tasks:
        if isinstance(task, FileTask) and not clashing.isdisjoint(task.names):
            task.qualify()
    if twice := _repeated(tasks):
        raise DataError(f"two tasks are called {', '.join(sorted(twice))}; give each once, files under different names")
    return tasks


def _repeated(tasks: Iterable[Task]) -> set[str]:
    counts = Counter(name for task in tasks for name in task.names)
    return {name for name, n in counts.items() if n > 1}


def _parse_task(spec: str) -> Task:
    kind, colon, rest = spec.partition(":")
    if kind == "niah":
        if not colon or not rest.isdecimal() or int(rest) < MIN_LENGTH:
            raise DataError(f"task '{spec}' needs a length of at least {MIN_LENGTH} tokens, such as niah:4096")
        return NeedleTask(int(rest))
    if kind == "ruler":
        return RulerTask(*_parse_parts(r"(\w+):(\d+)", spec, rest, "ruler:niah_single_2:4096"))
    if kind == "ppl":
        length, options = _parse_parts(r"(\d+)", spec, rest, "ppl:4096")
        if unknown := sorted(options.keys() - {"text"}):
            raise DataError(f"task '{spec}' has no option '{unknown[0]}'; its options: text")
        return PerplexityTask(length, options.get("text"))
    if re.split(r"[:\[]", spec)[0] in BENCHMARKS:
        return BenchmarkTask(*_parse_parts(r"(\w+)(?::([\w .-]+))?", spec, spec, "longbench:hotpotqa[data=FOLDER]"))
    path = Path(spec)
    if path.is_file():
        return FileTask(path)
    if path.is_dir():
        raise DataError(f"task '{spec}' is a folder; a task is {_ALLOWED}")
    if path.suffix in (".jsonl", ".json") or len(path.parts) > 1:
        raise DataError(f"task file '{spec}' does not exist; a task is {_ALLOWED}")
    raise DataError(f"unknown task '{spec}'; a task is {_ALLOWED}")


def _parse_parts(pattern: str, spec: str, rest: str, example: str) -> tuple[Any, ...]:
    """What follows the kind of a task: the groups of `pattern`, numbers as such, and `[option=value,...]`."""
    match = re.fullmatch(rf"{pattern}(?:\[(.*)\])?", rest)
    if match is None:
        raise DataError(f"task '{spec}' is malformed; write it as {example}")
    *parts, options = match.groups()
    values = (int(part) if part and part.isdecimal() else part or "" for part in parts)
    return *values, parse_options(spec, options or "")


def parse_options(spec: str, text: str) -> dict[str, str]:
    """The options of `option=value,option=value`.

    Raises:
        DataError: one is malformed or given twice.
    """
    options: dict[str, str] = {}
    for item in text.split(",") if text.strip() else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise DataError(f"option '{item.strip()}' of task '{spec}' is malformed; write option=value")
        if key in options:
            raise DataError(f"option '{key}' is given twice in task '{spec}'")
        options[key] = value
    return options
