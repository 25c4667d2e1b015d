"""`sekv plan inference`: what a compressed context would need and cost, before anything is loaded.

A step of the full cache reads all of it from the accelerator's memory. A step over a compressed context reads what is
resident and brings the zoomed spans over the link. The full cache is faster where the link takes longer than what is
saved by reading less.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sekv.bench.cli import read_lengths
from sekv.budget import Budget
from sekv.errors import DataError
from sekv.units import parse_bandwidth

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sekv.bench.figures import Figure
    from sekv.bench.footprint import Footprint

_LENGTHS = "8192,32768,131072,524288,1048576"

_EPILOG = """\
examples:
  sekv plan inference --backbone meta-llama/Llama-3.1-8B --budget 0.1 --reuse 0.9 --link-bandwidth 25GB/s
  sekv plan inference --backbone smollm2-135m --dtype float32 --adapter checkpoints/smollm2-135m \\
      --lengths 2048,4096,8000 --measured results/speed/bench.json

Only the backbone's config.json is read: a folder, a published architecture that comes with sekv, or a Hub id. Without
measured figures every row left for zooming is fetched anew by every step, which is the most that can happen;
--expansion and --reuse say what a router really does, and --measured takes the bytes per token of a bench.json,
in proportion to the rows left for zooming, and shows how measured bytes agree with predicted ones."""


@dataclass(frozen=True)
class Machine:
    """What bytes pass through.

    Attributes:
        link: bytes per second from the host.
        memory: bytes per second that the accelerator reads of its own memory.
    """

    link: int
    memory: int


@dataclass(frozen=True)
class Outlook:
    """What one context length would need.

    Attributes:
        footprint: its bytes.
        moved_bytes: from the host per token.
        machine: what they pass through.
    """

    footprint: Footprint
    moved_bytes: float
    machine: Machine

    @property
    def added_seconds(self) -> float:
        """Time per token on the link, none of it hidden behind computing."""
        return self.moved_bytes / self.machine.link

    @property
    def saved_seconds(self) -> float:
        """Time per token saved by reading what is resident instead of the full cache."""
        return (self.footprint.full_bytes - self.footprint.resident_bytes) / self.machine.memory

    @property
    def break_even(self) -> float:
        """Bandwidth of the link in bytes per second below which the full cache would be faster."""
        if not self.moved_bytes:
            return 0.0
        return self.moved_bytes / self.saved_seconds if self.saved_seconds > 0 else math.inf


def main(argv: Sequence[str]) -> int:
    """Runs `sekv plan inference`.

    Args:
        argv: arguments behind `sekv plan inference`.

    Returns:
        0.

    Raises:
        SeKVError: a mistake that one line explains.
    """
    options = _parser().parse_args(list(argv))
    lengths, budget = read_lengths(options.lengths), Budget.parse(options.budget)
    machine = Machine(parse_bandwidth(options.link_bandwidth), parse_bandwidth(options.memory_bandwidth))
    for name in ("expansion", "reuse"):
        if not 0.0 <= getattr(options, name) <= 1.0:
            raise DataError(f"--{name} {getattr(options, name)} is no share; give a number from 0 to 1")

    import torch
    from rich.console import Console

    from sekv.adapter import SeKVAdapter, SeKVConfig
    from sekv.architecture import find_architecture
    from sekv.backbone import pick_dtype
    from sekv.bench.footprint import Footprint

    architecture = find_architecture(options.backbone)
    config = SeKVAdapter.from_pretrained(options.adapter).config if options.adapter else SeKVConfig()
    geometry = architecture.backbone.geometry
    size = pick_dtype(options.dtype, torch.device("cpu")).itemsize

    def footprint(tokens: int) -> Footprint:
        return Footprint(geometry, config, budget, tokens, size)

    measured = _measured(options.measured, options.backbone, options.dtype, budget) if options.measured else []
    console = Console(highlight=False)
    console.print(
        f"{architecture.name}, {options.dtype}, budget {budget} ({architecture.source})", markup=False, soft_wrap=True
    )
    if measured:
        console.print(_agreement(measured, [footprint(figure.length) for figure in measured]))
    per_row = _moved_per_row(measured, [footprint(figure.length) for figure in measured])
    outlooks = []
    for tokens in lengths:
        one = footprint(tokens)
        moved = one.moved_bytes(options.expansion, options.reuse) if per_row is None else per_row * one.zoom_rows
        outlooks.append(Outlook(one, moved, machine))
    console.print(_table(outlooks))
    _print_assumptions(console, options, per_row is not None, max(lengths), geometry.max_positions)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sekv plan inference",
        description="Say what a context compressed by sekv would need and cost per token, before anything is loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backbone", required=True, metavar="B", help="folder, published architecture, or Hub id")
    parser.add_argument("--adapter", metavar="A", help="takes its constants (default: those of a fresh adapter)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--lengths", default=_LENGTHS, metavar="N[,N...]", help=f"(default: {_LENGTHS})")
    parser.add_argument("--budget", default="0.1", metavar="X", help="share of the context, or rows (default: 0.1)")
    parser.add_argument("--expansion", type=float, default=1.0, metavar="X", help="share of the zoom rows used (1)")
    parser.add_argument("--reuse", type=float, default=0.0, metavar="X", help="share of them fetched before (0)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="bench.json of sekv bench decode or memory")
    parser.add_argument("--link-bandwidth", default="25GB/s", metavar="X", help="from the host (default: 25GB/s)")
    parser.add_argument(
        "--memory-bandwidth", default="2TB/s", metavar="X", help="of the accelerator's memory (default: 2TB/s)"
    )
    return parser


def _measured(path: Path, backbone: str, dtype: str, budget: Budget) -> list[Figure]:
    """The figures of sekv in a bench.json, one per length.

    Raises:
        DataError: there are none, or they belong to another backbone, dtype or budget.
    """
    from sekv.bench.figures import Folder

    folder = Folder.open(path.parent) if path.is_file() else None
    if folder is None:
        raise DataError(f"'{path}' is no file; give the bench.json of sekv bench decode or memory")
    wanted = budget.share if budget.share is not None else budget.rows
    found: dict[int, Figure] = {}
    for command, setting in folder.settings:
        if (setting.backbone.removeprefix("config:"), setting.dtype) != (backbone, dtype):
            continue
        for figure in folder.figures:
            named = figure.policy.partition("[")[0] == "sekv"
            if named and figure.what == command and figure.budget == wanted:
                found.setdefault(figure.length, figure)
    figures = [found[length] for length in sorted(found) if found[length].moved_bytes_per_token is not None]
    if not figures:
        raise DataError(
            f"'{path}' holds no decode or memory figures of sekv on '{backbone}' in {dtype} at a budget of {budget}"
        )
    return figures


def _moved_per_row(measured: Sequence[Figure], footprints: Sequence[Footprint]) -> float | None:
    """Bytes moved per token and row left for zooming, of the longest context that was measured."""
    if not measured or not footprints[-1].zoom_rows:
        return None
    return (measured[-1].moved_bytes_per_token or 0.0) / footprints[-1].zoom_rows


def _new_table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _table(outlooks: Sequence[Outlook]) -> Table:
    from sekv.bench.report import format_seconds
    from sekv.evaluation.report import format_bytes

    table = _new_table("One context, and each token decoded after it")
    for column in ("tokens", "full", "resident", "host", "moved", "added", "saved", "break-even"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in outlooks:
        bandwidth = "never" if not one.break_even else f"{format_bytes(one.break_even)}/s"
        table.add_row(
            f"{one.footprint.tokens:,}",
            *(format_bytes(n) for n in (one.footprint.full_bytes, one.footprint.resident_bytes)),
            *(format_bytes(n) for n in (one.footprint.host_bytes, one.moved_bytes)),
            *(format_seconds(seconds) for seconds in (one.added_seconds, max(0.0, one.saved_seconds))),
            "always" if math.isinf(one.break_even) else bandwidth,
        )
    return table


def _agreement(measured: Sequence[Figure], footprints: Sequence[Footprint]) -> Table:
    from sekv.evaluation.report import format_bytes

    table = _new_table("Predicted bytes over measured ones")
    for column in ("tokens", "resident", "predicted", "over", "host", "predicted", "over"):
        table.add_column(column, justify="right", no_wrap=True)
    for figure, footprint in zip(measured, footprints, strict=True):
        cells = []
        for found, foreseen in (
            (figure.resident_bytes or 0, footprint.resident_bytes),
            (figure.host_bytes or 0, footprint.host_bytes),
        ):
            over = f"{foreseen / found:.3f}" if found else ""
            cells += [format_bytes(found), format_bytes(foreseen), over]
        table.add_row(f"{figure.length:,}", *cells)
    return table


def _print_assumptions(
    console: Console, options: argparse.Namespace, measured: bool, longest: int, positions: int
) -> None:
    moved = (
        "as measured, in proportion to the rows left for zooming"
        if measured
        else f"{options.expansion:.0%} of the rows left for zooming, {options.reuse:.0%} of them fetched before"
    )
    console.print("Assumptions")
    for line in (
        f"moved per token: {moved}",
        f"added: on a link of {options.link_bandwidth}, nothing hidden behind computing; saved: by reading what is "
        f"resident instead of the full cache at {options.memory_bandwidth}",
        "break-even: the bandwidth of the link below which the full cache would be faster",
        "host: bases, where spans are long enough for them, with all their components; a trained gate leaves some out",
        "one sequence; the question and the tokens decoded come on top, exactly, as with the full cache",
    ):
        console.print(f"- {line}", markup=False, soft_wrap=True)
    if longest > positions:
        console.print(f"- contexts beyond {positions:,} tokens exceed the positions of this backbone", soft_wrap=True)
