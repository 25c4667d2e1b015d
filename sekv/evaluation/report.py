"""What a person sees of an evaluation: progress while it runs, a table when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sekv.evaluation.diagnosis import CAUSES
from sekv.evaluation.records import Difference, Record, Result

_UNITS = ("B", "KB", "MB", "GB", "TB")


class _Rate(ProgressColumn):
    """Answers per second, or seconds per answer when that is slow."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("-- s/answer", style="progress.data.speed")
        text = f"{speed:.1f} answers/s" if speed >= 1 else f"{1 / speed:.1f} s/answer"
        return Text(text, style="progress.data.speed")


def answer_progress(console: Console) -> Progress:
    """A progress bar that counts answers, with their rate and the time left."""
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=300.0,
    )


def results_table(results: Sequence[Result], task: str) -> Table:
    """The results of one task, one row per budget and policy, for a terminal of 80 columns."""
    chosen = sorted((result for result in results if result.task == task), key=lambda result: result.budget)
    title = Text(f"{task}, n = {chosen[0].n}, {how_compressed(chosen[0].query_aware)}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption = "rows: per query, layer and KV head; moved: from the host per token; s: compression and answer"
    table.add_column("policy", overflow="fold", min_width=14)
    perplexity = chosen[0].perplexity is not None
    for name in ("budget", "ppl (to full)" if perplexity else "score", "rows", "resident", "host", "moved", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, result in enumerate(chosen):
        table.add_row(
            Text(result.policy),  # brackets of options are no markup
            budget_label(result.budget),
            score_label(result),
            f"{result.rows:.0f}",
            *(format_bytes(b) for b in (result.resident_bytes, result.host_bytes, result.moved_bytes_per_token)),
            f"{result.seconds:.2f}",
            end_section=i + 1 == len(chosen) or chosen[i + 1].budget != result.budget,
        )
    return table


def diagnosis_table(records: Iterable[Record]) -> Table:
    """How many failed answers were lost where, by task, policy and budget."""
    counts = Counter((r.task, r.policy, budget_label(r.budget), r.diagnosis) for r in records if r.diagnosis)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = Text("where answers were lost" if counts else "no failed answer to diagnose")
    for name in ("task", "policy", "budget", "lost at", "because"):
        table.add_column(name, overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    for (task, policy, budget, cause), n in sorted(counts.items()):
        table.add_row(task, Text(policy), budget, cause, CAUSES[str(cause)], str(n))
    return table


def score_label(result: Result) -> str:
    """The mean score and its standard error, or the perplexity and its ratio to that of the full cache."""
    if result.perplexity is not None and result.ppl_ratio is not None:
        return f"{result.perplexity:.3g} ({result.ppl_ratio:.3f}x)"
    error = f" ± {result.score_stderr:.0f}" if result.n > 1 else ""
    return f"{result.score:.1f}{error}"


def differences_table(differences: Sequence[Difference]) -> Table:
    """Every policy against the baseline, for a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = Text(f"score minus that of {differences[0].baseline}" if differences else "no sample to compare on")
    table.caption = "same samples, 95% bootstrap interval over pairs"
    for name in ("task", "policy"):
        table.add_column(name, overflow="fold")
    for name in ("budget", "difference", "wins", "losses", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in differences:
        table.add_row(
            Text(one.task),
            Text(one.policy),
            budget_label(one.budget),
            f"{one.difference:+.1f} [{one.low:+.1f}, {one.high:+.1f}]",
            *(str(n) for n in (one.wins, one.losses, one.n)),
        )
    return table


def how_compressed(query_aware: bool) -> str:
    """The mode in words, for titles: every result says which."""
    return "question compressed with the context" if query_aware else "compressed before the question is known"


def budget_label(budget: float | int) -> str:
    """`10%` for a share, `409 rows` for rows."""
    return f"{100 * budget:g}%" if budget <= 1 else f"{budget} rows"


def format_bytes(n: float) -> str:
    """Bytes with three digits and a decimal unit: `1.23 MB`."""
    value, unit = float(n), _UNITS[0]
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000.0
    return f"{value:.3g} {unit}"
