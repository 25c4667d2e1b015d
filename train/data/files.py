"""Records of text files, local or remote, plain or compressed, from any position on.

A position is a byte offset in the uncompressed content (JSON lines), a row (parquet) or 0 and 1 (a text file, one
document), so a resumed run goes on at a record without reading what lies before it, where the file can seek.
`datasets`' json builder is not used to read: it gives up a whole file for one broken line and cannot start inside one.
"""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import fsspec

from train.data.faults import CorruptRecordError, TextlessRecordError, UnreadableFileError

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".txt", *_LINES, ".parquet")
_MAX_WINDOW = 2**31  # bytes; corpora are often packed with zstd's long-distance matching
_RETRIES = 5  # of a remote file that breaks off, each from where it broke
_RETRY_SECONDS = 1.0  # before the first retry, doubled each time
_CHUNK = 1 << 20  # bytes


class RawRecord(NamedTuple):
    """A record before it is parsed.

    Attributes:
        end: position behind it.
        content: bytes, or the text itself where there is nothing to parse.
    """

    end: int
    content: bytes | str | None


class TextSource(Protocol):
    """Records in a fixed order."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def read(self, start: int) -> Iterator[RawRecord]:
        """Records from a position on.

        Raises:
            UnreadableFileError: the file is missing, or breaks off.
        """

    def parse(self, content: bytes | str | None) -> str:
        """The text of a record.

        Raises:
            CorruptRecordError: it cannot be parsed.
            TextlessRecordError: it holds no text.
        """


@dataclass(frozen=True)
class Texts:
    """Documents in memory.

    Attributes:
        name: what messages call them.
        texts: the documents.
    """

    name: str
    texts: Sequence[str]

    def read(self, start: int) -> Iterator[RawRecord]:
        """Documents from number `start` on."""
        for i in range(start, len(self.texts)):
            yield RawRecord(i + 1, self.texts[i])

    def parse(self, content: bytes | str | None) -> str:
        """The document itself."""
        assert isinstance(content, str)
        return content


@dataclass(frozen=True)
class TextFile:
    """A .txt, .jsonl (.json, .ndjson) or .parquet file; all but parquet may be packed as .gz, .zst, .bz2 or .xz.

    Attributes:
        name: a path, or an address that fsspec knows (file://, https://, hf://, s3://, ...).
        column: key or column of the text.
    """

    name: str
    column: str = "text"

    def read(self, start: int) -> Iterator[RawRecord]:
        """Records from a position on; a remote file that breaks off is opened again where it broke.

        Raises:
            UnreadableFileError: the file is missing, or breaks off.
        """
        remote = urlsplit(self.name).scheme not in ("", "file")
        tries = 0
        while True:
            try:
                for record in self._read(start):
                    yield record
                    start, tries = record.end, 0
                return
            except FileNotFoundError:
                raise UnreadableFileError("there is no such file") from None
            except Exception as error:  # each of the formats and file systems breaks in its own way
                if not remote or tries == _RETRIES:
                    raise UnreadableFileError(_reason(error)) from None
                time.sleep(_RETRY_SECONDS * 2**tries)
                tries += 1

    def _read(self, start: int) -> Iterator[RawRecord]:
        kind = suffix(self.name)
        if kind == ".parquet":
            yield from self._rows(start)
        elif kind == ".txt":
            if start == 0:
                with closing(_open(self.name)) as file:
                    yield RawRecord(1, file.read())
        else:
            yield from self._lines(start)

    def _lines(self, start: int) -> Iterator[RawRecord]:
        with closing(_open(self.name)) as file, io.BufferedReader(file, _CHUNK) as lines:
            _skip_to(file, start)
            for line in lines:
                start += len(line)
                if not line.isspace():
                    yield RawRecord(start, line)

    def _rows(self, start: int) -> Iterator[RawRecord]:
        from pyarrow import parquet

        with closing(fsspec.open(self.name, "rb").open()) as file:
            table = parquet.ParquetFile(file)
            if self.column not in table.schema_arrow.names:
                found = ", ".join(table.schema_arrow.names)
                raise UnreadableFileError(f"no column '{self.column}' (found: {found}); set data.column")
            first = 0
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                if first + count > start:
                    column = table.read_row_group(group, columns=[self.column]).column(0)
                    for i in range(max(0, start - first), count):
                        value = column[i].as_py()
                        yield RawRecord(first + i + 1, value if isinstance(value, str) else None)
                first += count

    def parse(self, content: bytes | str | None) -> str:
        """The text of a record.

        Raises:
            CorruptRecordError: neither UTF-8 nor JSON.
            TextlessRecordError: nothing, or no text, under the column.
        """
        if isinstance(content, bytes):
            try:
                text = content.decode("utf-8")
                value = text if suffix(self.name) == ".txt" else json.loads(text)
            except UnicodeDecodeError as error:
                raise CorruptRecordError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
            except (json.JSONDecodeError, RecursionError) as error:
                raise CorruptRecordError(f"not valid JSON ({error})") from None
        else:
            value = content
        return self._text(value)

    def _text(self, value: Any) -> str:
        if isinstance(value, dict):
            if not isinstance(value.get(self.column), str):
                found = ", ".join(value)
                raise TextlessRecordError(
                    f"no text under '{self.column}' (found: {found}); set data.column to the right key"
                )
            value = value[self.column]
        if not isinstance(value, str):
            raise TextlessRecordError(f"no text under '{self.column}' (found: {type(value).__name__})")
        if not value.strip():
            raise TextlessRecordError("the text is empty")
        return value


def suffix(name: str) -> str:
    """What kind of file a path or an address names, without its compression, such as `.jsonl`."""
    path = PurePosixPath(urlsplit(name).path if "://" in name else name)
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def _open(name: str) -> Any:
    """The uncompressed content as a raw binary file."""
    if not name.lower().endswith(".zst"):
        return fsspec.open(name, "rb", compression="infer").open()
    import zstandard

    # fsspec would stop behind the first frame; files that were packed in parallel have many.
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    return reader.stream_reader(fsspec.open(name, "rb", compression=None).open(), read_across_frames=True)


def _skip_to(file: Any, start: int) -> None:
    """Moves to a byte offset, by reading where the file cannot seek."""
    if not start:
        return
    try:
        file.seek(start)
    except (OSError, ValueError):
        left = start - file.tell()
        while left > 0 and (piece := file.read(min(left, _CHUNK))):
            left -= len(piece)


def _reason(error: Exception) -> str:
    if isinstance(error, UnreadableFileError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, EOFError | zlib.error):
        return f"it is truncated or damaged ({error})"
    return " ".join(f"{type(error).__name__}: {error}".split())
