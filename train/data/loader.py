"""The training loader: streams to batches, over ranks and workers, with its place in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sekv.errors import DataError, SeKVError
from train.curriculum import Curriculum
from train.data.faults import Tally
from train.data.sequences import TokenIds, collate
from train.data.stream import Stream


class Drawn(NamedTuple):
    """A sequence on its way from a worker.

    Attributes:
        ids: token ids; None when reading failed.
        stream: where it comes from.
        state: the stream's state behind it.
        tally: what the stream has read so far.
        complete: the stream has been read to its end once.
        error: why reading failed.
    """

    ids: TokenIds | None
    stream: int = 0
    state: Mapping[str, Any] | None = None
    tally: Tally = Tally()
    complete: bool = False
    error: str = ""


class Sequences(IterableDataset[Drawn]):
    """One rank's sequences, in order; each worker draws every W-th of them.

    Args:
        streams: all V streams.
        curriculum: says how long each sequence is.
        rank: this process.
        world_size: number of processes.
        first: this rank's first sequence.
    """

    def __init__(
        self, streams: Sequence[Stream], curriculum: Curriculum, rank: int, world_size: int, first: int
    ) -> None:
        self.streams, self.curriculum = streams, curriculum
        self.rank, self.world_size, self.first = rank, world_size, first

    def __iter__(self) -> Iterator[Drawn]:
        """Endless."""
        worker = get_worker_info()
        if worker is not None:
            for stream in self.streams:  # a forked process shares its parent's place in open files
                stream.close()
        skip, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        try:
            for i in count(self.first + skip, step):
                yield self._draw(i * self.world_size + self.rank)
        except SeKVError as error:  # raised again by the loader: a worker would wrap it in its traceback
            yield Drawn(None, error=str(error))

    def _draw(self, number: int) -> Drawn:
        """The sequence of a number counted over all ranks."""
        index, which = divmod(number, len(self.streams))
        stream = self.streams[which]
        while True:  # what others draw from a shared stream is drawn here too, and dropped
            now = stream.index * len(self.streams) + which
            ids = stream.draw(self.curriculum.at_sequence(now // self.world_size))
            if stream.index > index:
                return Drawn(ids, which, stream.state(), stream.tally, stream.complete)


class StreamLoader:
    """Batches of one rank. Lightning saves and restores its place.

    Args:
        streams: all V streams; the rank draws from its own.
        curriculum: stages.
        steps: optimiser steps of the run.
        n_files: files there are, of which few may be unreadable.
        rank: this process.
        world_size: number of processes.
        num_workers: processes that read and tokenise.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        curriculum: Curriculum,
        *,
        steps: int,
        n_files: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        self.streams, self.curriculum, self.steps = streams, curriculum, steps
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self.n_files = n_files
        self.batches = 0  # handed out since the start of training, not those prefetched by workers
        self._states: list[Mapping[str, Any]] = [stream.state() for stream in streams]
        self._read: dict[int, tuple[Tally, bool]] = {}

    def __len__(self) -> int:
        """Batches of the run and one more, so that for Lightning no epoch ends before the run does."""
        return self.curriculum.batches_before(self.steps) + 1

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches from the saved place on.

        Raises:
            DataError: a source is exhausted without a sequence, or too much of the data is unusable.
        """
        first = self.curriculum.sequences_before_batch(self.batches)
        sequences = Sequences(self.streams, self.curriculum, self.rank, self.world_size, first)
        options: dict[str, Any] = {"batch_size": None, "collate_fn": _as_is, "num_workers": self.num_workers}
        loader: DataLoader[Drawn] = DataLoader(sequences, **options)
        items = iter(loader)
        while True:
            drawn = []
            for _ in range(self.curriculum.at_batch(self.batches).batch_size):
                drawn.append(item := next(items))
                self._remember(item)
            self.tally.check(self.n_files, complete=all(complete for _, complete in self._read.values()))
            self.batches += 1
            yield collate([item.ids for item in drawn])

    def _remember(self, item: Drawn) -> None:
        if item.state is None:
            raise DataError(item.error)
        self._states[item.stream] = item.state
        self._read[item.stream] = (item.tally, item.complete)

    @property
    def tally(self) -> Tally:
        """What this rank has read."""
        return Tally.total(tally for tally, _ in self._read.values())

    def state_dict(self) -> dict[str, Any]:
        """The place of every stream; of several ranks, each adds its own, so all must call this."""
        states = [self._states]
        if self.world_size > 1 and torch.distributed.is_initialized():
            states = [[] for _ in range(self.world_size)]
            torch.distributed.all_gather_object(states, self._states)
        # Ranks that share a stream draw the same sequences from it: the furthest has seen what the others have.
        furthest = [max(stream, key=lambda state: state["index"]) for stream in zip(*states, strict=True)]
        return {"batches": self.batches, "n_files": self.n_files, "streams": furthest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a saved place, also with another number of ranks or workers.

        Raises:
            DataError: the data are dealt to another number of streams, or there are other files.
        """
        for name, then, now in (
            ("streams (data.streams)", len(state["streams"]), len(self.streams)),
            ("sources", len(state["streams"][0]["parts"]), len(self.streams[0].parts)),
            ("files", state["n_files"], self.n_files),
        ):
            if then != now:
                raise DataError(
                    f"the checkpoint's place in the data counts {then} {name}, now there are {now}; give the data and "
                    "settings of its run, which are in its config.yaml"
                )
        self.batches, self._states = state["batches"], list(state["streams"])
        for stream, saved in zip(self.streams, self._states, strict=True):
            stream.restore(saved)


def _as_is(item: Drawn) -> Drawn:
    return item
