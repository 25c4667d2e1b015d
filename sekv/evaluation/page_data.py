"""What the report page says, taken from the answers of a folder: plain values, ready for the template and for JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from sekv.errors import DataError
from sekv.evaluation.diagnosis import CAUSES
from sekv.evaluation.journal import PAIRED, RUN, SAMPLES, read_records
from sekv.evaluation.records import Key, Record, summarise
from sekv.evaluation.report import budget_label, format_bytes, how_compressed

_SHARDS = "samples-*.jsonl"
_REFERENCE = "full"
_MOST_DEPTHS = 11  # more different depths are binned into tenths
_MOST_FAILURES = 500
_LENGTH = re.compile(r":(\d+)(?=$|[\[/:])")

Row = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """What a folder of results holds.

    Attributes:
        folder: its path.
        records: every answer.
        run: what all answers have in common; empty when the folder does not say.
        differences: to the baseline; empty when none was named, or while answers are missing.
        finished: results were written, so no answer was missing then.
    """

    folder: Path
    records: list[Record]
    run: Row
    differences: list[Row]
    finished: bool

    @classmethod
    def read(cls, folder: Path) -> Answers:
        """Reads a folder that `sekv evaluate` or `sekv sweep` wrote, finished or not.

        Raises:
            DataError: it has no answers, or a file of it is malformed.
        """
        files = [path for path in (folder / SAMPLES, *sorted(folder.glob(_SHARDS))) if path.is_file()]
        found = {record.key: record for path in files for record in read_records(path)}
        if not found:
            raise DataError(f"{folder} holds no answers; give a folder that sekv evaluate or sekv sweep wrote to")
        paired = _read_json(folder / PAIRED, list)
        return cls(
            folder,
            list(found.values()),
            _read_json(folder / RUN, dict),
            [{**row, "budget_label": budget_label(row["budget"])} for row in paired],
            (folder / "results.json").is_file(),
        )

    @property
    def policies(self) -> list[str]:
        """In the order of their first answers; a policy's colour is its place."""
        return list(dict.fromkeys(record.policy for record in self.records))

    @property
    def modes(self) -> list[str]:
        """How the contexts were compressed, in words."""
        return [how_compressed(aware) for aware in dict.fromkeys(record.query_aware for record in self.records)]


def _read_json(path: Path, kind: type) -> Any:
    if not path.is_file():
        return kind()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); run the evaluation again to write it anew") from None
    if not isinstance(found, kind):
        raise DataError(f"{path} holds no {kind.__name__}; run the evaluation again to write it anew")
    return found


def family_and_length(task: str) -> tuple[str, int | None]:
    """`ruler:vt` and 4096 from `ruler:vt:4096`; the task itself and None where its name tells no length."""
    match = _LENGTH.search(task)
    return (task, None) if match is None else (task[: match.start()] + task[match.end() :], int(match[1]))


def result_rows(records: Sequence[Record]) -> list[Row]:
    """The results, with what the page shows beside them: one row per task, policy and budget."""
    prefill: dict[tuple[str, str, float | int], list[float]] = {}
    for record in records:
        prefill.setdefault((record.task, record.policy, record.budget), []).append(record.prefill_seconds)
    rows = []
    for result in summarise(records):
        family, length = family_and_length(result.task)
        rows.append(
            {
                **asdict(result),
                "family": family,
                "length": length if length is not None else round(result.context_tokens),
                "budget_label": budget_label(result.budget),
                "prefill_seconds": fmean(prefill[result.task, result.policy, result.budget]),
                "resident_text": format_bytes(result.resident_bytes),
                "host_text": format_bytes(result.host_bytes),
                "moved_text": format_bytes(result.moved_bytes_per_token),
            }
        )
    return sorted(rows, key=_by_task_and_budget(rows))


def _by_task_and_budget(rows: Sequence[Row]) -> Callable[[Row], tuple[Any, ...]]:
    tasks = {task: i for i, task in enumerate(dict.fromkeys(row["task"] for row in rows))}
    return lambda row: (tasks[row["task"]], row["budget"] > 1, row["budget"])


def needle_grids(records: Sequence[Record]) -> list[Row]:
    """Score by depth and length, one grid per kind of task, budget and policy.

    Returns:
        Each with `family`, `budget`, `shown` (both in words), `policy`, `lengths` (columns), and `rows` of a `depth` in
        words and `cells`; a cell is `score` and `n`, or None where there is no answer.
    """
    placed: dict[tuple[str, float | int, str], list[tuple[int, Record]]] = {}
    for record in records:
        family, length = family_and_length(record.task)
        if record.depth is not None and length is not None:
            placed.setdefault((family, record.budget, record.policy), []).append((length, record))
    grids = []
    for (family, budget, policy), group in placed.items():
        label = _depth_labels([record.depth for _, record in group if record.depth is not None])
        lengths = sorted({length for length, _ in group})
        cells: dict[tuple[str, int], list[float]] = {}
        for length, record in group:
            assert record.depth is not None
            cells.setdefault((label[record.depth], length), []).append(record.score)
        rows = [
            {
                "depth": depth,
                "cells": [
                    {"score": fmean(found), "n": len(found)} if (found := cells.get((depth, length))) else None
                    for length in lengths
                ],
            }
            for depth in dict.fromkeys(label[depth] for depth in sorted(label))
        ]
        grids.append(
            {
                "family": family,
                "budget": budget,
                "shown": f"{family}, {budget_label(budget)}",
                "policy": policy,
                "lengths": lengths,
                "rows": rows,
            }
        )
    return grids


def _depth_labels(depths: Sequence[float]) -> dict[float, str]:
    """What each depth is called: itself, or its tenth where there are many."""
    different = sorted(set(depths))
    if len(different) <= _MOST_DEPTHS:
        return {depth: f"{depth:.3g}%" for depth in different}
    tenths = {depth: min(9, int(depth // 10)) for depth in different}
    return {depth: f"{10 * tenth} to {10 * tenth + 10}%" for depth, tenth in tenths.items()}


def failures(answers: Answers, traced: dict[Key, int]) -> tuple[list[Row], int]:
    """Answers that scored less than 100, the worst of each task first, and how many more there are.

    Args:
        answers: of the folder; perplexities are no answers.
        traced: number of the trace of each answer that has one.
    """
    reference = {record.key[:3]: record.score for record in answers.records if record.policy == _REFERENCE}
    wrong = [r for r in answers.records if r.score < 100.0 and r.metric != "perplexity"]
    order = {task: i for i, task in enumerate(dict.fromkeys(record.task for record in wrong))}
    wrong.sort(key=lambda r: (order[r.task], r.score))
    rows = [
        {
            "task": record.task,
            "number": record.index,
            "seed": record.seed,
            "policy": record.policy,
            "budget_label": budget_label(record.budget),
            "score": record.score,
            "metric": record.metric,
            "depth": record.depth,
            "question": record.question,
            "answers": list(record.answers),
            "output": record.output,
            "full_score": reference.get(record.key[:3]) if record.policy != _REFERENCE else None,
            "diagnosis": _diagnosis_in_words(record.diagnosis),
            "trace": traced.get(record.key),
        }
        for record in _spread(wrong)[:_MOST_FAILURES]
    ]
    return rows, len(wrong) - len(rows)


def _spread(records: list[Record]) -> list[Record]:
    """All of them while they fit; otherwise as many from each task in turn, so that none hides the others."""
    if len(records) <= _MOST_FAILURES:
        return records
    groups = [list(group) for _, group in groupby(records, key=lambda record: record.task)]
    share = -(-_MOST_FAILURES // len(groups))
    return [record for group in groups for record in group[:share]]


def _diagnosis_in_words(cause: str | None) -> str | None:
    return f"{cause}: {CAUSES[cause]}" if cause in CAUSES else cause
