"""What could not be used of the data: counted, reported, skipped; too much of it stops the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sekv.errors import DataError

MAX_SHARE = 0.01  # of records or files that may be unusable
MIN_RECORDS = 200  # records read before their share is judged in the middle of a pass


class UnreadableFileError(Exception):
    """A file that cannot be opened or breaks off; the message says why."""


class CorruptRecordError(Exception):
    """A record that cannot be parsed; the message says why."""


class TextlessRecordError(Exception):
    """A record without text under the column; the message says what it holds."""


@dataclass(frozen=True)
class Tally:
    """What was read, and what of it could not be used.

    Attributes:
        records: lines, rows or text files read.
        corrupt: of these, not parseable.
        textless: of these, without text.
        short: documents shorter than what is asked for; no fault.
        files: files that cannot be read.
        last: the latest fault, with its place.
    """

    records: int = 0
    corrupt: int = 0
    textless: int = 0
    short: int = 0
    files: tuple[str, ...] = ()
    last: str = ""

    def count(self, name: str, last: str | None = None) -> Tally:
        """One more of `records`, `corrupt`, `textless` or `short`."""
        return replace(self, **{name: getattr(self, name) + 1}, last=self.last if last is None else last)

    def with_file(self, file: str, why: str) -> Tally:
        """One more unreadable file; a file met again in a later pass counts once."""
        files = self.files if file in self.files else (*self.files, file)
        return replace(self, files=files, last=f"{file} cannot be read: {why}")

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {**asdict(self), "files": list(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        """The tally that `state` came from."""
        return cls(**{**state, "files": tuple(state["files"])})

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """All of them together."""
        tallies = list(tallies)
        counts = {f.name: sum(getattr(tally, f.name) for tally in tallies) for f in fields(cls) if f.type == "int"}
        files = sorted({file for tally in tallies for file in tally.files})
        return cls(**counts, files=tuple(files), last=next((t.last for t in reversed(tallies) if t.last), ""))

    def check(self, n_files: int, complete: bool) -> None:
        """Stops where too much is unusable.

        Args:
            n_files: files there are.
            complete: everything has been read once, so the share is exact however few the records are.

        Raises:
            DataError: more than 1% of the records or of the files; names the latest.
        """
        bad = self.corrupt + self.textless
        if bad > MAX_SHARE * self.records and (complete or self.records >= MIN_RECORDS):
            raise DataError(
                f"{bad} of {self.records} records are unusable ({self.corrupt} corrupt, {self.textless} without text), "
                f"more than {MAX_SHARE:.0%}; the latest: {self.last}"
            )
        if len(self.files) > MAX_SHARE * n_files:
            raise DataError(
                f"{len(self.files)} of {n_files} files cannot be read, more than {MAX_SHARE:.0%}; the latest: "
                f"{self.last}"
            )

    def describe(self) -> str:
        """One line for people."""
        line = (
            f"data: {self.records:,} records read, {self.corrupt:,} corrupt, {self.textless:,} without text, "
            f"{self.short:,} too short, {len(self.files):,} files unreadable"
        )
        return f"{line}; the latest fault: {self.last}" if self.last else line
