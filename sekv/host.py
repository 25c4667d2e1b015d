"""The host tier: flat banks of span bases, fetched by span (method section 1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.memory import components_kept


def to_host(tensor: Tensor) -> Tensor:
    """Moves a tensor to the host, into pinned memory when it comes from an accelerator."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


@dataclass(frozen=True)
class Fetched:
    """Spans brought from the host.

    Attributes:
        rows: rebuilt rows [M, L, d] on the compute tier, in the stored dtype; undefined beyond a span's length.
        raw: True for spans whose rows were stored as they are [M].
        moved_bytes: bytes that crossed from the host.
    """

    rows: Tensor
    raw: Tensor
    moved_bytes: int


class FactorBank:
    """Bases of all spans of one layer's keys (or values): factors where they are smaller, raw rows where they are not.

    Factors of rank r cost r (|S| + d) numbers against |S| d raw ones, so short spans stay raw. Everything is flat: no
    span pays for a longer one. Entries are numbered (batch, KV head, span), row-major.

    Args:
        raw: the spans' rows [B, K, S, L, d], zero beyond a span's length.
        left: U [B, K, S, L, r] float32.
        sigma: singular values [B, K, S, r].
        right: V^T [B, K, S, r, d] float32.
        gates: g [B, K, S, r] in [0, 1].
        length: tokens per span [B, S].
        keep_raw: store raw rows where factors are not smaller; False forces factors (to measure them).
    """

    def __init__(
        self,
        raw: Tensor,
        left: Tensor,
        sigma: Tensor,
        right: Tensor,
        gates: Tensor,
        length: Tensor,
        keep_raw: bool = True,
    ) -> None:
        kv_heads, dim, dtype = raw.shape[1], raw.shape[-1], raw.dtype
        kept, stays_raw = components_kept(gates, sigma, length, dim, keep_raw)
        rank = kept.sum(-1)
        length = length[:, None].expand(-1, kv_heads, -1)  # [B, K, S]

        order = (~kept).int().argsort(dim=-1, stable=True)  # kept components first, still by singular value
        kept = kept.gather(-1, order)
        left = left.mT.gather(-2, order[..., None].expand(*order.shape, left.shape[-2]))  # [B, K, S, r, L]
        right = (right * (gates * sigma)[..., None]).gather(-2, order[..., None].expand_as(right))
        token = torch.arange(raw.shape[-2], device=raw.device) < length[..., None]  # [B, K, S, L]

        self.dim = dim
        self._left = to_host(left[kept[..., None] & token[..., None, :]].to(dtype))
        self._right = to_host(right[kept].to(dtype))
        self._raw = to_host(raw[token & stays_raw[..., None]])
        self._rank, self._length = to_host(rank.flatten()), to_host(length.flatten())
        self._is_raw = to_host(stays_raw.flatten())
        sizes = {"left": rank * length, "right": rank, "raw": torch.where(stays_raw, length, 0)}
        self._offset = {name: to_host(size.flatten().cumsum(0) - size.flatten()) for name, size in sizes.items()}

    def fetch(self, entries: Tensor, device: torch.device) -> Fetched:
        """Brings spans to the compute tier and rebuilds their rows.

        Args:
            entries: numbers of the spans, row-major over (batch, KV head, span) [M].
            device: where the rows are wanted.

        Returns:
            The rows, padded to the longest of these spans.
        """
        entries = entries.to(self._length.device)
        length, rank, is_raw = self._length[entries], self._rank[entries], self._is_raw[entries]
        longest = int(length.max()) if len(entries) else 0
        rows = torch.empty(len(entries), longest, self.dim, dtype=self._right.dtype, device=device)
        raw_numbers = int((length * is_raw).sum()) * self.dim
        factor_numbers = int((rank * (length + self.dim)).sum())
        if raw_numbers:
            which = is_raw.nonzero().squeeze(1)
            rows[which.to(device)] = self._fetch_raw(entries[which], longest, device)
        if factor_numbers or not bool(is_raw.all()):
            which = (~is_raw).nonzero().squeeze(1)
            rows[which.to(device)] = self._rebuild(entries[which], longest, device)
        moved = (raw_numbers + factor_numbers) * self._right.element_size()
        return Fetched(rows=rows, raw=is_raw.to(device), moved_bytes=moved)

    def _fetch_raw(self, entries: Tensor, longest: int, device: torch.device) -> Tensor:
        index = self._offset["raw"][entries, None] + torch.arange(longest)
        return self._raw[index.clamp_max(len(self._raw) - 1)].to(device, non_blocking=True)

    def _rebuild(self, entries: Tensor, longest: int, device: torch.device) -> Tensor:
        length, rank = self._length[entries], self._rank[entries]
        component, token = torch.arange(max(1, int(rank.max()))), torch.arange(longest)
        live = component < rank[:, None]  # [M, r]
        right_index = torch.where(live, self._offset["right"][entries, None] + component, 0)
        left_index = self._offset["left"][entries, None, None] + component[:, None] * length[:, None, None] + token
        live_left = live[..., None] & (token < length[:, None, None])  # [M, r, L]
        if not len(self._right):
            return torch.zeros(len(entries), longest, self.dim, dtype=self._right.dtype, device=device)
        left = self._left[torch.where(live_left, left_index, 0)] * live_left
        right = self._right[right_index] * live[..., None]
        return left.to(device, non_blocking=True).mT @ right.to(device, non_blocking=True)

    def tensors(self) -> list[Tensor]:
        """The live tensors, index tables included, for byte counts."""
        tables = [self._rank, self._length, self._is_raw, *self._offset.values()]
        return [self._left, self._right, self._raw, *tables]
