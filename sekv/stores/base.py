"""What every store has: an answer for queries, exact rows for tokens decoded after the context, and meters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.kernels import Floats

TAIL_BLOCK = 32  # tail tokens that leave together, so that rows rarely move


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind `tensors`, each storage counted once however many views look at it."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    # An empty storage may have the address of another one.
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


@dataclass
class Meter:
    """What a store did since its last reset. Rows count the compressed context only (method section 4).

    Attributes:
        queries: query tokens answered, times KV heads.
        rows: context rows those queries attended to, summed.
        moved_bytes: bytes brought from the host tier.
        wanted_rows: rows of spans on the host that single-token steps chose.
        reused_rows: those of them that an earlier step had left on the compute tier.
        ahead_rows: rows fetched before it was known that they are wanted.
        ahead_used_rows: those of them that were wanted.
    """

    queries: float = 0.0
    rows: float = 0.0
    moved_bytes: int = 0
    wanted_rows: int = 0
    reused_rows: int = 0
    ahead_rows: int = 0
    ahead_used_rows: int = 0

    @property
    def mean_rows(self) -> float:
        """Mean context rows attended per query token and KV head."""
        return self.rows / self.queries if self.queries else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the wanted rows that had not to be fetched."""
        return self.reused_rows / self.wanted_rows if self.wanted_rows else 0.0


class ExactRows:
    """Exact keys and values in one growing buffer: the context's part first, then the tail of later tokens.

    Appending writes in place and reallocates only when the buffer is full, so decoding copies nothing per token.

    Args:
        key: context rows [batch, kv_heads, rows, dim]; `rows` may be 0.
        value: same shape as `key` (its last dimension may differ).
        mask: True where a context row is real [batch, rows], or None when all are.
    """

    slack = 64  # rows of room added when the buffer fills up, at least

    def __init__(self, key: Tensor, value: Tensor, mask: Tensor | None = None) -> None:
        self._key, self._value, self.mask = key, value, mask
        self.n_context = key.shape[2]
        self.used = self.n_context
        self._shared = False  # the buffer is another one's: read it, never write it

    @property
    def key(self) -> Tensor:
        """All keys so far [batch, kv_heads, n_context + tail, dim], a view."""
        return self._key[:, :, : self.used]

    @property
    def value(self) -> Tensor:
        """All values so far [batch, kv_heads, n_context + tail, dim], a view."""
        return self._value[:, :, : self.used]

    @property
    def compiled(self) -> bool:
        """Whether compiled loops can read them: float32 on the CPU."""
        return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (self._key, self._value))

    def buffers(self, write: bool = False) -> tuple[Floats, Floats]:
        """Keys and values with the room for later tokens [batch * kv_heads, at least n_context + tail, dim].

        Args:
            write: they will be written, and must not be another one's.
        """
        if write and self._shared:
            self._grow(self.slack)
        return self._key.flatten(0, 1).numpy(), self._value.flatten(0, 1).numpy()

    @property
    def tail_length(self) -> int:
        """Tokens appended after the context."""
        return self.used - self.n_context

    def append(self, key: Tensor, value: Tensor) -> None:
        """Adds tokens [batch, kv_heads, n, dim] behind the rows there are."""
        end = self.used + key.shape[2]
        if self._shared or end > self._key.shape[2]:
            self._grow(max(self.slack, self.tail_length // 2) + key.shape[2])
        self._key[:, :, self.used : end] = key
        self._value[:, :, self.used : end] = value
        self.used = end

    def write(self, group: Tensor, row: Tensor, key: Tensor, value: Tensor) -> None:
        """Overwrites context rows.

        Args:
            group: (batch row, KV head) pair of each new row, row-major [P].
            row: its place among the context rows [P].
            key: [P, dim].
            value: [P, dim of values].
        """
        if self._shared:
            self._grow(self.slack)
        place = group * self._key.shape[2] + row
        for buffer, rows in ((self._key, key), (self._value, value)):
            buffer.view(-1, buffer.shape[3]).index_copy_(0, place, rows)

    def overwrite(self, start: int, key: Tensor, value: Tensor) -> None:
        """Replaces the context rows from `start` on by [batch, kv_heads, n, dim]."""
        if self._shared:
            self._grow(self.slack)
        place = slice(start, start + key.shape[2])
        self._key[:, :, place] = key
        self._value[:, :, place] = value

    def _grow(self, room: int) -> None:
        self._key, self._value = (self._grown(t, room) for t in (self._key, self._value))
        self._shared = False

    def _grown(self, buffer: Tensor, room: int) -> Tensor:
        bigger = buffer.new_empty(*buffer.shape[:2], self.used + room, buffer.shape[3])
        bigger[:, :, : self.used] = buffer[:, :, : self.used]
        return bigger

    def crop(self, n: int) -> None:
        """Forgets the last `n` tail tokens.

        Raises:
            ValueError: more tokens than the tail holds.
        """
        if n > self.tail_length:
            raise ValueError(f"cannot drop {n} tokens: only {self.tail_length} were added after the compressed context")
        self.used -= n

    def forget(self, n: int) -> None:
        """Forgets the first `n` tail tokens; the others move up."""
        if self._shared:
            self._grow(self.slack)
        for buffer in (self._key, self._value):
            buffer[:, :, self.n_context : self.used - n] = buffer[:, :, self.n_context + n : self.used].clone()
        self.used -= n

    def widen(self, n: int) -> None:
        """Adds `n` rows of zeros behind the context rows, before the tail."""
        context = self.n_context
        self._key, self._value = (
            torch.cat([x[:, :, :context], x.new_zeros(*x.shape[:2], n, x.shape[3]), x[:, :, context:]], dim=2)
            for x in (self.key, self.value)
        )
        self.n_context, self.used, self._shared = context + n, self.used + n, False

    def fork(self) -> ExactRows:
        """A copy that shares the context rows, has an empty tail, and never writes into the shared buffer."""
        n = self.n_context
        twin = ExactRows(self._key[:, :, :n], self._value[:, :, :n], self.mask)
        twin._shared = True
        return twin

    def tensors(self) -> list[Tensor | None]:
        """The live tensors, for byte counts."""
        return [self._key, self._value, self.mask]


class Store(ABC):
    """The memory of one layer: the compressed context and the exact tail of every token after it.

    Dimensions: B batch, H query heads, K KV heads (H = G * K), Q query tokens, T tail tokens, d head dimension.

    Args:
        rows: exact rows; what they hold of the context is the subclass's business, the tail always lives there.
        lengths: true tokens of each context [B], padding not counted.
    """

    def __init__(self, rows: ExactRows, lengths: Tensor) -> None:
        self.exact = rows
        self.lengths = lengths
        self.meter = Meter()
        self.max_tail: int | None = None  # most tail tokens a query may see; None: all of them
        self.forgotten = 0  # tokens that `settle` has taken out of the tail
        self.rewritten = False  # `settle` has changed the context memory: it is no longer the context's alone

    @property
    def tail_length(self) -> int:
        """Tokens appended after the context that are still there."""
        return self.exact.tail_length

    def settle(self, tail_mask: Tensor | None = None) -> None:
        """Makes room for the next token under `max_tail`: the oldest tail tokens leave the tail, a block at a time.

        To be called between steps, on all layers: the next step's mask covers the tokens that are left.

        Args:
            tail_mask: as `attend` received it.
        """
        if self.max_tail is not None and self.tail_length >= self.max_tail:
            surplus = self.tail_length - self.max_tail + min(TAIL_BLOCK, self.max_tail)
            self._release(surplus, None if tail_mask is None else tail_mask[:, 0, -1, :surplus])
            self.exact.forget(surplus)
            self.forgotten += surplus

    def _release(self, n: int, real: Tensor | None) -> None:
        """What becomes of the first `n` tail tokens before they leave the tail; here nothing: they are forgotten.

        Args:
            n: tokens.
            real: False for padding [B, n]; None when there is none.
        """
        return

    def _oldest(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `n` tail tokens [B, K, n, d], views."""
        tail = slice(self.exact.n_context, self.exact.n_context + n)
        return self.exact.key[:, :, tail], self.exact.value[:, :, tail]

    def append(self, key: Tensor, value: Tensor) -> None:
        """Adds decoded tokens [B, K, n, d] to the exact tail."""
        self.exact.append(key, value)

    def crop(self, n: int) -> None:
        """Forgets the last `n` tail tokens.

        Raises:
            PolicyError: some of them have left the tail under `max_rows`.
        """
        if n > self.tail_length and self.forgotten:
            raise PolicyError(
                f"cannot take back {n} tokens: the tail holds {self.tail_length}, and the {self.forgotten} before them "
                "have left it under max_rows; give more max_rows, or fork the memory before decoding"
            )
        self.exact.crop(n)

    def reset(self) -> None:
        """Drops the tail; the context memory stays.

        Raises:
            PolicyError: the memory holds more than the context.
        """
        self._check_own_context()
        self.exact.crop(self.tail_length)
        self.forgotten = 0

    def _check_own_context(self) -> None:
        if self.rewritten:
            raise PolicyError(
                "this memory has taken in decoded tokens under max_rows and no longer holds the context alone: fork it "
                "before decoding, or compress the context again"
            )

    def fork(self) -> Self:
        """A store for another question: same context memory (shared, never written), empty tail, fresh meters.

        Raises:
            PolicyError: the memory holds more than the context.
        """
        self._check_own_context()
        twin = copy.copy(self)
        twin.exact = self.exact.fork()
        twin.meter = Meter()
        twin.forgotten = 0
        return twin

    def exact_mask(self, n_queries: int, tail_mask: Tensor | None) -> Tensor | None:
        """Which exact rows each query may see, context part and tail together.

        Args:
            n_queries: Q.
            tail_mask: as `attend` receives it.

        Returns:
            bool [B, 1, Q, rows], or None when every query sees everything.
        """
        device, batch = self.lengths.device, self.lengths.shape[0]
        tail = tail_mask if tail_mask is not None else causal_tail_mask(n_queries, self.tail_length, device)
        context = self.exact.mask
        if tail is None and context is None:
            return None
        if tail is None:
            tail = torch.ones(1, 1, n_queries, self.tail_length, dtype=torch.bool, device=device)
        if context is None:
            context = torch.ones(1, self.exact.n_context, dtype=torch.bool, device=device)
        parts = (context[:, None, None], tail)
        return torch.cat([part.expand(batch, 1, n_queries, -1) for part in parts], dim=-1)

    @abstractmethod
    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """Answers queries from the context memory and the tail in one softmax.

        Args:
            query: [B, H, Q, d], rotated; its own keys and values are already the last Q tail tokens.
            scaling: factor on q.k, usually d ** -0.5.
            tail_mask: True where a query may see a tail token [B, 1, Q, T] (None: plainly causal).

        Every call records the queries and the context rows they attended to in `meter`.

        Returns:
            [B, H, Q, d] in the query's dtype.
        """

    def precede(self, following: Store) -> None:
        """Says which store answers after this one within a step; a store that fetches may let it fetch ahead."""
        return

    def record_choices(self) -> list[Tensor] | None:
        """Begins to keep which spans queries read, here and in later forks; None from a store that never chooses."""
        return None

    def state(self) -> dict[str, Tensor] | None:
        """The tensors from which `Policy.restore` makes the context memory again; None when not worth keeping.

        Not worth keeping is a memory that has all keys and values of the context as they are: it is made of them as
        quickly as it would be read.
        """
        return None

    @abstractmethod
    def resident_tensors(self) -> list[Tensor | None]:
        """Live tensors on the compute tier."""

    def host_tensors(self) -> list[Tensor | None]:
        """Live tensors on the host tier; none unless the store offloads."""
        return []

    @property
    def resident_bytes(self) -> int:
        """Bytes of live tensors on the compute tier, slack of the tail buffer included."""
        return tensor_bytes(self.resident_tensors())

    @property
    def host_bytes(self) -> int:
        """Bytes of live tensors on the host tier."""
        return tensor_bytes(self.host_tensors())


def causal_tail_mask(n_queries: int, n_tail: int, device: torch.device) -> Tensor | None:
    """Mask [1, 1, Q, T] by which the last Q of T tail tokens see themselves and all before; None hides nothing."""
    if n_queries == 1:
        return None
    position = torch.arange(n_tail, device=device)
    return (position[None, :] <= position[n_tail - n_queries :, None])[None, None]
