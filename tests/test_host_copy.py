"""The way from the host: the same rows on every device, copied beside the computation where there is a stream."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sekv.host_copy import Courier, courier

CPU = torch.device("cpu")
BANK, NUMBERS = torch.arange(12.0).view(6, 2), torch.arange(5, dtype=torch.int8)
REQUESTS = [(BANK, torch.tensor([4, 0, 4])), (NUMBERS, torch.tensor([1]))]


def test_rows_and_their_bytes():
    (rows, numbers), moved = courier(CPU).bring(REQUESTS)
    assert rows.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert numbers.tolist() == [1]
    assert moved == 3 * 2 * 4 + 1


def test_all_banks_of_a_device_share_one():
    assert courier(CPU) is courier(torch.device("cpu"))


class RecordedDevice:
    """Stands for a device module: says in which order streams are used."""

    def __init__(self):
        self.done = []

    def current_stream(self, device):
        return self

    @contextmanager
    def stream(self, stream):
        self.done.append("copying begins")
        yield
        self.done.append("copying is asked for")

    def wait_stream(self, stream):
        self.done.append("computing waits for the copies")


def test_copies_run_on_a_stream_that_the_computation_waits_for(monkeypatch):
    """The path of an accelerator, with a device that only keeps a record."""
    one, device, pinned = Courier(CPU), RecordedDevice(), []
    one._stream, one._module = object(), device
    empty = torch.empty

    def pinned_empty(*shape, pin_memory, **options):
        pinned.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: device.done.append("kept until read"))
    (rows, numbers), moved = one.bring(REQUESTS)
    assert rows.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert numbers.tolist() == [1]
    assert moved == 25
    assert pinned == [True, True]
    assert device.done == [
        "copying begins",
        "copying is asked for",
        "computing waits for the copies",
        "kept until read",
        "kept until read",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_rows_arrive_on_cuda():
    device = torch.device("cuda", torch.cuda.current_device())
    bank = torch.randn(1000, 64).pin_memory()
    for _ in range(50):
        index = torch.randint(0, 1000, (300,))
        (rows,), _ = courier(device).bring([(bank, index)])
        assert (rows.cpu() == bank[index]).all()
