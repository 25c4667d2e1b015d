"""The way from the host to the device: pinned buffers, and a stream of its own for the copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class Courier:
    """Brings rows of host tensors to a device without waiting for it.

    To an accelerator, rows are gathered into pinned buffers and copied on a stream of their own, beside what the
    device computes; the stream that computes waits for the copy before it reads a row. The buffers are those of torch's
    pinned allocator, which keeps each until its copy is done. On the CPU the gathered rows are the rows.

    Args:
        device: where rows are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device) if device.type != "cpu" else None

    def bring(self, requests: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], int]:
        """Gathers and copies.

        Args:
            requests: tensors on the host and the rows wanted of each.

        Returns:
            The rows on the device, ready for its current stream; and the bytes that were copied.
        """
        rows = [self._gathered(bank, index) for bank, index in requests]
        moved = sum(x.nbytes for x in rows)
        return (rows if self._stream is None else self._copied(rows)), moved

    def _gathered(self, bank: Tensor, index: Tensor) -> Tensor:
        if self._stream is None:
            return bank.index_select(0, index)
        buffer = torch.empty(len(index), *bank.shape[1:], dtype=bank.dtype, pin_memory=True)
        return torch.index_select(bank, 0, index, out=buffer)

    def _copied(self, rows: list[Tensor]) -> list[Tensor]:
        computing = self._module.current_stream(self.device)
        with self._module.stream(self._stream):
            copies = [x.to(self.device, non_blocking=True) for x in rows]
        computing.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(computing)  # its memory is not given away before that stream has read it
        return copies


@lru_cache
def courier(device: torch.device) -> Courier:
    """The courier to a device; all banks share its stream."""
    return Courier(device)
