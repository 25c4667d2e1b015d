"""What an evaluation writes: one record per answer, one result per policy, task and budget."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import TextIO

from sekv.evaluation.metrics import standard_error

SAMPLES, RESULTS, TABLE, PLOT = "samples.jsonl", "results.json", "results.csv", "scores.png"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Record:
    """One answer.

    Attributes:
        policy: specification of the policy, as given.
        task: name of the task.
        budget: share of the context (at most 1) or number of rows, as given.
        query_aware: the question was compressed with the context.
        index: number of the sample within its task.
        depth: where the needle lies in percent, or None.
        context_tokens: tokens that were compressed.
        truncated: tokens taken out of the middle of the context to fit the backbone.
        question: what was asked.
        answers: what was expected.
        output: what the model wrote.
        new_tokens: tokens it wrote.
        score: 0 to 100.
        rows: mean context rows attended per query, layer and KV head.
        resident_bytes: of the compressed context on the compute tier.
        host_bytes: of the compressed context on the host tier.
        moved_bytes_per_token: from the host, per token read or written after the context.
        seconds: compression and answer.
        prefill_seconds: reading the context, once for all policies and budgets.
    """

    policy: str
    task: str
    budget: float | int
    query_aware: bool
    index: int
    depth: float | None
    context_tokens: int
    truncated: int
    question: str
    answers: tuple[str, ...]
    output: str
    new_tokens: int
    score: float
    rows: float
    resident_bytes: int
    host_bytes: int
    moved_bytes_per_token: float
    seconds: float
    prefill_seconds: float


@dataclass(frozen=True)
class Result:
    """Means over the samples of one policy, task and budget; see `Record` for the units.

    Attributes:
        n: samples.
        score_stderr: standard error of `score`.
        truncated: samples whose context was shortened to fit the backbone.
        context_tokens: mean tokens that were compressed.
    """

    policy: str
    task: str
    budget: float | int
    query_aware: bool
    n: int
    score: float
    score_stderr: float
    rows: float
    resident_bytes: float
    host_bytes: float
    moved_bytes_per_token: float
    seconds: float
    truncated: int
    context_tokens: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Result:
        """Summarises the records of one policy, task and budget."""
        scores = [record.score for record in records]
        return cls(
            policy=records[0].policy,
            task=records[0].task,
            budget=records[0].budget,
            query_aware=records[0].query_aware,
            n=len(records),
            score=fmean(scores),
            score_stderr=standard_error(scores),
            rows=fmean(record.rows for record in records),
            resident_bytes=fmean(record.resident_bytes for record in records),
            host_bytes=fmean(record.host_bytes for record in records),
            moved_bytes_per_token=fmean(record.moved_bytes_per_token for record in records),
            seconds=fmean(record.seconds for record in records),
            truncated=sum(record.truncated > 0 for record in records),
            context_tokens=fmean(record.context_tokens for record in records),
        )


def summarise(records: Sequence[Record]) -> list[Result]:
    """One result per task, policy and budget, in the order of their first records."""
    groups: dict[tuple[str, str, float | int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.policy, record.budget), []).append(record)
    return [Result.of(group) for group in groups.values()]


class SampleWriter:
    """Appends records to DIR/samples.jsonl.partial as they come; nothing exists before the first one.

    Args:
        directory: created with the first record.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: list[Record] = []
        self._file: TextIO | None = None

    def add(self, record: Record) -> None:
        """Writes one record, at once readable by others."""
        if self._file is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = (self.directory / (SAMPLES + _PARTIAL)).open("w", encoding="utf-8")
        self._file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self._file.flush()
        self.records.append(record)

    def close(self) -> None:
        """Closes the file; a partial file stays where it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self) -> list[Result]:
        """Summarises the records, writes results.json and results.csv, and gives the samples their final name.

        Everything lies complete under a temporary name before the first file of an earlier evaluation is replaced.

        Returns:
            What results.json holds.
        """
        self.close()
        results = summarise(self.records)
        with ExitStack() as files:  # which closes from the last to the first: results.json is replaced at the end
            for name, text in _tables(results).items():
                files.enter_context(replacing(self.directory / name)).write_text(text, encoding="utf-8")
            os.replace(self.directory / (SAMPLES + _PARTIAL), self.directory / SAMPLES)
        return results


def _tables(results: Sequence[Result]) -> dict[str, str]:
    """The contents of results.json and results.csv."""
    rows = [asdict(result) for result in results]
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, [field.name for field in fields(Result)], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return {RESULTS: json.dumps(rows, indent=2, ensure_ascii=False) + "\n", TABLE: buffer.getvalue()}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that replaces it when the block ends well, and is removed when it does not."""
    temporary = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
