"""Figures of an evaluation, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sekv.evaluation.records import Result, replacing
from sekv.evaluation.report import budget_label, how_compressed

_COLUMNS = 3
_LETTERS_PER_INCH = 12
_REFERENCE = "full"  # keeps everything whatever the budget: a line across, not a curve
# Okabe and Ito: told apart with any colour vision, and in print by the markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_scores(results: Sequence[Result], path: Path) -> None:
    """Score by budget, one panel per task and one line per policy, with bars of one standard error.

    Args:
        results: of one evaluation.
        path: a .png file; replaced at once or not at all.
    """
    tasks = list(dict.fromkeys(result.task for result in results))
    policies = list(dict.fromkeys(result.policy for result in results))
    curves = [policy for policy in policies if policy != _REFERENCE]
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(1.2 + 4.0 * columns, 1.1 + 3.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for panel, task in zip(panels, tasks, strict=False):
        _draw(panel, [result for result in results if result.task == task], curves)
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    for panel in panels[::columns]:
        panel.set_ylabel("score (%)")
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    room = _LETTERS_PER_INCH * figure.get_figwidth() / (max(map(len, handles)) + 7)  # 7: the marker before each label
    ncols = max(1, min(len(handles), int(room)))
    figure.set_figheight(figure.get_figheight() + 0.23 * (math.ceil(len(handles) / ncols) - 1))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False)
    figure.suptitle(f"Score by budget, {how_compressed(results[0].query_aware)}", fontsize="large")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=160)


def _draw(panel: Axes, results: Sequence[Result], curves: Sequence[str]) -> None:
    budgets = sorted({result.budget for result in results})
    # Equal steps: budgets are often 5, 10, 20, 100%, and a mix of shares and rows has no common scale.
    place = {budget: i for i, budget in enumerate(budgets)}
    reference = [result.score for result in results if result.policy == _REFERENCE]
    if reference:
        panel.axhline(
            reference[0], color="#666666", linestyle="--", linewidth=1.3, label=f"{_REFERENCE} cache", zorder=1
        )
    for i, policy in enumerate(curves):
        points = sorted((result for result in results if result.policy == policy), key=lambda result: result.budget)
        # A little sideways, so that equal scores do not hide one another.
        shift = 0.05 * (i - (len(curves) - 1) / 2)
        panel.errorbar(
            [place[point.budget] + shift for point in points],
            [point.score for point in points],
            yerr=[point.score_stderr for point in points],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=6,
            linewidth=1.6,
            elinewidth=0.9,
            capsize=2,
            label=policy,
        )
    panel.set_title(f"{results[0].task} (n = {results[0].n})", fontsize="medium", parse_math=False)
    panel.set_xticks(range(len(budgets)), [budget_label(budget) for budget in budgets])
    panel.set_xlim(-0.4, len(budgets) - 0.6)
    panel.set_ylim(-4, 104)
    panel.set_xlabel("budget (rows kept or attended)")
    panel.grid(axis="y", color="#dddddd", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
