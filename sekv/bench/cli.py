"""`sekv bench`: time and memory of the policies, side by side in one process.

Nothing heavy is imported before the arguments are read, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sekv.budget import Budget
from sekv.errors import DataError

if TYPE_CHECKING:
    from sekv.bench.figures import Figure
    from sekv.bench.session import Session
    from sekv.bench.workload import Workload

_BACKBONE = "smollm2-135m"
_EPILOG = """\
examples:
  sekv bench decode --policies full,sekv,nestedkv --adapter checkpoints/smollm2-135m --lengths 2048,4096,8000 \\
      --budget 0.1 --repeats 3 --output results/speed
  sekv bench decode --policies full,sekv --adapter checkpoints/smollm2-135m --lengths 4096 --new-tokens 256 \\
      --output results/speed
  sekv bench memory --backbone config:meta-llama/Llama-3.1-8B --adapter untrained --policies full,'sekv[fill=true]' \\
      --lengths 8192,32768,131072 --output results/memory

The full cache is always measured too: ratios are to what it took right beside, in the same process. A backbone
config:NAME has random weights: NAME is a folder, a config.json, a Hub id or one of the published architectures that
come with sekv. docs/speed.md says what is counted.

DIR gets bench.json and bench.csv (one entry per policy and length), setting.json (what they were measured on) and
bench.png. Another command adds its figures to those that DIR holds and replaces its own."""

_COMMANDS = {
    "prefill": "reading a context, building each memory, scoring its tokens",
    "decode": "one decode step behind a context; with --new-tokens from the prompt to the last token",
    "memory": "bytes on the compute tier and on the host, and bytes moved per token",
}


def read_lengths(text: str) -> list[int]:
    """Reads `2048,4096`.

    Raises:
        DataError: a part is no whole number above 0.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise DataError(f"--lengths '{text}' names no lengths; give numbers of tokens such as 2048,4096")
    return sorted({int(part) for part in parts})


def build_parser() -> argparse.ArgumentParser:
    """The parser of `sekv bench`; its subcommand `train` has one of its own."""
    parser = argparse.ArgumentParser(
        prog="sekv bench",
        description="Measure time and memory of policies, interleaved in one process; medians, and ratios to full.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="WHAT", required=True, title="what")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_shared_flags(command)
        command.add_argument("--policies", required=True, metavar="P[,P...]", help="as for sekv evaluate --policy")
        command.add_argument(
            "--adapter", metavar="A", help="for sekv: a folder, a Hub id, or 'untrained' for a fresh one"
        )
        if name != "prefill":
            command.add_argument("--steps", type=int, default=32, metavar="N", help="decode steps (default: 32)")
        if name == "decode":
            command.add_argument(
                "--new-tokens", type=int, default=0, metavar="N", help="also measure prompt to end, N tokens decoded"
            )
    commands.add_parser("train", add_help=False, help="an optimiser step over a plain prefill of the same tokens")
    return parser


def add_shared_flags(command: argparse.ArgumentParser) -> None:
    """The flags of all commands."""
    command.add_argument("--backbone", default=_BACKBONE, metavar="B", help=f"(default: {_BACKBONE})")
    command.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="(default: auto)"
    )
    command.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N (default: auto)")
    command.add_argument("--lengths", required=True, metavar="N[,N...]", help="tokens of the contexts")
    command.add_argument("--budget", default="0.1", metavar="X", help="share of the context, or rows (default: 0.1)")
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    command.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the figures")
    command.add_argument("--profile", action="store_true", help="also write where time goes to DIR/profile-*.txt")


def check_counts(options: argparse.Namespace) -> None:
    """Refuses counts that measure nothing.

    Raises:
        DataError: one of them is too small.
    """
    for name, least in (("repeats", 1), ("steps", 1), ("new_tokens", 0)):
        value = getattr(options, name, least)
        if value < least:
            raise DataError(f"--{name.replace('_', '-')} {value} measures nothing; give {least} or more")


def main(argv: Sequence[str]) -> int:
    """Runs `sekv bench`.

    Args:
        argv: arguments behind `sekv bench`.

    Returns:
        0.

    Raises:
        SeKVError: a mistake that one line explains.
    """
    options = build_parser().parse_args(list(argv))
    check_counts(options)
    lengths, budget = read_lengths(options.lengths), Budget.parse(options.budget)

    from rich.console import Console
    from rich.markup import escape

    from sekv.bench.figures import Setting
    from sekv.bench.session import Session
    from sekv.bench.workload import Workload, open_adapter, open_backbone, open_policies
    from sekv.policies.registry import split_specs

    specs = split_specs(options.policies)
    session = Session(options.command, options.output, options.profile)
    with Console(stderr=True).status(f"opening {escape(options.backbone)}"):
        backbone = open_backbone(options.backbone, options.dtype, options.device)
        policies = open_policies(specs, open_adapter(options.adapter, backbone))
    work = Workload(backbone, policies, budget)
    setting = Setting.here(backbone, options.repeats, getattr(options, "steps", 0), options.adapter)
    session.run(setting, lengths, _measurement(options, work, session, lengths), Console())
    return 0


def _measurement(
    options: argparse.Namespace, work: Workload, session: Session, lengths: Sequence[int]
) -> Callable[[int], list[Figure]]:
    """What one length is measured by, once it is clear that every length fits the backbone."""
    from sekv.bench.measure import WARM_STEPS, measure_decode, measure_end_to_end, measure_memory, measure_prefill

    if options.command == "prefill":
        work.check(lengths, 0)
        return partial(measure_prefill, work, repeats=options.repeats, profile=session.profile)
    work.check(lengths, max(WARM_STEPS + options.steps, getattr(options, "new_tokens", 0)))
    if options.command == "memory":
        return partial(measure_memory, work, steps=options.steps)

    def decode(length: int) -> list[Figure]:
        figures = measure_decode(work, length, options.repeats, options.steps, session.profile)
        if options.new_tokens:
            figures += measure_end_to_end(work, length, options.repeats, options.new_tokens)
        return figures

    return decode
