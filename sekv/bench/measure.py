"""The measurements of `sekv bench`, one function per command and length."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sekv.bench.figures import Figure
from sekv.bench.timing import in_turn, interleaved, median, median_ratio, operators, timed
from sekv.bench.workload import REFERENCE, Workload
from sekv.cache import CompressedCache

WARM_STEPS = 8  # decoded before anything is measured: slots fill, buffers grow

Profile = Callable[[str, str], None]
"""Takes a title and the table of a profile."""


def measure_prefill(work: Workload, length: int, repeats: int, profile: Profile | None = None) -> list[Figure]:
    """Reading a context plainly, reading it with what each policy needs, building each memory, scoring the tokens.

    Policies that need the same of a prefill share its timings.

    Args:
        work: what is measured.
        length: tokens of the context.
        repeats: timings of everything.
        profile: gets where the time of each build goes.
    """
    device, ids = work.backbone.device, work.ids(length)
    context = work.read(ids)
    figures = {spec: _bytes(work, spec, length, work.build(context, spec)) for spec in work.policies}  # and warm-up
    works: dict[Any, Callable[[], object]] = {}
    for spec in work.policies:
        works.setdefault(work.needs(spec), partial(work.read, ids, [spec]))
        if spec != REFERENCE:  # the full cache is what a prefill leaves behind: nothing is built
            works["build", spec] = partial(work.build, context, spec)
        if scorer := work.scorer(spec):
            works["score", spec] = partial(work.score, context, scorer)
    seconds = interleaved(works, repeats, device)
    plain = seconds[work.needs(REFERENCE)]
    found = []
    for spec, figure in figures.items():
        built = seconds.get(("build", spec), [0.0] * repeats)
        together = [a + b for a, b in zip(seconds[work.needs(spec)], built, strict=True)]
        found.append(_timed(replace(figure, what="prefill"), together, plain))
        if ("build", spec) in seconds:
            found.append(_timed(replace(figure, what="build"), built, plain))
        if ("score", spec) in seconds:
            found.append(_timed(replace(figure, what="score"), seconds["score", spec], plain))
        if profile is not None and spec != REFERENCE:
            profile(f"build of {spec} at {length} tokens", operators(works["build", spec], device))
    return found


def measure_decode(
    work: Workload, length: int, repeats: int, steps: int, profile: Profile | None = None
) -> list[Figure]:
    """One decode step of each policy, all policies step by step in turns.

    Every step reads the next token of the text, the same for all policies, so that none runs through another text.

    Args:
        work: what is measured.
        length: tokens of the context.
        repeats: times that the memory is asked anew.
        steps: timed steps each time.
        profile: gets where the time of a step goes.
    """
    device, ids = work.backbone.device, work.ids(length + WARM_STEPS + steps)
    context = work.read(ids[:length])
    memories = {spec: work.build(context, spec) for spec in work.policies}
    figures = {spec: _bytes(work, spec, length, memory) for spec, memory in memories.items()}
    del context
    seconds: dict[str, list[float]] = {spec: [] for spec in memories}
    for _ in range(repeats):
        forks = {spec: memory.fork() for spec, memory in memories.items()}
        _run(work, forks, ids[length : length + WARM_STEPS])
        counts = {spec: _Counts(fork) for spec, fork in forks.items()}
        taken = _run(work, forks, ids[length + WARM_STEPS :])
        for spec, fork in forks.items():
            seconds[spec] += taken[spec]
            figures[spec] = counts[spec].since(figures[spec], fork, steps)
    if profile is not None:
        for spec, fork in forks.items():
            table = operators(partial(work.step, fork, ids[-1]), device)
            profile(f"a decode step of {spec} behind {length} tokens", table)
    return [
        _timed(replace(figure, what="decode"), seconds[spec], seconds[REFERENCE]) for spec, figure in figures.items()
    ]


def measure_end_to_end(work: Workload, length: int, repeats: int, new_tokens: int) -> list[Figure]:
    """Prefill, compression and `new_tokens` steps together; the three are timed one after the other and added up.

    Args:
        work: what is measured.
        length: tokens of the context.
        repeats: of everything.
        new_tokens: decoded behind the context.
    """
    device, ids = work.backbone.device, work.ids(length + new_tokens)
    context = work.read(ids[:length])
    seconds: dict[str, list[float]] = {spec: [] for spec in work.policies}
    figures: dict[str, Figure] = {}
    for repeat in range(repeats):
        reads: dict[Hashable, float] = {}
        builds: dict[str, float] = {}
        forks: dict[str, CompressedCache] = {}
        for spec in in_turn(list(work.policies), repeat):
            if work.needs(spec) not in reads:
                reads[work.needs(spec)] = timed(partial(work.read, ids[:length], [spec]), device)[1]
            forks[spec], builds[spec] = timed(partial(work.build, context, spec), device)
            figures[spec] = _bytes(work, spec, length, forks[spec])
        counts = {spec: _Counts(fork) for spec, fork in forks.items()}
        taken = _run(work, forks, ids[length:])
        for spec, fork in forks.items():
            seconds[spec].append(reads[work.needs(spec)] + builds[spec] + sum(taken[spec]))
            figures[spec] = counts[spec].since(figures[spec], fork, new_tokens)
    return [
        _timed(replace(figures[spec], what="end_to_end", new_tokens=new_tokens), seconds[spec], seconds[REFERENCE])
        for spec in work.policies
    ]


def measure_memory(work: Workload, length: int, steps: int) -> list[Figure]:
    """Bytes of each policy, counted from live tensors, and on an accelerator the most that decoding holds there.

    One memory is there at a time; on an accelerator the keys and values that they are made from lie on the host.

    Args:
        work: what is measured.
        length: tokens of the context.
        steps: decoded to count what is moved.
    """
    device, ids = work.backbone.device, work.ids(length + WARM_STEPS + steps)
    context = work.read(ids[:length], offload=device.type != "cpu")
    found = []
    for spec in work.policies:
        cache = work.build(context, spec)
        figure = replace(_bytes(work, spec, length, cache), what="memory")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        _run(work, {spec: cache}, ids[length : length + WARM_STEPS])
        counts = _Counts(cache)
        _run(work, {spec: cache}, ids[length + WARM_STEPS :])
        figure = counts.since(figure, cache, steps)
        if device.type == "cuda":
            figure = replace(figure, peak_bytes=torch.cuda.max_memory_allocated(device))
        found.append(figure)
        del cache
    whole = found[0].resident_bytes or 1
    return [replace(figure, ratio_to_full=(figure.resident_bytes or 0) / whole) for figure in found]


def _run(work: Workload, caches: dict[str, CompressedCache], tokens: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each step of each cache, which take turns within every step."""
    device = work.backbone.device
    seconds: dict[str, list[float]] = {spec: [] for spec in caches}
    for turn, token in enumerate(tokens):
        for spec in in_turn(list(caches), turn):
            seconds[spec].append(timed(partial(work.step, caches[spec], token), device)[1])
    return seconds


class _Counts:
    """Meters of a cache at one moment, to be compared with those after some steps."""

    def __init__(self, cache: CompressedCache) -> None:
        self._moved, self._wanted, self._reused = self._of(cache)

    @staticmethod
    def _of(cache: CompressedCache) -> tuple[int, int, int]:
        meters = [store.meter for store in cache.stores]
        return cache.moved_bytes, sum(m.wanted_rows for m in meters), sum(m.reused_rows for m in meters)

    def since(self, figure: Figure, cache: CompressedCache, steps: int) -> Figure:
        """The figure with what was moved and attended to in the `steps` since."""
        moved, wanted, reused = self._of(cache)
        rate = (reused - self._reused) / (wanted - self._wanted) if wanted > self._wanted else None
        moved_per_token = (moved - self._moved) / steps
        return replace(figure, moved_bytes_per_token=moved_per_token, hit_rate=rate, rows=cache.mean_rows)


def _bytes(work: Workload, spec: str, length: int, memory: CompressedCache) -> Figure:
    """What a memory takes, before anything is asked of it."""
    return Figure(
        what="memory",
        policy=spec,
        length=length,
        budget=work.budget_value,
        resident_bytes=memory.resident_bytes,
        host_bytes=memory.host_bytes,
    )


def _timed(figure: Figure, seconds: Sequence[float], reference: Sequence[float]) -> Figure:
    return replace(
        figure,
        median_seconds=median(seconds),
        ratio_to_full=median_ratio(seconds, reference),
        samples=len(seconds),
    )
