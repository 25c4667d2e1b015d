"""Corpora that are streamed: RedPajama from its published file lists, and datasets of the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec

from sekv.errors import DataError
from train.data.base import TextDataModule
from train.data.files import TextFile
from train.data.local import check_kind
from train.data.stream import Source

_V1 = "https://data.together.xyz/redpajama-data-1T/v1.0.0/urls.txt"
_V2 = "https://data.together.xyz/redpajama-data-v2/v1.0.0"


class RedPajama(TextDataModule):
    """RedPajama-1T, streamed from the files that its list names; the Hub's loading script is not needed.

    Args:
        subsets: how often a sequence comes from each, such as {arxiv: 1, book: 1, github: 1}.
        file_list: path or address of the list, one file in a line; a file belongs to the subset its folder is named
            for. The default is the published list; a list of local copies works as well.
        kwargs: options of every data module; here only documents at least as long as the stage are used unless
            `min_document` says otherwise.
    """

    def __init__(
        self,
        subsets: dict[str, float] | None = None,
        file_list: str = _V1,
        min_document: int | None = None,
        shuffle_buffer: int = 256,
        streams: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(min_document=min_document, shuffle_buffer=shuffle_buffer, streams=streams, **kwargs)
        self.subsets = subsets or {"arxiv": 1.0, "book": 1.0, "github": 1.0}
        if min(self.subsets.values()) <= 0:
            raise DataError(f"data.subsets needs weights above 0, got {self.subsets}")
        self.file_list = file_list

    def sources(self) -> list[Source]:
        """One source for each subset."""
        by_folder: dict[str, list[str]] = {}
        for name in read_list(self.file_list):
            by_folder.setdefault(name.rsplit("/", 2)[-2] if "/" in name else "", []).append(check_kind(name))
        lacking = [subset for subset in self.subsets if subset not in by_folder]
        if lacking:
            raise DataError(
                f"{self.file_list} has no files of {', '.join(lacking)} (it has {', '.join(sorted(by_folder))}); leave "
                "them out of data.subsets, or give a data.file_list of your copies"
            )
        return [
            Source(subset, [TextFile(name) for name in by_folder[subset]], weight, self.max_documents)
            for subset, weight in self.subsets.items()
        ]


class RedPajamaV2(TextDataModule):
    """RedPajama-V2 web text, streamed from its published listings.

    Args:
        snapshots: crawls, such as 2023-06.
        language: en, de, fr, es or it.
        partition: head_middle or tail.
        base: address or folder that holds `listings` and `documents`.
        kwargs: options of every data module, with those of `RedPajama` for streaming.
    """

    def __init__(
        self,
        snapshots: list[str],
        language: str = "en",
        partition: str = "head_middle",
        base: str = _V2,
        min_document: int | None = None,
        shuffle_buffer: int = 256,
        streams: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(min_document=min_document, shuffle_buffer=shuffle_buffer, streams=streams, **kwargs)
        if not snapshots:
            raise DataError("data.snapshots is empty; give at least one, such as 2023-06")
        self.snapshots, self.language, self.partition = snapshots, language, partition
        self.base = base.rstrip("/")

    def sources(self) -> list[Source]:
        """All snapshots as one source."""
        listings = [f"{self.base}/listings/{self.language}-{s}-{self.partition}.txt" for s in self.snapshots]
        names = [name for listing in listings for name in read_list(listing)]
        files = [TextFile(f"{self.base}/documents/{name}.json.gz", "raw_content") for name in names]
        return [Source("redpajama-v2", files, max_documents=self.max_documents)]


class HubDataset(TextDataModule):
    """Any dataset of the Hub, or a folder laid out as one, that keeps text in JSON lines, parquet or text files.

    Args:
        path: Hub id, such as HuggingFaceFW/fineweb, or a folder.
        config: its configuration, where it has several.
        split: which of its splits.
        column: the text's column.
        kwargs: options of every data module, with those of `RedPajama` for streaming.
    """

    def __init__(
        self,
        path: str,
        config: str | None = None,
        split: str = "train",
        column: str = "text",
        min_document: int | None = None,
        shuffle_buffer: int = 256,
        streams: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(min_document=min_document, shuffle_buffer=shuffle_buffer, streams=streams, **kwargs)
        self.path, self.dataset_config, self.split, self.column = path, config, split, column

    def sources(self) -> list[Source]:
        """The files that `datasets` finds for the split."""
        from datasets import load_dataset_builder

        try:
            found = load_dataset_builder(self.path, self.dataset_config).config.data_files
        except Exception as error:  # no network, no such dataset, a script, an unknown configuration, ...
            raise DataError(f"the dataset '{self.path}' cannot be opened: {' '.join(str(error).split())}") from None
        if self.split not in (found or {}):
            raise DataError(f"'{self.path}' has no split '{self.split}' (it has {', '.join(map(str, found or {}))})")
        files = [TextFile(check_kind(str(name)), self.column) for name in found[self.split]]
        return [Source(self.path, files, max_documents=self.max_documents)]


def read_list(name: str) -> Sequence[str]:
    """The lines of a list of files.

    Raises:
        DataError: it cannot be read, or is empty.
    """
    try:
        with fsspec.open(name, "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
    except Exception as error:  # each file system has its own
        raise DataError(
            f"the list of files {name} cannot be read: {type(error).__name__}: {error}; is there a network? A local "
            "copy of the list works as well"
        ) from None
    if not lines:
        raise DataError(f"the list of files {name} is empty")
    return lines
