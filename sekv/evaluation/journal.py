"""The folder of an evaluation: answers appended one by one, so that a run that was killed goes on where it stopped.

run.json             what all answers of the folder have in common; another run is refused
samples.jsonl        one line per answer; samples-RANK.jsonl while several processes share the work
traces/              what the first samples zoomed into, when asked for
results.json, .csv   written when every answer is there, and results.md for documents
paired.json, .csv    differences to the baseline, when one is named
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from sekv.errors import DataError
from sekv.evaluation.markdown import scores_markdown
from sekv.evaluation.records import Difference, Key, Record, Result, paired_differences, replacing, summarise
from sekv.evaluation.shards import WHOLE, Shard
from sekv.evaluation.trace import TRACES, Trace

RUN, SAMPLES, RESULTS, PAIRED = "run.json", "samples.jsonl", "results.json", "paired.json"
MARKDOWN = "results.md"
_SHARD_FILES = "samples-*.jsonl"


class Journal:
    """The answers in a folder, and one process's way of adding to them. Use it as a context manager.

    Args:
        directory: created with the first answer.
        settings: what all answers have in common, as JSON.
        shard: the part of the work that this process does.
        restart: throw away what is there.

    Raises:
        DataError: the folder holds answers of other settings, or what it holds cannot be read.
    """

    def __init__(self, directory: Path, settings: dict[str, Any], shard: Shard = WHOLE, restart: bool = False) -> None:
        self.directory, self.settings, self.shard = directory, settings, shard
        self._file: TextIO | None = None
        self._lock = FileLock(directory / f".samples-{shard.rank}.lock")
        self._discard = restart
        self.records: dict[Key, Record] = {}
        if not restart:
            self._check_settings()
            self.records = self._read()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)

    @property
    def path(self) -> Path:
        """The file that this process appends to."""
        name = SAMPLES if self.shard.world == 1 else f"samples-{self.shard.rank:05d}.jsonl"
        return self.directory / name

    def add(self, record: Record, trace: Trace | None = None) -> None:
        """Writes one answer, at once safe from the end of this process, and before it what it zoomed into."""
        if self._file is None:
            self._file = self._open()
        if trace is not None:
            trace.save(self.directory / TRACES, record.key)
        self._file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self._file.flush()
        self.records[record.key] = record

    def finish(self, expected: Sequence[Key], baseline: str | None = None) -> list[Result] | None:
        """Summarises when every expected answer is there, from whichever process; the last one to finish does it.

        Args:
            expected: the answers of the whole evaluation, in order.
            baseline: a policy to compare all others with.

        Returns:
            What results.json holds, or None while other processes are at work.
        """
        with FileLock(self.directory / ".merge.lock") as lock:
            self.records = self._read()
            if not self.records.keys() >= set(expected):
                return None
            order = dict.fromkeys((*expected, *self.records))
            records = [self.records[key] for key in order]
            results = summarise(records)
            shards = sorted(self.directory.glob(_SHARD_FILES))
            with ExitStack() as files:  # closed from the last to the first: results.json is replaced at the end
                _write_tables(files, self.directory / RESULTS, results, Result)
                document = files.enter_context(replacing(self.directory / MARKDOWN))
                document.write_text(scores_markdown(results), encoding="utf-8")
                if baseline is not None:
                    _write_tables(files, self.directory / PAIRED, paired_differences(records, baseline), Difference)
                if shards:
                    lines = (json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
                    merged = files.enter_context(replacing(self.directory / SAMPLES))
                    merged.write_text("".join(lines), encoding="utf-8")
            for path in shards:
                path.unlink(missing_ok=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        return results

    def _open(self) -> TextIO:
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DataError(f"another process writes to {self.path}; wait for it, or give another --output") from None
        if self._discard:  # not earlier: a run that never answers leaves the old results
            old = [RUN, SAMPLES, RESULTS, "results.csv", MARKDOWN, PAIRED, "paired.csv"]
            traces = (self.directory / TRACES).glob("*")
            for path in (*(self.directory / name for name in old), *self.directory.glob(_SHARD_FILES), *traces):
                path.unlink(missing_ok=True)
        if not (self.directory / RUN).exists():
            with replacing(self.directory / RUN) as temporary:
                temporary.write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
        if self.path.exists():
            _cut_torn_line(self.path)
        return self.path.open("a", encoding="utf-8")

    def _check_settings(self) -> None:
        path = self.directory / RUN
        if not path.exists():
            if (self.directory / SAMPLES).exists():
                raise DataError(f"{self.directory} has answers but no {RUN}; give another --output, or --restart")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); give another --output, or --restart") from None
        here = json.loads(json.dumps(self.settings))
        differing = [key for key in {**found, **here} if found.get(key) != here.get(key)]
        if differing:
            said = "; ".join(
                f"{key}: {_short(found.get(key))} there, {_short(here.get(key))} here" for key in differing
            )
            raise DataError(
                f"{self.directory} holds answers of another run ({said}); give another --output, or --restart to "
                "throw them away"
            )

    def _read(self) -> dict[Key, Record]:
        records: dict[Key, Record] = {}
        for path in (self.directory / SAMPLES, *sorted(self.directory.glob(_SHARD_FILES))):
            if path.exists():
                records |= {record.key: record for record in read_records(path)}
        return records


def read_records(path: Path) -> list[Record]:
    """The answers of a samples file; a last line that was cut off by the end of its process is left out.

    Raises:
        DataError: another line is malformed.
    """
    records = []
    names = {field.name for field in fields(Record)}
    for n, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            values = json.loads(line)
            records.append(
                Record(**{k: v for k, v in values.items() if k in names} | {"answers": tuple(values["answers"])})
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}, line {n} is no answer ({error}); give another --output, or --restart") from None
    return records


def _cut_torn_line(path: Path) -> None:
    """Removes what follows the last line break."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _write_tables(files: ExitStack, path: Path, rows: Sequence[Any], kind: type) -> None:
    """The rows as JSON and as CSV beside it, both complete before either replaces an earlier one."""
    listed = [asdict(row) for row in rows]
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, [field.name for field in fields(kind)], lineterminator="\n")
    table.writeheader()
    table.writerows(listed)
    text = json.dumps(listed, indent=2, ensure_ascii=False) + "\n"
    files.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    files.enter_context(replacing(path.with_suffix(".csv"))).write_text(buffer.getvalue(), encoding="utf-8")
