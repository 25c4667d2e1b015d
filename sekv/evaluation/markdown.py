"""The scores of an evaluation as a table in Markdown, for documents: a row per policy, a column per task and budget."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sekv.evaluation.records import Result
from sekv.evaluation.report import budget_label, format_bytes, how_compressed, score_label


def scores_markdown(results: Sequence[Result]) -> str:
    """A table of `results`, not empty, in their order; bytes are means over the tasks."""
    policies = list(dict.fromkeys(result.policy for result in results))
    columns = {(result.task, result.budget): result.n for result in results}
    budgets = sorted({result.budget for result in results})
    cells = {(result.policy, result.task, result.budget): score_label(result) for result in results}
    head = ["policy", *(f"{task}, n = {n}, {budget_label(budget)}" for (task, budget), n in columns.items())]
    head += [f"{what}, {budget_label(budget)}" for budget in budgets for what in ("resident", "moved per token")]
    lines = [f"Scores and their standard errors, {how_compressed(results[0].query_aware)}.", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for policy in policies:
        row = [f"`{policy}`", *(cells.get((policy, *column), "") for column in columns)]
        for budget in budgets:
            mine = [result for result in results if (result.policy, result.budget) == (policy, budget)]
            for name in ("resident_bytes", "moved_bytes_per_token"):
                row.append(format_bytes(fmean(getattr(result, name) for result in mine)) if mine else "")
        lines.append(_line(row))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
