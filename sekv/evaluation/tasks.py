"""Evaluation tasks: JSONL files and the generated needle task, checked before any model is loaded."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from sekv.evaluation.needle import MIN_LENGTH, make_needle

MAX_NEW_TOKENS = 64  # answers of up to this many tokens unless a sample says otherwise
_NEEDLE_DEPTHS = 11  # samples of the needle task when no limit is given: depths 0, 10, ..., 100 percent
_NEEDLE_NEW_TOKENS = 32
_TEXTS = ("task", "context", "question", "answer_prefix")
_ALLOWED = "a JSONL file, or niah:LENGTH such as niah:4096 (the generated needle task, LENGTH in tokens)"


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        task: name of the task in results.
        index: number within the task.
        context: the text that is compressed.
        question: what is asked about it.
        answer_prefix: the beginning of the answer.
        answers: strings that the output should contain.
        max_new_tokens: most tokens of the answer.
        depth: where the needle lies in percent, or None.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int = MAX_NEW_TOKENS
    depth: float | None = None


class Task(ABC):
    """One entry of `--tasks`: a source of samples under one name or several."""

    names: tuple[str, ...]

    @abstractmethod
    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """The samples, at most `limit` of each name.

        Raises:
            DataError: the task does not fit the backbone.
        """


class NeedleTask(Task):
    """`niah:LENGTH`: one fact in `length` tokens of English, at depths from 0 to 100 percent."""

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


class FileTask(Task):
    """Samples from a JSONL file; its `task` fields name them.

    Raises:
        DataError: the file is missing or empty, or a line is malformed; the message has the line number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._samples = _read_jsonl(path)
        self.names = tuple(dict.fromkeys(sample.task for sample in self._samples))

    def qualify(self) -> None:
        """Puts the file's name before the task names, to tell them from those of another file."""
        stem = self.path.stem
        new = {name: stem if len(self.names) == 1 else f"{stem}/{name}" for name in self.names}
        self._samples = [Sample(**{**vars(sample), "task": new[sample.task]}) for sample in self._samples]
        self.names = tuple(new.values())

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """The file's first samples of each name, in the file's order."""
        by_name: dict[str, list[Sample]] = {name: [] for name in self.names}
        for sample in self._samples:
            by_name[sample.task].append(sample)
        return [sample for group in by_name.values() for sample in group[:limit]]


def parse_tasks(specs: Sequence[str]) -> list[Task]:
    """Reads task names and files.

    Args:
        specs: `niah:LENGTH` or paths of JSONL files.

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
    path = Path(spec)
    if path.is_file():
        return FileTask(path)
    if path.is_dir():
        raise DataError(f"task '{spec}' is a folder; a task is {_ALLOWED}")
    if path.suffix in (".jsonl", ".json") or len(path.parts) > 1:
        raise DataError(f"task file '{spec}' does not exist; a task is {_ALLOWED}")
    raise DataError(f"unknown task '{spec}'; a task is {_ALLOWED}")


def _read_jsonl(path: Path) -> list[Sample]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"task file '{path}' cannot be read: {error}") from None
    samples = [_parse_line(line, f"{path}, line {n}", n - 1) for n, line in enumerate(lines, 1) if line.strip()]
    if not samples:
        raise DataError(f"task file '{path}' is empty; each line is a JSON object with {', '.join(_TEXTS)}, answers")
    return samples


def _parse_line(line: str, where: str, number: int) -> Sample:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    missing = [key for key in (*_TEXTS, "answers") if key not in record]
    if missing:
        raise DataError(f"{where}: lacks {', '.join(missing)}; every line has {', '.join(_TEXTS)}, answers")
    for key in _TEXTS:
        if not isinstance(record[key], str):
            raise DataError(f"{where}: {key} is {type(record[key]).__name__}, expected text")
    for key in ("task", "context"):
        if not record[key].strip():
            raise DataError(f"{where}: {key} is empty")
    answers = record["answers"]
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise DataError(f"{where}: answers must be a list of one or more texts, none of them empty or blank")
    return Sample(
        **{key: record[key] for key in _TEXTS},
        answers=tuple(answers),
        index=_whole_number(record, "index", 0, number, where),
        max_new_tokens=_whole_number(record, "max_new_tokens", 1, MAX_NEW_TOKENS, where),
    )


def _whole_number(record: dict[str, Any], key: str, least: int, default: int, where: str) -> int:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{where}: {key} is {value!r}, expected a whole number of at least {least}")
    return value
