"""Tasks from JSONL files, checked line by line before any model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from sekv.evaluation.metrics import METRICS
from sekv.evaluation.sample import MAX_NEW_TOKENS, Sample, Task

_TEXTS = ("task", "context", "question", "answer_prefix")
_ALTERNATIVES = ("qa_1", "qa_2")  # published RULER samples whose answers are alternatives


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
        self._samples = [replace(sample, task=new[sample.task]) for sample in self._samples]
        self.names = tuple(new.values())

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """The file's first samples of each name, in the file's order."""
        by_name: dict[str, list[Sample]] = {name: [] for name in self.names}
        for sample in self._samples:
            by_name[sample.task].append(sample)
        return [sample for group in by_name.values() for sample in group[:limit]]


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
    metric = record.get("metric", "match_any" if record["task"] in _ALTERNATIVES else "match_all")
    if metric not in METRICS:
        raise DataError(f"{where}: metric is {metric!r}; known: {', '.join(METRICS)}")
    chat = record.get("chat", True)
    if not isinstance(chat, bool):
        raise DataError(f"{where}: chat is {chat!r}, expected true or false (plain text, without the chat template)")
    return Sample(
        **{key: record[key] for key in _TEXTS},
        answers=tuple(answers),
        index=_whole_number(record, "index", 0, number, where),
        max_new_tokens=_whole_number(record, "max_new_tokens", 1, MAX_NEW_TOKENS, where),
        metric=metric,
        chat=chat,
    )


def _whole_number(record: dict[str, Any], key: str, least: int, default: int, where: str) -> int:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{where}: {key} is {value!r}, expected a whole number of at least {least}")
    return value
