"""Endless, exactly resumable streams of training sequences.

The training data is dealt to V streams, each of which reads its own part of every source, pass after pass, and shuffles
it block by block: it reads until a block holds enough sequences, draws them in random order, and reads on. All that a
stream has to remember is where its block begins and how many sequences of it were drawn; a resumed stream reads the
block again. The n-th sequence of the run comes from stream n mod V whoever asks for it, so neither the number of
processes nor that of their workers changes what is trained on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from sekv.corpus import is_held_out
from sekv.errors import DataError
from train.curriculum import Stage
from train.data.faults import CorruptRecordError, Tally, TextlessRecordError, UnreadableFileError
from train.data.files import RawRecord, TextSource
from train.data.sequences import TokenIds, cut_to_sequences, separator_of, tokenise

_TOKENISE_TEXTS = 64  # handed to the tokenizer in one call, or fewer if they are long
_TOKENISE_CHARS = 1_000_000


@dataclass(frozen=True)
class Source:
    """Files that belong together.

    Attributes:
        name: what messages call it.
        files: in a fixed order.
        weight: how often sequences come from here, relative to the other sources.
        max_documents: documents used in one pass; all when None.
    """

    name: str
    files: Sequence[TextSource]
    weight: float = 1.0
    max_documents: int | None = None


@dataclass(frozen=True)
class CutOptions:
    """What becomes of a document.

    Attributes:
        tokenizer: makes token ids.
        min_document: shorter documents, in tokens, are left out; None: those shorter than a stage's shortest sequence.
        held_out: read the documents held out for validation, or those for training.
    """

    tokenizer: PreTrainedTokenizerBase
    min_document: int | None = 0
    held_out: bool = False


class Share(NamedTuple):
    """The part of a file that one stream reads: every `parts`-th record from `part` on."""

    file: TextSource
    part: int
    parts: int


class Position(NamedTuple):
    """A place between two records.

    Attributes:
        passes: passes over the part before this one.
        share: which of the part's files.
        start: position in that file.
        number: records of that file before it.
        used: documents used before it in this pass.
        found: sequences found before it in this pass.
    """

    passes: int = 0
    share: int = 0
    start: int = 0
    number: int = 0
    used: int = 0
    found: int = 0


def deal(files: Sequence[TextSource], stream: int, streams: int) -> list[Share]:
    """The shares of one of several streams: disjoint, and complete over all of them.

    Whole files where there are enough; where there are fewer than streams, several streams take turns in one file.
    """
    if len(files) >= streams:
        return [Share(file, 0, 1) for file in files[stream::streams]]
    first = stream % len(files)
    return [Share(files[first], stream // len(files), len(range(first, streams, len(files))))]


class Part:
    """One stream's part of one source.

    Args:
        shares: what it reads.
        options: what becomes of documents.
        block_size: sequences that are shuffled together.
        max_documents: documents used in one pass; all when None.
        seed: of the order of files and sequences; None keeps that of the files.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        options: CutOptions,
        block_size: int,
        max_documents: int | None = None,
        seed: str | None = None,
    ) -> None:
        self.shares, self.options, self.block_size = list(shares), options, block_size
        if seed is not None:
            random.Random(seed).shuffle(self.shares)
        self.max_documents, self.seed = max_documents, seed
        self.start, self.end = Position(), Position()  # of the block
        self.drawn = 0
        self.lengths = (0, 0)  # longest and shortest sequence of the block
        self.tally, self.tally_before = Tally(), Tally()  # now, and where the block begins
        self._block: list[TokenIds] | None = None  # in the order of the files
        self._order: list[int] = []
        self._reader: tuple[Position, Iterator[tuple[Position, str | None]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file, which two processes must not share."""
        return {**self.__dict__, "_reader": None}

    def close(self) -> None:
        """Lets go of the open file."""
        self._reader = None

    def draw(self, stage: Stage) -> TokenIds:
        """The next sequence.

        Raises:
            DataError: a whole pass holds no sequence.
        """
        lengths = (stage.length, stage.min_length)
        if self._block is None:  # fresh, or restored: a block that was begun is cut again as it was then
            self._read_block(self.lengths if self.drawn else lengths)
        if self.lengths != lengths:  # the rest of the last stage's block is skipped
            self._next_block(lengths)
        while self.drawn >= len(self._order):
            self._next_block(lengths)
        self.drawn += 1
        assert self._block is not None
        return self._block[self._order[self.drawn - 1]]

    def first(self, count: int, stage: Stage) -> list[TokenIds]:
        """The first sequences in the order of the files, at least `count` if there are as many."""
        block: list[TokenIds] = []
        while len(block) < count and not self.start.passes:
            self._read_block((stage.length, stage.min_length))
            block += self._block or []
            self.start = self.end
        return block

    def _next_block(self, lengths: tuple[int, int]) -> None:
        again = self.start == Position(self.start.passes) and self.end == Position(self.start.passes + 1)
        if self.drawn:
            self.start, self.drawn = self.end, 0
            self.tally_before = self.tally
        else:  # looked at and not begun
            self.tally, again = self.tally_before, False
        if again and self._block and self.lengths == lengths:  # all there is: only its order changes
            self.end = Position(self.start.passes + 1)
            self._shuffle()
        else:
            self._read_block(lengths)

    def _read_block(self, lengths: tuple[int, int]) -> None:
        """Reads from `start` on, at most to the end of the pass, and sets `end`."""
        block: list[TokenIds] = []
        at, self.lengths = self.start, lengths
        longest, shortest = lengths
        least = shortest if self.options.min_document is None else self.options.min_document
        most = sys.maxsize if self.max_documents is None else self.max_documents

        def documents() -> Iterator[list[int]]:
            nonlocal at
            for position, texts in self._batches(at, least):
                kept = [ids for ids in tokenise(self.options.tokenizer, texts) if len(ids) >= least]
                for _ in range(len(texts) - len(kept)):
                    self.tally = self.tally.count("short")
                kept = kept[: most - at.used]
                at = position._replace(used=at.used + len(kept))
                yield from kept
                if len(block) >= self.block_size or at.used >= most:
                    return

        for sequence in cut_to_sequences(documents(), longest, shortest, separator_of(self.options.tokenizer)):
            block.append(np.asarray(sequence, dtype=np.int32))
        at = at._replace(found=self.start.found + len(block))
        over = at.share >= len(self.shares) or at.used >= most
        if over and not at.found and self.seed is not None:
            names = ", ".join(share.file.name for share in self.shares[:3])
            raise DataError(
                f"{names}: no document makes a training sequence of {shortest} to {longest} tokens "
                f"({self.tally.describe()}); lower data.min_length, data.curriculum or data.streams, or add text"
            )
        self.end = Position(at.passes + 1) if over else at
        self._block = block
        self._shuffle()

    def _shuffle(self) -> None:
        self._order = list(range(len(self._block or [])))
        if self.seed is not None:
            random.Random(f"{self.seed} {list(self.start)}").shuffle(self._order)

    def _batches(self, at: Position, least: int) -> Iterator[tuple[Position, list[str]]]:
        """Texts of a few documents at a time, and the position behind them."""
        if self._reader is None or self._reader[0][:4] != at[:4]:
            self._reader = (at, self._read_pass(at))
        reader = self._reader[1]
        texts: list[str] = []
        chars = 0
        for position, text in reader:
            at = position
            if text is not None and is_held_out(text) == self.options.held_out:
                # A token is at least a byte, so most short documents are known without the tokenizer.
                if len(text) < least and len(text.encode("utf-8", errors="replace")) < least:
                    self.tally = self.tally.count("short")
                else:
                    texts.append(text)
                    chars += len(text)
            if len(texts) >= _TOKENISE_TEXTS or chars >= _TOKENISE_CHARS:
                self._reader = (at, reader)
                yield at, texts
                texts, chars = [], 0
        yield at, texts

    def _read_pass(self, at: Position) -> Iterator[tuple[Position, str | None]]:
        """Every record's text from a position to the end of the pass, None for what is another's or unusable."""
        for i in range(at.share, len(self.shares)):
            share = self.shares[i]
            start, number = (at.start, at.number) if i == at.share else (0, 0)
            try:
                for record in share.file.read(start):
                    mine = number % share.parts == share.part
                    number += 1
                    text = self._text(share.file, record, number) if mine else None
                    yield Position(at.passes, i, record.end, number), text
            except UnreadableFileError as error:
                self.tally = self.tally.with_file(share.file.name, str(error))
            yield Position(at.passes, i + 1), None

    def _text(self, file: TextSource, record: RawRecord, number: int) -> str | None:
        self.tally = self.tally.count("records")
        try:
            return file.parse(record.content)
        except (CorruptRecordError, TextlessRecordError) as error:
            kind = "corrupt" if isinstance(error, CorruptRecordError) else "textless"
            self.tally = self.tally.count(kind, f"{file.name}, record {number}: {error}")
            return None

    def state(self) -> dict[str, Any]:
        """Plain values from which `restore` goes on."""
        return {
            "start": list(self.start),
            "drawn": self.drawn,
            "lengths": list(self.lengths),
            "tally": self.tally_before.state(),
        }

    def rewind(self) -> None:
        """Back to the beginning; the first block is not read twice."""
        if self.start == Position() and self._block is not None:
            self.drawn = 0
        else:
            self.restore({"start": Position(), "drawn": 0, "lengths": (0, 0), "tally": Tally().state()})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.start, self.drawn, self.lengths = Position(*state["start"]), state["drawn"], tuple(state["lengths"])
        self.tally = self.tally_before = Tally.from_state(state["tally"])
        self.end = self.start
        self._block = self._reader = None


class Stream:
    """One of V streams over all sources.

    Args:
        parts: one for each source.
        weights: how often each is drawn from.
        seed: of the choice of source.
    """

    def __init__(self, parts: Sequence[Part], weights: Iterable[float], seed: str) -> None:
        self.parts, self.seed = parts, seed
        self._cumulative = list(accumulate(weights))
        self.index = 0  # sequences drawn

    def draw(self, stage: Stage) -> TokenIds:
        """The next sequence.

        Raises:
            DataError: a source holds no sequence.
        """
        part = self.parts[0]
        if len(self.parts) > 1:
            generator = random.Random(f"{self.seed} {self.index}")
            part = generator.choices(self.parts, cum_weights=self._cumulative)[0]
        self.index += 1
        return part.draw(stage)

    @property
    def tally(self) -> Tally:
        """What all parts have read."""
        return Tally.total(part.tally for part in self.parts)

    @property
    def complete(self) -> bool:
        """Every part has been read to its end once."""
        return all(part.end.passes for part in self.parts)

    def close(self) -> None:
        """Lets go of open files."""
        for part in self.parts:
            part.close()

    def state(self) -> dict[str, Any]:
        """Plain values from which `restore` goes on."""
        return {"index": self.index, "parts": [part.state() for part in self.parts]}

    def rewind(self) -> None:
        """Back to the beginning."""
        self.index = 0
        for part in self.parts:
            part.rewind()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.index = state["index"]
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.restore(saved)
