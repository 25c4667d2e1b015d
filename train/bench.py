"""`sekv bench train`: one optimiser step against a plain prefill of the same tokens, and the memory of a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.markup import escape

from sekv.adapter import SeKVAdapter
from sekv.bench.cli import add_shared_flags, check_counts, read_lengths
from sekv.bench.figures import Figure, Setting
from sekv.bench.session import Session
from sekv.bench.timing import growth, interleaved, median, median_ratio, operators
from sekv.bench.workload import REFERENCE, UNTRAINED, Workload, open_backbone, open_policies
from sekv.budget import Budget
from sekv.errors import DataError
from train.losses import LossConfig, total
from train.objective import MiningConfig, evaluate_batch

_STEP = "sekv"

_EPILOG = """\
example:
  sekv bench train --lengths 1024,2048,4096 --window 128 --repeats 3 --output results/speed

A length is that of the whole document, context and query window together; the adapter is a fresh one. The peak is what
live tensors grow by during a step, weights and adapter not counted; on CUDA what the allocator says."""


@dataclass(frozen=True)
class Steps:
    """Optimiser steps of a fresh adapter.

    Attributes:
        work: the backbone, its text and the budget.
        window: query tokens.
    """

    work: Workload
    window: int

    def measure(self, length: int, repeats: int, session: Session) -> list[Figure]:
        """A plain prefill and a step over the same tokens.

        Args:
            length: of the document, its window included.
            repeats: timings of each.
            session: gets where the time of a step goes.
        """
        work, device = self.work, self.work.backbone.device
        adapter = SeKVAdapter.create(work.backbone).to(device)
        optimizer = torch.optim.AdamW(adapter.parameters())
        ids = work.ids(length)
        plain = partial(work.read, ids)
        step = partial(self._step, adapter, optimizer, torch.tensor([ids], device=device))
        plain()
        peak = growth(step, device)
        seconds = interleaved({REFERENCE: plain, _STEP: step}, repeats, device)
        if session.profile is not None:
            session.profile(f"an optimiser step over {length} tokens", operators(step, device))
        return [
            Figure(
                what="train",
                policy=name,
                length=length,
                budget=work.budget_value,
                median_seconds=median(seconds[name]),
                ratio_to_full=median_ratio(seconds[name], seconds[REFERENCE]),
                peak_bytes=peak if name == _STEP else None,
                samples=repeats,
            )
            for name in seconds
        ]

    def _step(self, adapter: SeKVAdapter, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        outcome = evaluate_batch(
            self.work.backbone,
            adapter,
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            window=self.window,
            budget=self.work.budget,
            mining=MiningConfig(),
            config=LossConfig(),
        )
        total(outcome.losses, LossConfig(), anneal=1.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(argv: Sequence[str]) -> int:
    """Runs `sekv bench train`.

    Args:
        argv: arguments behind `sekv bench train`.

    Returns:
        0.

    Raises:
        SeKVError: a mistake that one line explains.
    """
    parser = argparse.ArgumentParser(
        prog="sekv bench train",
        description="Measure an optimiser step over a plain prefill of the same tokens, interleaved.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shared_flags(parser)
    parser.add_argument("--window", type=int, default=128, metavar="N", help="query tokens (default: 128)")
    options = parser.parse_args(list(argv))
    check_counts(options)
    lengths, budget = read_lengths(options.lengths), Budget.parse(options.budget)
    if not 1 <= options.window < lengths[0]:
        raise DataError(
            f"--window {options.window} leaves no context in documents of {lengths[0]} tokens; give 1 to "
            f"{lengths[0] - 1}, or longer ones"
        )
    session = Session("train", options.output, options.profile)
    with Console(stderr=True).status(f"opening {escape(options.backbone)}"):
        backbone = open_backbone(options.backbone, options.dtype, options.device)
    work = Workload(backbone, open_policies([REFERENCE], None), budget)
    work.check(lengths, 0)
    steps = Steps(work, options.window)
    setting = Setting.here(backbone, options.repeats, adapter=UNTRAINED)
    session.run(setting, lengths, partial(steps.measure, repeats=options.repeats, session=session), Console())
    return 0
