"""`sekv reproduce`: runs an experiment and shows its table and figure; stopped and run again, it goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from sekv.errors import DataError
from sekv.evaluation.benchmarks.task import BENCHMARKS, BenchmarkTask
from sekv.evaluation.journal import SAMPLES, read_records
from sekv.evaluation.page_data import needle_grids
from sekv.evaluation.page_traces import read_traces, zoom_rates
from sekv.evaluation.plots import plot_scores
from sekv.evaluation.records import Record, summarise
from sekv.evaluation.reproduce import figures, views
from sekv.evaluation.reproduce.experiment import Experiment, Scale, find_experiments, folder_name
from sekv.evaluation.reproduce.tables import Table
from sekv.evaluation.runner import Evaluation
from sekv.evaluation.session import Session
from sekv.evaluation.sweep import Sweep

FIGURE = "figure.png"
_BENCH_TABLE, _BENCH_FIGURE = "bench.csv", "bench.png"


@dataclass(frozen=True)
class Reproduction:
    """An experiment at one scale, and where its results go.

    Attributes:
        experiment: what is shown.
        scale: what is run.
        output: folder; every run has one of its own in it.
        data: folder with published files of benchmarks, or None for the Hub.
        restart: throw away the answers that are there.
    """

    experiment: Experiment
    scale: Scale
    output: Path
    data: Path | None = None
    restart: bool = False

    def run(self, console: Console, errors: Console) -> Table | None:
        """Runs what is missing, then writes table.csv, table.md and figure.png.

        Args:
            console: gets the tables.
            errors: gets progress.

        Returns:
            The table; None while other processes are at work.

        Raises:
            SeKVError: of the kind that names what is wrong; before anything is loaded where that is possible.
        """
        if self.scale.bench:
            return self._show_bench(console)
        planned = self.plan()
        finished = False
        for name, (evaluation, session) in planned.items():
            if name:
                errors.print(f"[bold]{escape(name)}[/bold]")
            # The process that ends the last run does so after every process has ended the others.
            finished = session.run(evaluation, console, errors) is not None
        return self._show(console) if finished else None

    def plan(self) -> dict[str, tuple[Evaluation, Session]]:
        """Checks all runs before the first one begins: files, policies, adapters, and that benchmarks can be had."""
        planned = {}
        for name, sweep in self.scale.sweeps.items():
            tasks = [_with_data(task, self.data) for task in sweep.tasks]
            sweep = replace(sweep, tasks=tasks)
            _check_adapter(sweep, self.experiment.name, name)
            planned[name] = sweep.plan(self._folder(name)), sweep.session(self.restart)
        tried: dict[str, BenchmarkTask] = {}
        for evaluation, _ in planned.values():
            tried |= {task.names[0]: task for task in evaluation.tasks if isinstance(task, BenchmarkTask)}
        for task in tried.values():
            try:
                task.check()
            except DataError as error:
                raise DataError(f"{error}; or give all of them at once: --data FOLDER") from None
        return planned

    def _folder(self, name: str) -> Path:
        return self.output / folder_name(name) if name else self.output

    def records(self) -> list[Record]:
        """The answers of all runs; those of a named run under its name."""
        found = []
        for name, sweep in self.scale.sweeps.items():
            wanted = set(sweep.policies)
            alone = len(wanted) == 1
            for record in read_records(self._folder(name) / SAMPLES):
                if record.policy in wanted:
                    label = record.policy if not name else name if alone else f"{name}: {record.policy}"
                    found.append(replace(record, policy=label))
        return found

    def _show(self, console: Console) -> Table:
        records, title, figure = self.records(), self.experiment.title, self.output / FIGURE
        view = self.experiment.view
        if view == "needles":
            table = views.needles_table(records, title)
            figures.plot_needles(needle_grids(records), title, figure)
        elif view == "pairs":
            table = views.pairs_table(records, self.experiment.pairs, title)
            figures.plot_pairs(views.differences(records, self.experiment.pairs), title, figure)
        elif view == "zooms":
            rates = [one for name in self.scale.sweeps for one in _rates(self._folder(name))]
            table = views.zooms_table(rates, title)
            figures.plot_zooms(rates, title, figure)
        else:
            table = views.scores_table(records, title)
            plot_scores(summarise(records), figure)
        return self._written(table, figure, console)

    def _show_bench(self, console: Console) -> Table:
        for one in self.scale.bench:
            run_bench(one, self.output)
        table = views.bench_table(self.output / _BENCH_TABLE, self.experiment.title)
        return self._written(table, self.output / _BENCH_FIGURE, console)

    def _written(self, table: Table, figure: Path, console: Console) -> Table:
        paths = table.write(self.output)
        console.print(table.for_terminal())
        console.print(f"written to {escape(', '.join(str(path) for path in (*paths, figure)))}")
        return table


def run_bench(options: dict[str, Any], output: Path) -> None:
    """One command of `sekv bench`, which writes bench.csv and bench.png to `output`."""
    from sekv.bench.cli import main

    arguments = [str(options["command"])]
    for key, value in options.items():
        if key != "command":
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments += [f"--{key.replace('_', '-')}", text]
    main([*arguments, "--output", str(output)])


def list_experiments(folder: Path | None = None) -> Table:
    """What can be reproduced."""
    rows = []
    for path in find_experiments(folder).values():
        one = Experiment.read(path)
        names = [sweep.backbone for sweep in one.paper.sweeps.values()]
        names += [command["backbone"] for command in one.paper.bench if "backbone" in command]
        first, *others = dict.fromkeys(name.rpartition("/")[2] for name in names)
        rows.append([one.name, one.title, one.source, f"{first} and {len(others)} more" if others else first])
    columns = ["name", "what", "published as", "at paper scale"]
    return Table("experiments", columns, rows, len(columns), "sekv reproduce NAME [--paper-scale]")


def _rates(folder: Path) -> list[dict[str, Any]]:
    keys = {record.key for record in read_records(folder / SAMPLES)}
    return zoom_rates(read_traces(folder, keys))


def _check_adapter(sweep: Sweep, experiment: str, run: str) -> None:
    """A missing adapter is said with what makes it.

    Raises:
        DataError: it is named as a folder that does not exist.
    """
    if sweep.adapter is None or Path(sweep.adapter).exists() or not sweep.adapter.startswith(("checkpoints/", "runs/")):
        return
    whose = f"run '{run}' of {experiment}" if run else experiment
    raise DataError(
        f"{whose} needs the adapter '{sweep.adapter}', which is not there; train one (sekv train, sekv export: the "
        "experiment's file says how), or give --adapter DIR"
    )


def _with_data(task: str, data: Path | None) -> str:
    """A benchmark's task with the folder of its published files, where it has none yet.

    `FOLDER/BENCHMARK` goes before FOLDER itself, so that one folder can hold several benchmarks.
    """
    benchmark = re.split(r"[:\[]", task)[0]
    if data is None or benchmark not in BENCHMARKS or "data=" in task:
        return task
    folder = data / benchmark if (data / benchmark).exists() else data
    head, bracket, rest = task.partition("[")
    return f"{head}[data={folder},{rest}" if bracket else f"{head}[data={folder}]"


def reproduce(
    experiment: Experiment,
    scale: str,
    output: Path | None,
    console: Console,
    errors: Console,
    *,
    data: Path | None = None,
    restart: bool = False,
    **options: Any,
) -> Table | None:
    """Runs an experiment.

    Args:
        experiment: which.
        scale: `small` or `paper`.
        output: folder; results/reproduce/NAME-SCALE by default.
        console: gets the tables.
        errors: gets progress.
        data: folder with published files of benchmarks.
        restart: throw away the answers that are there.
        options: instead of those of the experiment, see `Scale.with_options`.
    """
    chosen = {"small": experiment.small, "paper": experiment.paper}[scale].with_options(**options)
    folder = output or Path("results") / "reproduce" / f"{experiment.name}-{scale}"
    return Reproduction(experiment, chosen, folder, data, restart).run(console, errors)
