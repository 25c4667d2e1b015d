"""Text that is here: the Python that runs the training, and files and folders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from sekv.corpus import builtin_code, builtin_english, is_held_out
from sekv.errors import DataError
from train.data.base import TextDataModule
from train.data.files import SUFFIXES, TextFile, Texts, suffix
from train.data.stream import Source

_KINDS = ", ".join(SUFFIXES)


class BuiltinCorpus(TextDataModule):
    """The documentation topics and source files of the Python that runs the training: English and code, no download.

    Args:
        kinds: `english`, `code`, or both. `max_documents` are chosen at random from each.
        kwargs: options of every data module.
    """

    readers: ClassVar[dict[str, Callable[[], list[str]]]] = {"english": builtin_english, "code": builtin_code}

    def __init__(self, kinds: tuple[str, ...] = ("english", "code"), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        unknown = [kind for kind in kinds if kind not in self.readers]
        if unknown or not kinds:
            raise DataError(f"data.kinds are some of {', '.join(self.readers)}, got '{', '.join(unknown)}'")
        self.kinds = kinds

    def sources(self) -> list[Source]:
        """One source: it is small enough to be shuffled as a whole, whatever the kind."""
        lists = [self._choose(self.readers[kind]()) for kind in self.kinds]
        texts = [text for group in zip_longest(*lists) for text in group if text is not None]
        return [Source("builtin", [Texts("the built-in corpus", texts)])]

    def _choose(self, texts: list[str]) -> list[str]:
        """At most `max_documents` for training and as many held out, in their order: neighbours continue each other."""
        if self.max_documents is None:
            return texts
        chosen: list[int] = []
        for held_out in (False, True):
            candidates = [i for i, text in enumerate(texts) if is_held_out(text) == held_out]
            chosen += random.Random(self.seed).sample(candidates, min(self.max_documents, len(candidates)))
        return [texts[i] for i in sorted(chosen)]


class LocalFiles(TextDataModule):
    """Text files (.txt, one document each), JSON lines (.jsonl, .json, .ndjson) and .parquet, or folders of them.

    All but parquet may be packed as .gz, .zst, .bz2 or .xz. An address that fsspec knows, such as https://..., will do
    as well as a path.

    Args:
        paths: files, folders or addresses of files.
        weights: how often a sequence comes from each of `paths`; when not given, from all files alike.
        column: key or column of the text.
        kwargs: options of every data module.
    """

    def __init__(
        self, paths: list[str], weights: list[float] | None = None, column: str = "text", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if weights is not None and (len(weights) != len(paths) or min(weights, default=0) <= 0):
            raise DataError(
                f"data.weights needs a number above 0 for each of the {len(paths)} data.paths, got {weights}"
            )
        if not paths:
            raise DataError("data.paths is empty; give files or folders")
        self.column, self.weights = column, weights
        self.files = [_text_files(path) for path in paths]
        self.paths = paths

    def sources(self) -> list[Source]:
        """All files as one source, or one for each weighted path."""
        if self.weights is None:
            return [self._source("files", [file for files in self.files for file in files], 1.0)]
        return [self._source(*args) for args in zip(self.paths, self.files, self.weights, strict=True)]

    def _source(self, name: str, files: Sequence[str], weight: float) -> Source:
        return Source(name, [TextFile(file, self.column) for file in files], weight, self.max_documents)


def _text_files(path: str) -> list[str]:
    """The file, or the files of a folder.

    Raises:
        DataError: there is none.
    """
    if urlsplit(path).scheme not in ("", "file"):
        return [check_kind(path)]
    place = Path(path.removeprefix("file://")).expanduser()
    if place.is_dir():
        files = sorted(str(file) for file in place.rglob("*") if suffix(str(file)) in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{place} holds no file of a known kind ({_KINDS})")
        return files
    if not place.is_file():
        raise DataError(f"{place} does not exist; give files ({_KINDS}), or folders of them")
    return [check_kind(str(place))]


def check_kind(name: str) -> str:
    """The name itself.

    Raises:
        DataError: files of its kind cannot be read.
    """
    if suffix(name) not in SUFFIXES:
        raise DataError(f"{name} is of no known kind ({_KINDS}, packed or not)")
    return name
