"""The figures of experiments that `plot_scores` does not draw: needle and zoom heatmaps, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sekv.evaluation.page_data import Row
from sekv.evaluation.plots import COLOURS, MARKERS
from sekv.evaluation.records import Difference, replacing
from sekv.evaluation.report import budget_label
from sekv.evaluation.reproduce.views import removed_label

_COLUMNS = 3
_MOST_TICKS = 8


def plot_needles(grids: Sequence[Row], title: str, path: Path) -> None:
    """A panel per policy and budget: depth down, tokens across, coloured by score.

    Args:
        grids: from `needle_grids`, at least one.
        title: above all.
        path: a .png file; replaced at once or not at all.
    """
    figure, panels = _panels(len(grids), 3.4, 2.7)
    image = None
    for panel, grid in zip(panels, grids, strict=False):
        cells = [[math.nan if cell is None else cell["score"] for cell in row["cells"]] for row in grid["rows"]]
        image = panel.imshow(cells, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        panel.set_title(f"{grid['policy']}, {budget_label(grid['budget'])}", fontsize="medium", parse_math=False)
        _ticks(panel, "x", [str(length) for length in grid["lengths"]])
        _ticks(panel, "y", [row["depth"] for row in grid["rows"]])
        panel.set_xlabel("tokens")
        panel.set_ylabel("depth")
    assert image is not None
    figure.colorbar(image, ax=panels, label="score (%)", shrink=0.8)
    _save(figure, title, path)


def plot_zooms(rates: Sequence[Row], title: str, path: Path) -> None:
    """A panel per policy and budget: layers down, heads across, coloured by how often a head zooms into a span.

    Args:
        rates: from `zoom_rates`, at least one.
        title: above all.
        path: a .png file; replaced at once or not at all.
    """
    figure, panels = _panels(len(rates), 3.4, 4.0)
    top = max(table["top"] for table in rates)
    image = None
    for panel, table in zip(panels, rates, strict=False):
        cells = np.array([layer["rates"] for layer in table["layers"]]) * 100
        image = panel.imshow(cells, vmin=0, vmax=max(100 * top, 1e-3), cmap="cividis", aspect="auto")
        panel.set_title(f"{table['policy']}, {table['budget_label']}", fontsize="medium", parse_math=False)
        _ticks(panel, "x", [str(i) for i in range(cells.shape[1])])
        _ticks(panel, "y", [str(layer["number"]) for layer in table["layers"]])
        panel.set_xlabel("KV head" if table["heads"] == "kv" else "query head")
        panel.set_ylabel("layer")
    assert image is not None
    figure.colorbar(image, ax=panels, label="spans zoomed into per token (%)", shrink=0.8)
    _save(figure, title, path)


def plot_pairs(found: Sequence[Difference], title: str, path: Path) -> None:
    """A panel per pair: the difference by ratio r with its interval, one line per task.

    Args:
        found: paired differences, at least one.
        title: above all.
        path: a .png file; replaced at once or not at all.
    """
    pairs = list(dict.fromkeys((one.policy, one.baseline) for one in found))
    tasks = list(dict.fromkeys(one.task for one in found))
    budgets = sorted({one.budget for one in found}, key=lambda budget: (budget > 1, -budget))
    place = {budget: i for i, budget in enumerate(budgets)}
    figure, panels = _panels(len(pairs), 3.8, 3.0)
    for panel, (policy, baseline) in zip(panels, pairs, strict=False):
        panel.axhline(0.0, color="#666666", linewidth=1.0)
        for i, task in enumerate(tasks):
            points = [one for one in found if (one.policy, one.baseline, one.task) == (policy, baseline, task)]
            if not points:
                continue
            shift = 0.06 * (i - (len(tasks) - 1) / 2)
            panel.errorbar(
                [place[one.budget] + shift for one in points],
                [one.difference for one in points],
                # An interval of the bootstrap may leave the mean outside by rounding.
                yerr=[
                    [max(0.0, one.difference - one.low) for one in points],
                    [max(0.0, one.high - one.difference) for one in points],
                ],
                linestyle="none" if len(points) == 1 else "-",
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                linewidth=1.4,
                elinewidth=0.9,
                capsize=2,
                label=task,
            )
        panel.set_title(f"{policy} minus {baseline}", fontsize="medium", parse_math=False)
        panel.set_xticks(range(len(budgets)), [removed_label(budget) for budget in budgets])
        panel.set_xlabel("r, share removed")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("difference of scores")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))), frameon=False)
    _save(figure, title, path)


def _panels(n: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with `n` panels, each of `width` x `height` inches."""
    columns = min(_COLUMNS, n)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(1.4 + width * columns, 0.9 + height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel in panels[n:]:
        panel.set_axis_off()
    return figure, panels


def _ticks(panel: Axes, axis: str, labels: Sequence[str]) -> None:
    """As many of the labels as can be read."""
    places = range(0, len(labels), math.ceil(len(labels) / _MOST_TICKS))
    {"x": panel.set_xticks, "y": panel.set_yticks}[axis](list(places), [labels[i] for i in places])


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize="large", parse_math=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=160)
