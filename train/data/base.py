"""What all data modules share: options, the held-out split, validation and the training loader.

A source of text is a subclass of `TextDataModule` that says which files there are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from train.curriculum import Curriculum, Stage
from train.data.faults import Tally
from train.data.loader import StreamLoader
from train.data.sequences import TokenIds, collate
from train.data.stream import CutOptions, Part, Source, Stream, deal
from train.errors import ConfigError


class TextDataModule(LightningDataModule):
    """Documents as training and validation batches of token ids.

    A subclass names its files in `sources`. One document in ten, chosen by a hash of its text, is held out for
    validation.

    Args:
        length: longest sequence in tokens, at most the backbone's positions.
        min_length: shortest sequence in tokens; the smallest budget decides how short it may be.
        min_document: shorter documents, in tokens, are left out; those between this and min_length are joined. None
            leaves out whatever is shorter than min_length.
        batch_size: sequences per batch and process.
        curriculum: longer sequences from an optimiser step on, such as {1000: 16384, 2000: 32768}. The tokens per step
            stay what they are with `length`, and min_length grows in proportion. Validation keeps `length`.
        val_sequences: held-out sequences to validate on; 0 switches validation off.
        max_documents: training documents taken from each source in one pass over it; all when None.
        shuffle_buffer: sequences that are shuffled together, over all streams.
        streams: independent readers that the data are dealt to. The order of training depends on it, and on neither the
            number of processes nor that of workers; for speed it is a multiple of their product.
        num_workers: processes per rank that read and tokenise.
        seed: of the order of documents.
    """

    def __init__(
        self,
        length: int = 2048,
        min_length: int = 1536,
        min_document: int | None = 0,
        batch_size: int = 1,
        curriculum: dict[int, int] | None = None,
        val_sequences: int = 8,
        max_documents: int | None = None,
        shuffle_buffer: int = 2048,
        streams: int = 1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= min_length <= length:
            raise DataError(f"need 1 <= data.min_length <= data.length, got {min_length} and {length}")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("min_document", min_document, 0),
            ("val_sequences", val_sequences, 0),
            ("max_documents", max_documents, 1),
            ("shuffle_buffer", shuffle_buffer, 1),
            ("streams", streams, 1),
            ("num_workers", num_workers, 0),
        ):
            if value is not None and value < least:
                raise DataError(f"need data.{name} >= {least}, got {value}")
        self.length, self.min_length, self.min_document = length, min_length, min_document
        self.batch_size, self.later = batch_size, dict(curriculum or {})
        self.val_sequences, self.max_documents = val_sequences, max_documents
        self.shuffle_buffer, self.n_streams = shuffle_buffer, streams
        self.num_workers, self.seed = num_workers, seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._sources: list[Source] | None = None
        self._streams: list[Stream] | None = None
        self._loader: StreamLoader | None = None
        self._curriculum: Curriculum | None = None

    @abstractmethod
    def sources(self) -> Sequence[Source]:
        """Where documents come from, before the held-out split.

        Raises:
            DataError: a source is missing or empty.
        """

    @property
    def curriculum(self) -> Curriculum:
        """The stages of training.

        Raises:
            ConfigError: they do not keep the tokens per step.
        """
        if self._curriculum is None:  # made once: a later stage changes the trainer's accumulation
            accumulate = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
            self._curriculum = Curriculum(self.length, self.min_length, self.batch_size, accumulate, self.later)
        return self._curriculum

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any stage."""
        return max(self.length, *self.later.values()) if self.later else self.length

    @property
    def tally(self) -> Tally:
        """What training has read in this process."""
        return Tally() if self._loader is None else self._loader.tally

    def check(self) -> None:
        """Reads the first documents of every source: what is missing or too short for any stage is refused at once.

        Raises:
            DataError: there is too little text for a batch of some stage on every process, or none is held out.
            ConfigError: the curriculum does not keep the tokens per step.
        """
        for stage in self.curriculum.stages:
            needed = stage.batch_size * self._ranks[1]
            found = self._first(needed, stage, held_out=False)
            if len(found) < needed:
                raise DataError(
                    f"the training documents make {len(found)} sequences of {stage.min_length} to {stage.length} "
                    f"tokens, too few for a batch of {stage.batch_size} on each of {self._ranks[1]} process(es); add "
                    "text, or lower data.min_length, data.curriculum or data.batch_size"
                )
        if self.val_sequences:
            self.val_dataloader()

    def train_dataloader(self) -> StreamLoader:
        """Training batches, shuffled, endless, resumable.

        Raises:
            ConfigError: the number of steps is not known.
        """
        steps = 1 if self.trainer is None else self.trainer.max_steps
        if steps < 1:
            raise ConfigError(f"trainer.max_steps is {steps}, but the data have no end; set trainer.max_steps")
        rank, world_size = self._ranks
        self._loader = StreamLoader(
            self._make_streams(),
            self.curriculum,
            steps=steps,
            n_files=sum(len(source.files) for source in self._known_sources()),
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers,
        )
        return self._loader

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Held-out batches in a fixed order, on every process the same; none when `val_sequences` is 0.

        Raises:
            DataError: no held-out document is long enough.
        """
        if not self.val_sequences:
            return []
        found = self._first(self.val_sequences, self.curriculum.stages[0], held_out=True)
        if not found:
            raise DataError(
                f"no held-out sequence of at least {self.min_length} tokens: one document in ten is held out, and "
                "those here are too few or too short; add documents, lower data.min_length, or set data.val_sequences=0"
            )
        return DataLoader(found, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    def warm_start_sequences(self, count: int) -> list[TokenIds]:
        """The first `count` training sequences, the same on every rank; for use before the first step."""
        streams, stage = self._make_streams(), self.curriculum.stages[0]
        drawn = [streams[i % len(streams)].draw(stage) for i in range(count)]
        for stream in streams:  # training begins at the beginning
            stream.rewind()
        return drawn

    @property
    def _ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _known_sources(self) -> list[Source]:
        if self._sources is None:
            self._sources = list(self.sources())
        return self._sources

    def _find_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None and self.trainer is not None:
            self.tokenizer = getattr(getattr(self.trainer.lightning_module, "backbone", None), "tokenizer", None)
        if self.tokenizer is None:
            raise DataError("the backbone has no tokenizer; copy its tokenizer.json into the backbone's folder")
        return self.tokenizer

    def _make_streams(self) -> list[Stream]:
        """All streams at their beginning; what they have read is kept, as the first block serves several purposes."""
        if self._streams is None:
            options = CutOptions(self._find_tokenizer(), self.min_document)
            self._streams = [self._make_stream(v, options) for v in range(self.n_streams)]
        for stream in self._streams:
            stream.rewind()
        return self._streams

    def _make_stream(self, v: int, options: CutOptions) -> Stream:
        sources = self._known_sources()
        parts = [
            Part(
                deal(source.files, v, self.n_streams),
                options,
                block_size=-(-self.shuffle_buffer // self.n_streams),
                max_documents=None if source.max_documents is None else -(-source.max_documents // self.n_streams),
                seed=f"{self.seed} {v} {source.name}",
            )
            for source in sources
        ]
        return Stream(parts, [source.weight for source in sources], seed=f"{self.seed} {v}")

    def _first(self, count: int, stage: Stage, held_out: bool) -> list[TokenIds]:
        """Up to `count` sequences in the order of the files, sources in turn.

        Raises:
            DataError: too much of what was read is unusable.
        """
        options = CutOptions(self._find_tokenizer(), self.min_document, held_out)
        lists: list[list[TokenIds]] = []
        for source in self._known_sources():
            part = Part(deal(source.files, 0, 1), options, count, None if held_out else source.max_documents)
            lists.append(part.first(count, stage))
            part.tally.check(len(source.files), complete=part.end.passes > 0)
        return [item for group in zip_longest(*lists) for item in group if item is not None][:count]
