"""Time, taken so that ratios hold on a machine with other work: the things compared run in turns, and medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from sekv.bench.live_bytes import LiveBytes

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Work = Callable[[], object]

_PROFILED = 15  # operators shown


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call gives and its wall-clock seconds, the device's part included."""
    synchronise(device)
    started = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - started


def interleaved(works: Mapping[K, Work], repeats: int, device: torch.device) -> dict[K, list[float]]:
    """Seconds of each call, all of them once per repeat and in the opposite order every other time."""
    seconds: dict[K, list[float]] = {name: [] for name in works}
    for repeat in range(repeats):
        for name in in_turn(list(works), repeat):
            seconds[name].append(timed(works[name], device)[1])
    return seconds


def in_turn(names: Sequence[K], turn: int) -> Sequence[K]:
    """The names, backwards at every other turn, so that none always follows the same one."""
    return names[::-1] if turn % 2 else names


def median(seconds: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(seconds)


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The middle one of the ratios of times that were taken side by side."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def growth(work: Work, device: torch.device) -> int:
    """Bytes by which memory grows at most while `work` runs: of the allocator, or of live tensors on a CPU."""
    if device.type != "cuda":
        with LiveBytes() as live:
            work()
        return live.peak
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def operators(work: Work, device: torch.device) -> str:
    """A table of the operators that take the most time in one call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as record:
        work()
        synchronise(device)
    return record.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=_PROFILED)
