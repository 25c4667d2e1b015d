"""The tables of experiments, made of the answers that their runs left."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sekv.errors import DataError
from sekv.evaluation.page_data import Row, needle_grids
from sekv.evaluation.records import Difference, Record, Result, paired_differences, summarise
from sekv.evaluation.report import budget_label, format_bytes
from sekv.evaluation.reproduce.tables import Table

_MISSING = "-"
_INTERVAL = "mean and 95% bootstrap interval"


def scores_table(records: Sequence[Record], title: str) -> Table:
    """One row per policy and budget, one column per task, and the mean over the tasks that a row has."""
    results = summarise(records)
    tasks = list(dict.fromkeys(result.task for result in results))
    found = {(result.policy, result.budget, result.task): result for result in results}
    rows = []
    for policy, budget in sorted(dict.fromkeys((r.policy, r.budget) for r in results), key=lambda pair: pair[1]):
        cells = [found.get((policy, budget, task)) for task in tasks]
        # Perplexities have another scale: their columns are not part of the mean.
        scores = [cell.score for cell in cells if cell is not None and cell.perplexity is None]
        mean = f"{fmean(scores):.1f}" if scores else _MISSING
        rows.append([policy, budget_label(budget), *map(_cell, cells), mean])
    n = f"n = {min(r.n for r in results)}" if len({r.n for r in results}) == 1 else "n differs"
    return Table(title, ["policy", "budget", *tasks, "mean"], rows, 2, f"{_INTERVAL}; {n} per task")


def _cell(result: Result | None) -> str:
    if result is None:
        return _MISSING
    if result.perplexity is not None and result.ppl_ratio is not None:
        return f"{result.perplexity:.3g} ({result.ppl_ratio:.3f}x)"
    return f"{result.score:.1f} [{result.score_low:.0f}, {result.score_high:.0f}]"


def needles_table(records: Sequence[Record], title: str) -> Table:
    """Score by depth and length, a block of rows per policy and budget."""
    grids = needle_grids(records)
    if not grids:
        raise DataError("no answer has a depth: needles are shown of niah and of RULER's single needles")
    lengths = sorted({length for grid in grids for length in grid["lengths"]})
    rows = []
    for grid in grids:
        for row in grid["rows"]:
            cells = dict(zip(grid["lengths"], row["cells"], strict=True))
            scores = [f"{cell['score']:.0f}" if (cell := cells.get(length)) else _MISSING for length in lengths]
            rows.append([grid["policy"], budget_label(grid["budget"]), row["depth"], *scores])
    return Table(
        title, ["policy", "budget", "depth", *map(str, lengths)], rows, 3, "mean score by tokens of the prompt"
    )


def differences(records: Sequence[Record], pairs: Mapping[str, str]) -> list[Difference]:
    """Every policy against its own baseline on the same samples, in the order of `pairs`."""
    found = []
    for policy, baseline in pairs.items():
        both = [record for record in records if record.policy in (policy, baseline)]
        found += sorted(paired_differences(both, baseline), key=lambda one: (one.task, one.budget))
    return found


def pairs_table(records: Sequence[Record], pairs: Mapping[str, str], title: str) -> Table:
    """Paired differences, with the ratio r of what is removed."""
    rows = [
        [
            one.policy,
            one.baseline,
            one.task,
            removed_label(one.budget),
            f"{one.difference:+.1f} [{one.low:+.1f}, {one.high:+.1f}]",
            *(str(n) for n in (one.wins, one.losses, one.n)),
        ]
        for one in differences(records, pairs)
    ]
    columns = ["policy", "against", "task", "r", "difference", "wins", "losses", "n"]
    return Table(title, columns, rows, 3, "score minus that of the other on the same samples, 95% interval over pairs")


def removed_label(budget: float | int) -> str:
    """The share r of a context that a budget removes; a number of rows as it is."""
    return f"{1 - budget:.2f}" if budget <= 1 else budget_label(budget)


def zooms_table(rates: Sequence[Row], title: str) -> Table:
    """How often each head of each layer zooms in, one row per layer."""
    most = max((len(layer["rates"]) for table in rates for layer in table["layers"]), default=0)
    if not most:
        raise DataError("no answer was traced that zooms into spans; this view needs a policy such as sekv and trace")
    rows = []
    for table in rates:
        for layer in table["layers"]:
            cells = [f"{100 * rate:.2f}" for rate in layer["rates"]]
            cells += [_MISSING] * (most - len(cells))
            rows.append([table["policy"], table["budget_label"], str(layer["number"]), *cells])
    columns = ["policy", "budget", "layer", *(f"head {i}" for i in range(most))]
    return Table(title, columns, rows, 3, "percent of the spans that a new token zooms into, mean over tokens")


_BENCH: dict[str, Callable[[str], str]] = {
    "what": str,
    "policy": str,
    "length": str,
    "budget": lambda text: budget_label(float(text) if float(text) <= 1 else int(float(text))),
    "median_seconds": lambda text: f"{float(text):.4g}",
    "ratio_to_full": lambda text: f"{float(text):.3g}x",
    "resident_bytes": lambda text: format_bytes(float(text)),
    "host_bytes": lambda text: format_bytes(float(text)),
    "peak_bytes": lambda text: format_bytes(float(text)),
    "moved_bytes_per_token": lambda text: format_bytes(float(text)),
    "new_tokens": str,
}


def bench_table(path: Path, title: str) -> Table:
    """What `sekv bench` wrote to its CSV, as far as its columns are known here.

    Raises:
        DataError: there is no such file, or it has none of the columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            listed = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}, which sekv bench should have written, cannot be read: {error.strerror}") from None
    columns = [name for name in _BENCH if listed and any(row.get(name) for row in listed)]
    if "policy" not in columns:
        raise DataError(f"{path} holds no figures of sekv bench")
    rows = [[_BENCH[name](text) if (text := row.get(name)) else _MISSING for name in columns] for row in listed]
    labels = sum(name in ("what", "policy") for name in columns)
    return Table(title, [name.replace("_", " ") for name in columns], rows, labels)
