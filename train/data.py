"""Data modules: documents to batches of token ids.

A source is a subclass of `TextDataModule` that says where documents come from; tokenising, cutting, the held-out
split, shuffling and resuming are here once.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from sekv.corpus import builtin_code, builtin_english, is_held_out
from sekv.errors import DataError

_SUFFIXES = (".txt", ".jsonl")
_TOKENISE_AT_ONCE = 64  # documents handed to the tokenizer in one call


def cut_to_sequences(
    documents: Iterable[Sequence[int]], length: int, min_length: int, separator: int
) -> Iterator[list[int]]:
    """Turns tokenised documents into training sequences.

    A document longer than `length` is cut into pieces; a shorter one stays whole; documents below `min_length` are
    joined, with a separator between them, until they fill a sequence. What is left below `min_length` is dropped.

    Args:
        documents: token ids.
        length: longest sequence in tokens.
        min_length: shortest sequence in tokens.
        separator: token id between joined documents.

    Yields:
        Sequences of `min_length` to `length` tokens.
    """
    joined: list[int] = []
    for document in documents:
        if len(document) >= min_length:
            for start in range(0, len(document), length):
                if len(piece := document[start : start + length]) >= min_length:
                    yield list(piece)
            continue
        joined += [separator, *document] if joined else document
        if len(joined) >= length:
            yield joined[:length]
            joined = []
    if len(joined) >= min_length:
        yield joined


class BatchStream(Sampler[list[int]]):
    """Batches of indices, freshly shuffled every epoch, from any position on, split over ranks.

    With the same global batch, W ranks see together what one process sees: rank r takes every W-th index from r on.

    Args:
        size: number of sequences.
        batch_size: sequences per batch and rank.
        seed: of the shuffle.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, size: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.position = 0  # batches delivered since the start of training

    def __len__(self) -> int:
        """Batches per epoch; what does not fill a batch on every rank is left for another shuffle."""
        return self.size // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from `position` to the end of its epoch; the loader moves `position`, not this."""
        epoch, first = divmod(self.position, len(self))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.size, generator=generator)
        share = self.batch_size * self.world_size
        for batch in range(first, len(self)):
            yield order[batch * share : (batch + 1) * share][self.rank :: self.world_size].tolist()


class ResumableLoader(DataLoader[list[int]]):
    """A data loader whose position is part of the checkpoint: Lightning saves and restores it.

    Args:
        sequences: token ids of each sequence.
        stream: the order; its position counts the batches handed out, not those prefetched by workers.
        kwargs: passed on to `DataLoader`.
    """

    def __init__(self, sequences: Sequence[list[int]], stream: BatchStream, **kwargs: Any) -> None:
        super().__init__(sequences, batch_sampler=stream, **kwargs)  # type: ignore[arg-type]
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from the saved position on."""
        for batch in super().__iter__():
            self.stream.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self.stream.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a saved position."""
        self.stream.position = state["position"]


def collate(sequences: Sequence[Sequence[int]], pad: int = 0) -> dict[str, Tensor]:
    """Pads sequences on the left: `input_ids` and `attention_mask` [B, N], both int64."""
    size = max(map(len, sequences))
    ids = torch.full((len(sequences), size), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, size - len(sequence) :] = torch.tensor(sequence)
        mask[row, size - len(sequence) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


class TextDataModule(LightningDataModule):
    """Documents as training and validation batches of token ids.

    A subclass names its texts in `sources`. One document in ten, chosen by a hash of its text, is held out for
    validation.

    Args:
        length: longest sequence in tokens, at most the backbone's positions.
        min_length: shortest sequence in tokens; shorter documents are joined. The smallest budget decides how short it
            may be.
        batch_size: sequences per step and process.
        val_sequences: held-out sequences to validate on; 0 switches validation off.
        max_documents: documents taken from each source, chosen at random; all when None.
        num_workers: processes that collate batches.
        seed: of the choice and order of documents.
    """

    def __init__(
        self,
        length: int = 2048,
        min_length: int = 1536,
        batch_size: int = 1,
        val_sequences: int = 8,
        max_documents: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= min_length <= length:
            raise DataError(f"need 1 <= data.min_length <= data.length, got {min_length} and {length}")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("val_sequences", val_sequences, 0),
            ("max_documents", max_documents, 1),
            ("num_workers", num_workers, 0),
        ):
            if value is not None and value < least:
                raise DataError(f"need data.{name} >= {least}, got {value}")
        self.length, self.min_length, self.batch_size = length, min_length, batch_size
        self.val_sequences, self.max_documents = val_sequences, max_documents
        self.num_workers, self.seed = num_workers, seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._splits: dict[bool, list[list[int]]] | None = None

    @abstractmethod
    def sources(self) -> Mapping[str, Iterable[str]]:
        """Documents by source, before the held-out split.

        Raises:
            DataError: a source is missing, unreadable or empty.
        """

    def sequences(self, held_out: bool) -> list[list[int]]:
        """Token ids of the training or the held-out sequences, sources taken in turn.

        Raises:
            DataError: there is no tokenizer, or no sequence.
        """
        if self._splits is None:
            self._splits = self._tokenise()
        return self._splits[held_out]

    def _tokenise(self) -> dict[bool, list[list[int]]]:
        tokenizer = self._find_tokenizer()
        separator = next((i for i in (tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None), 0)
        splits: dict[bool, list[list[list[int]]]] = {False: [], True: []}
        for texts in self.sources().values():
            for held_out in (False, True):
                if held_out and not self.val_sequences:
                    continue
                chosen = self._choose([text for text in texts if is_held_out(text) == held_out])
                documents = chain.from_iterable(
                    tokenizer(chosen[i : i + _TOKENISE_AT_ONCE], add_special_tokens=False)["input_ids"]
                    for i in range(0, len(chosen), _TOKENISE_AT_ONCE)
                )
                splits[held_out].append(list(cut_to_sequences(documents, self.length, self.min_length, separator)))
        result = {held_out: _in_turn(lists) for held_out, lists in splits.items()}
        result[True] = result[True][: self.val_sequences]
        if self.val_sequences and not result[True]:
            raise DataError(
                f"no held-out sequence of at least {self.min_length} tokens: one document in ten is held out, and "
                "those here are too few or too short; add documents, lower data.min_length, or set data.val_sequences=0"
            )
        return result

    def _find_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None and self.trainer is not None:
            self.tokenizer = getattr(getattr(self.trainer.lightning_module, "backbone", None), "tokenizer", None)
        if self.tokenizer is None:
            raise DataError("the backbone has no tokenizer; copy its tokenizer.json into the backbone's folder")
        return self.tokenizer

    def _choose(self, texts: list[str]) -> list[str]:
        if self.max_documents is None or len(texts) <= self.max_documents:
            return texts
        picked = random.Random(self.seed).sample(range(len(texts)), self.max_documents)
        return [texts[i] for i in sorted(picked)]

    def warm_start_sequences(self, count: int) -> list[list[int]]:
        """Up to `count` training sequences in a random order fixed by the seed, the same on every rank."""
        sequences = self.sequences(held_out=False)
        return random.Random(self.seed).sample(sequences, min(count, len(sequences)))

    def train_dataloader(self) -> ResumableLoader:
        """Training batches, shuffled, resumable.

        Raises:
            DataError: there is too little text for one batch on every process, or none is held out.
        """
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        sequences = self.sequences(held_out=False)
        if len(sequences) < self.batch_size * world_size:
            raise DataError(
                f"the training documents make {len(sequences)} sequences of {self.min_length} to {self.length} tokens, "
                f"too few for a batch of {self.batch_size} on each of {world_size} process(es); add text, or lower "
                "data.min_length or data.batch_size"
            )
        stream = BatchStream(len(sequences), self.batch_size, self.seed, rank, world_size)
        return ResumableLoader(sequences, stream, collate_fn=collate, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Held-out batches in a fixed order; none when `val_sequences` is 0."""
        if not self.val_sequences:
            return []
        return DataLoader(self.sequences(held_out=True), batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]


def _in_turn(lists: list[list[list[int]]]) -> list[list[int]]:
    return [item for group in zip_longest(*lists) for item in group if item is not None]


class BuiltinCorpus(TextDataModule):
    """The documentation topics and source files of the Python that runs the training: English and code, no download.

    Args:
        kinds: `english`, `code`, or both.
        kwargs: options of every data module.
    """

    readers: ClassVar[dict[str, Callable[[], list[str]]]] = {"english": builtin_english, "code": builtin_code}

    def __init__(self, kinds: tuple[str, ...] = ("english", "code"), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        unknown = [kind for kind in kinds if kind not in self.readers]
        if unknown or not kinds:
            raise DataError(f"data.kinds are some of {', '.join(self.readers)}, got '{', '.join(unknown)}'")
        self.kinds = kinds

    def sources(self) -> dict[str, list[str]]:
        """One source for each kind."""
        return {kind: self.readers[kind]() for kind in self.kinds}


class LocalFiles(TextDataModule):
    """Text files (.txt, one document each) and JSON lines (.jsonl, one document a line), or folders of them.

    Args:
        paths: files or folders.
        column: key of the text in JSON lines.
        kwargs: options of every data module.
    """

    def __init__(self, paths: list[str], column: str = "text", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.files = [file for path in paths for file in _text_files(Path(path).expanduser())]
        self.column = column

    def sources(self) -> dict[str, list[str]]:
        """All files as one source."""
        return {"files": list(chain.from_iterable(self._read(file) for file in self.files))}

    def _read(self, file: Path) -> Iterator[str]:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from None
        if file.suffix == ".txt":
            yield text
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield self._document(line, f"{file}, line {number}")

    def _document(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error})") from None
        text = record.get(self.column) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{where}: no text under '{self.column}' (found: {keys}); set data.column to the right key")
        return text


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise DataError(f"{path} holds no {' or '.join(_SUFFIXES)} file")
        return files
    if not path.is_file():
        raise DataError(f"{path} does not exist; give .txt or .jsonl files, or folders of them")
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path} is neither {' nor '.join(_SUFFIXES)}")
    return [path]
