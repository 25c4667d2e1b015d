"""One optimiser step against a plain prefill of the same tokens: their ratio, peak memory, and where time goes.

Repeats are interleaved and medians are compared. Peak memory is what the process grows by during the step: on an
accelerator from the allocator, elsewhere from the resident set, measured in a process of its own for each length.

Run: python benchmarks/train_step.py --tokens 1024,2048,4096 --window 128 --repeats 3 --profile
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sekv.adapter import SeKVAdapter
from sekv.backbone import load_backbone
from sekv.budget import Budget
from sekv.corpus import builtin_english
from sekv.prefill import prefill
from train.losses import LossConfig, total
from train.objective import MiningConfig, evaluate_batch

_PROFILED = 15  # operators shown


def workloads(name: str, tokens: int, window: int) -> tuple[Callable[[], None], Callable[[], None], torch.device]:
    """A plain prefill and an optimiser step over the same `tokens` of real text."""
    backbone = load_backbone(name)
    adapter = SeKVAdapter.create(backbone)
    optimizer = torch.optim.AdamW(adapter.parameters())
    assert backbone.tokenizer is not None
    text = "\n\n".join(builtin_english())[: 10 * tokens]
    ids = backbone.tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(backbone.device)
    mask = torch.ones_like(ids, dtype=torch.bool)

    def plain() -> None:
        prefill(backbone, ids, surprisal=False)

    def step() -> None:
        outcome = evaluate_batch(
            backbone,
            adapter,
            ids,
            mask,
            window=window,
            budget=Budget(share=0.1),
            mining=MiningConfig(),
            config=LossConfig(),
        )
        total(outcome.losses, LossConfig(), anneal=1.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain, step, backbone.device


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(work: Callable[[], None], device: torch.device) -> int:
    """Bytes by which memory grows at most while `work` runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    before = highest = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.01):
            highest = max(highest, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return highest - before


def measure(options: argparse.Namespace, tokens: int) -> None:
    """Prints the figures of one length."""
    plain, step, device = workloads(options.backbone, tokens, options.window)
    plain()
    memory = growth(step, device)
    seconds: dict[str, list[float]] = {"prefill": [], "step": []}
    for _ in range(options.repeats):
        for name, work in (("prefill", plain), ("step", step)):
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{tokens} tokens, window {options.window}: prefill {middle['prefill']:.2f} s, step {middle['step']:.2f} s, "
        f"ratio {middle['step'] / middle['prefill']:.2f}, peak memory of a step {memory / 1e6:.0f} MB",
        flush=True,
    )
    if options.profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as record:
            step()
        print(record.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=_PROFILED))


def main() -> None:
    """Measures each length in a process of its own, so that none inherits another's memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--tokens", default="2048", help="context and window together; several with commas")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="show the operators that take the most time")
    options = parser.parse_args()
    lengths = [int(length) for length in options.tokens.split(",")]
    if len(lengths) == 1:
        measure(options, lengths[0])
        return
    for length in lengths:
        command = [sys.executable, __file__, "--backbone", options.backbone, "--tokens", str(length)]
        command += ["--window", str(options.window), "--repeats", str(options.repeats)]
        subprocess.run([*command, *(["--profile"] if options.profile else [])], check=True)


if __name__ == "__main__":
    main()
