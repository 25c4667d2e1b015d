"""The host tier: flat banks of what spans are rebuilt from, fetched by span (method section 1.2).

Index tables and their arithmetic live in numpy: a step touches a few dozen numbers, and a torch call costs more than
the work.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sekv import kernels
from sekv.host_copy import courier
from sekv.memory import Basis, Turn, components_kept
from sekv.rotary import rotate

Index = NDArray[Any]
"""Integers in numpy."""


def to_host(tensor: Tensor) -> Tensor:
    """Moves a tensor to the host, into pinned memory when it comes from an accelerator."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


@dataclass(frozen=True)
class BankSide:
    """What a bank is made from, for keys or for values. Dimensions as in `SpanMemory`.

    Attributes:
        raw: the spans' rows [B, K, S, L, d]; anything beyond a span's length.
        basis: U, sigma, V^T of the rows; None keeps all spans raw.
        gate: g [B, K, S, r] in [0, 1], with `basis`.
    """

    raw: Tensor
    basis: Basis | None = None
    gate: Tensor | None = None


@dataclass(frozen=True)
class _Packed:
    left: Tensor  # U, token by token, [numbers], float32
    right: Tensor  # g sigma V^T, component by component [components, d], float32
    left_step: Tensor  # of 8-bit entries of U [components], float32
    raw: Tensor  # [tokens, d]
    rank: Tensor  # -1 for raw spans [B * K * S]


class FactorBank:
    """All spans of one layer, keys and values: factors where a span has a basis, raw rows where it has none.

    Everything is flat: no span pays for a longer one. Entries are numbered (side, batch, KV head, span), row-major;
    side 0 holds the keys.

    Args:
        key: what the keys are stored from.
        value: likewise.
        length: tokens per span [B, S].
        turn: rotation that each token of a factored key still needs, by its place in the span: cos and sin [L, rot]
            float32; None when the factors give the keys as they are.
        bits: 8 stores whole numbers, with one step per component of a basis and per raw row; None in the dtype of the
            raw rows.
    """

    def __init__(
        self,
        key: BankSide,
        value: BankSide,
        length: Tensor,
        turn: tuple[Tensor, Tensor] | None = None,
        bits: int | None = None,
    ) -> None:
        sides = [_pack(side, length, bits) for side in (key, value)]
        kv_heads, self.dim = key.raw.shape[1], key.raw.shape[-1]
        self._dtype = key.raw.dtype
        zero = sides[0].right.new_zeros(1, self.dim)
        # One number and one row of zeros at the end: where a padded index points to.
        left = torch.cat([*(s.left for s in sides), zero[0, :1]])
        right = torch.cat([*(s.right for s in sides), zero])
        raw = torch.cat([s.raw for s in sides])
        self._step: Tensor | None = None
        self._raw_step: Tensor | None = None
        if bits is None:
            left, right = left.to(self._dtype), right.to(self._dtype)
        else:
            # The steps of U are folded into those of its component's row, so that one number per component is kept.
            left_step = torch.cat([*(s.left_step for s in sides), zero[0, :1]])
            right, step = _quantised(right)
            left, self._step = left.to(torch.int8), to_host(step * left_step)
            raw, raw_step = _quantised(raw.float())
            self._raw_step = to_host(raw_step)
        self._left, self._right, self._raw = to_host(left), to_host(right), to_host(raw)
        self._turn = turn
        rank = torch.cat([s.rank for s in sides])
        tokens = length[:, None].expand(-1, kv_heads, -1).flatten().repeat(2)
        sizes = (torch.where(rank < 0, tokens, 0), rank.clamp_min(0) * tokens, rank.clamp_min(0))
        # Per entry: tokens, rank (-1: raw), and where its numbers begin in the three banks.
        self._table = to_host(torch.stack([tokens, rank, *(size.cumsum(0) - size for size in sizes)]))
        self._at = self._table.numpy()
        self.n_entries = len(rank) // 2  # of one side
        self.n_spans = length.shape[1]  # S

    @classmethod
    def restored(cls, state: dict[str, Tensor], length: Tensor, dtype: torch.dtype, turn: Turn | None) -> FactorBank:
        """The bank whose `state` this is, of rows of `dtype`; the other arguments are the constructor's."""
        bank = cls.__new__(cls)
        bank._left, bank._right, bank._raw, bank._table = (to_host(state[n]) for n in ("left", "right", "raw", "table"))
        bank._step = to_host(state["step"]) if "step" in state else None
        bank._raw_step = to_host(state["raw_step"]) if "raw_step" in state else None
        bank._turn, bank._dtype, bank.dim = turn, dtype, bank._right.shape[1]
        bank._at = bank._table.numpy()
        bank.n_entries, bank.n_spans = bank._table.shape[1] // 2, length.shape[1]
        return bank

    def state(self) -> dict[str, Tensor]:
        """The bank in tensors."""
        steps = {"step": self._step, "raw_step": self._raw_step}
        tables = {"left": self._left, "right": self._right, "raw": self._raw, "table": self._table}
        return tables | {name: step for name, step in steps.items() if step is not None}

    @property
    def is_raw(self) -> Tensor:
        """Which spans are stored raw [2, B * K * S], keys first."""
        return (self._table[1] < 0).view(2, -1)

    def lengths(self, group: Index, span: Index) -> Index:
        """Tokens of spans [M], by (batch row, KV head) pair and place."""
        found: Index = self._at[0, group * self.n_spans + span]
        return found

    def joined(self, other: FactorBank) -> FactorBank:
        """A bank of the spans of this one and, behind them in every batch row and KV head, of another."""
        twin = copy.copy(self)
        twin._raw = _joined_on_host(self._raw, other._raw)
        if self._raw_step is not None and other._raw_step is not None:
            twin._raw_step = _joined_on_host(self._raw_step, other._raw_step)
        # The last number and the last row are the zeros for padded indices: one of each is enough.
        twin._left = _joined_on_host(self._left[:-1], other._left)
        twin._right = _joined_on_host(self._right[:-1], other._right)
        if self._step is not None and other._step is not None:
            twin._step = _joined_on_host(self._step[:-1], other._step)
        moved = other._table.clone()
        moved[2:] += torch.tensor([[len(self._raw)], [len(self._left) - 1], [len(self._right) - 1]])
        groups = self.n_entries // self.n_spans
        first, second = (x.view(5, 2, groups, -1) for x in (self._table, moved))
        twin._table = _joined_on_host(first, second, dim=-1).view(5, -1)
        twin._at = twin._table.numpy()
        twin.n_spans = self.n_spans + other.n_spans
        twin.n_entries = groups * twin.n_spans
        return twin

    def fetch(self, spans: Index, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Brings spans to the compute tier and rebuilds their rows.

        Args:
            spans: numbers of the spans, row-major over (batch, KV head, span) [M]; at least one.
            device: where the rows are wanted.

        Returns:
            Key rows and value rows [sum of lengths, d], span behind span in the stored dtype; and the bytes that
            crossed from the host.
        """
        entries = np.concatenate((spans, spans + self.n_entries))
        length, rank, raw_at, left_at, right_at = self._at[:, entries]
        raw, factored = np.flatnonzero(rank < 0), np.flatnonzero(rank >= 0)
        rows, moved = self._raw_rows(torch.from_numpy(ranges(raw_at[raw], length[raw])), device)
        if len(factored):
            left, right, crossed = self._factors(
                length[factored], rank[factored], left_at[factored], right_at[factored], device
            )
            moved += crossed
            built = left @ right  # [F, L, d]
            n_keys = int(np.searchsorted(factored, len(spans)))
            if self._turn is not None and n_keys:
                cos, sin = (table[: built.shape[1]] for table in self._turn)
                built[:n_keys] = rotate(built[:n_keys].float(), cos, sin).to(built.dtype)
            # Where each entry's rows begin among the raw rows and, behind them, the padded rebuilt ones.
            first = np.empty_like(length)
            first[raw] = length[raw].cumsum() - length[raw]
            first[factored] = len(rows) + np.arange(len(factored)) * built.shape[1]
            order = torch.from_numpy(ranges(first, length)).to(device)
            rows = torch.cat([rows, built.flatten(0, 1).to(self._dtype)]).index_select(0, order)
        key, value = rows.split(len(rows) // 2)
        return key, value, moved

    def rebuild_into(
        self, spans: Index, group: Index, row: Index, key: kernels.Floats, value: kernels.Floats
    ) -> int | None:
        """`fetch` into buffers on the host, where the spans are raw rows in 8 bits.

        Args:
            spans: numbers of the spans [M].
            group: of each of their rows [P].
            row: where it goes [P].
            key: written [groups, R, d].
            value: likewise.

        Returns:
            The bytes read; None when a span is kept in another way, and nothing was written.
        """
        if self._raw_step is None:
            return None
        raw, step = self._raw.numpy(), self._raw_step.numpy()
        n_rows = kernels.rebuild_raw(raw, step, self._at, spans, group, row, key, value)
        return n_rows * (raw.shape[1] * raw.itemsize + step.itemsize) if n_rows >= 0 else None

    def _raw_rows(self, index: Tensor, device: torch.device) -> tuple[Tensor, int]:
        """Raw rows [P, d] on the compute tier, and the bytes that crossed."""
        requests = [(self._raw, index)]
        requests += [] if self._raw_step is None else [(self._raw_step, index)]
        (rows, *step), moved = courier(device).bring(requests)
        return (rows * step[0][:, None]).to(self._dtype) if step else rows, moved

    def _factors(
        self, length: Index, rank: Index, left_at: Index, right_at: Index, device: torch.device
    ) -> tuple[Tensor, Tensor, int]:
        """U [F, L, r], anything beyond a span's length, and g sigma V^T [F, r, d]; zero beyond a span's rank.

        Both on the compute tier, and the bytes that crossed.
        """
        component = np.arange(max(1, rank.max()))
        live = component < rank[:, None]  # [F, r]
        right_index = np.where(live, right_at[:, None] + component, len(self._right) - 1)
        token = left_at[:, None] + np.arange(length.max()) * rank[:, None]  # [F, L]
        left_index = np.where(live[:, None], token[..., None] + component, len(self._left) - 1)
        # Beyond a span's length the index may leave the bank.
        np.minimum(left_index, len(self._left) - 1, out=left_index)
        components = torch.from_numpy(right_index.ravel())
        requests = [(self._left, torch.from_numpy(left_index.ravel())), (self._right, components)]
        requests += [] if self._step is None else [(self._step, components)]
        (left, right, *step), moved = courier(device).bring(requests)
        left = left.view(left_index.shape)
        if step:
            left, right = left.float(), right * step[0][:, None]
        return left, right.view(*right_index.shape, self.dim), moved

    def tensors(self) -> list[Tensor]:
        """The live tensors, index tables included, for byte counts."""
        steps = [x for x in (self._step, self._raw_step) if x is not None]
        return [self._left, self._right, self._raw, self._table, *steps]


def _joined_on_host(first: Tensor, second: Tensor, dim: int = 0) -> Tensor:
    """Both, in pinned memory when the second is."""
    both = torch.cat([first, second], dim=dim)
    return both.pin_memory() if second.is_pinned() else both


def ranges(start: Index, length: Index) -> Index:
    """start_0, start_0 + 1, ... of length_0 numbers, then start_1, ..."""
    return np.arange(length.sum()) + np.repeat(start - length.cumsum() + length, length)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, d] in 8 bits, and what one unit of each row is worth [n]."""
    step = rows.abs().amax(dim=1).clamp_min(1e-12) / 127
    return (rows / step[:, None]).round().to(torch.int8), step


def _pack(side: BankSide, length: Tensor, bits: int | None) -> _Packed:
    """One side's spans as flat tensors."""
    raw = side.raw
    token = torch.arange(raw.shape[-2], device=raw.device) < length[:, None, :, None]  # [B, 1, S, L]
    token = token.expand(raw.shape[:-1])
    if side.basis is None or side.gate is None or not bool((side.basis[1] > 0).any()):
        rank = -token[..., 0].long()
        none = torch.zeros(0, device=raw.device)
        return _Packed(none, none.view(0, 1).expand(0, raw.shape[-1]), none, raw[token], rank.flatten())
    left, sigma, right = side.basis
    kept, stays_raw = components_kept(side.gate, sigma)
    order = (~kept).int().argsort(dim=-1, stable=True)  # kept components first, still by singular value
    kept = kept.gather(-1, order)
    left = left.gather(-1, order[..., None, :].expand_as(left))  # [B, K, S, L, r]
    right = (right * (side.gate * sigma)[..., None]).gather(-2, order[..., None].expand_as(right))
    step = torch.ones_like(left[..., 0, :])
    if bits is not None:
        step = (left * token[..., None]).abs().amax(dim=-2).clamp_min(1e-12) / 127  # [B, K, S, r]
        left = (left / step[..., None, :]).round()
    return _Packed(
        left=left[kept[..., None, :] & token[..., None]],
        right=right[kept],
        left_step=step[kept],
        raw=raw[token & stays_raw[..., None]],
        rank=torch.where(stays_raw, -1, kept.sum(-1)).flatten(),
    )
