"""Figures of `sekv bench` for people: a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sekv.bench.figures import Figure
from sekv.evaluation.plots import COLOURS, MARKERS
from sekv.evaluation.records import replacing
from sekv.evaluation.report import budget_label, format_bytes

_TITLES = {
    "prefill": "reading the context and building its memory",
    "build": "building the memory, over a plain prefill",
    "score": "scoring all tokens, over a plain prefill",
    "decode": "one decode step",
    "end_to_end": "prefill, building the memory and decoding",
    "memory": "live tensors",
    "train": "an optimiser step, over a plain prefill",
}


def figures_table(figures: Sequence[Figure], what: str) -> Table:
    """The figures of one kind, one row per length and policy, for a terminal of 80 columns."""
    chosen = sorted((figure for figure in figures if figure.what == what), key=lambda figure: figure.length)
    after = f" {chosen[0].new_tokens} tokens" if chosen[0].new_tokens else ""
    title = f"{what}: {_TITLES[what]}{after}, budget {budget_label(chosen[0].budget)}"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold", min_width=12)
    peaks = any(figure.peak_bytes is not None for figure in chosen)
    names = ("tokens", "time", "to full", "resident", "host", "moved", "reused", *(["peak"] if peaks else []))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for i, figure in enumerate(chosen):
        table.add_row(
            Text(figure.policy),
            f"{figure.length:,}",
            "" if figure.median_seconds is None else format_seconds(figure.median_seconds),
            "" if figure.ratio_to_full is None else f"{figure.ratio_to_full:.3f}",
            *(_bytes(n) for n in (figure.resident_bytes, figure.host_bytes, figure.moved_bytes_per_token)),
            "" if figure.hit_rate is None else f"{figure.hit_rate:.0%}",
            *([_bytes(figure.peak_bytes)] if peaks else []),
            end_section=i + 1 == len(chosen) or chosen[i + 1].length != figure.length,
        )
    return table


def _bytes(n: float | None) -> str:
    return "" if n is None else format_bytes(n)


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and a unit: `12.3 ms`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def plot_figures(figures: Sequence[Figure], title: str, path: Path) -> None:
    """By length and policy, one row of panels for each kind of figure: the thing itself, and its ratio to `full`.

    Args:
        figures: at least one.
        title: what they were measured on.
        path: a .png file; replaced at once or not at all.
    """
    kinds = list(dict.fromkeys(figure.what for figure in figures))
    policies = list(dict.fromkeys(figure.policy for figure in figures))
    canvas = Canvas(figsize=(9.2, 1.0 + 2.9 * len(kinds)), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(len(kinds), 2, squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        _draw(row[0], row[1], [figure for figure in figures if figure.what == kind], policies)
    handles = {
        label: handle
        for panel in panels.flatten()
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    canvas.suptitle(title, fontsize="small", parse_math=False)
    with replacing(path) as temporary:
        canvas.savefig(temporary, format="png", dpi=160)


def _draw(left: Axes, right: Axes, figures: Sequence[Figure], policies: Sequence[str]) -> None:
    what = figures[0].what
    for i, policy in enumerate(policies):
        points = sorted((f for f in figures if f.policy == policy), key=lambda f: f.length)
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linewidth": 1.6,
        }
        lengths = [f.length for f in points]
        values = [f.resident_bytes if what == "memory" else f.median_seconds for f in points]
        for axes, drawn in ((left, values), (right, [f.ratio_to_full for f in points])):
            axes.plot(lengths, [math.nan if x is None else float(x) for x in drawn], label=policy, **style)
    scale = format_bytes if what == "memory" else format_seconds
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scale(value)))
    left.set_title(f"{what}: {_TITLES[what]}", fontsize="medium", loc="left")
    right.set_title("ratio", fontsize="medium", loc="left")
    right.axhline(1.0, color="#666666", linestyle="--", linewidth=1.0, zorder=1)
    ticks = sorted({f.length for f in figures})
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("tokens of the context")
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
