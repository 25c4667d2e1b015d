"""One command of `sekv bench`: the folder is opened, every length measured, what there is written, shown and drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sekv.bench.figures import MEASURED_BY, PLOT, Figure, Folder, Setting
from sekv.bench.report import figures_table, plot_figures
from sekv.evaluation.records import replacing


@dataclass
class Session:
    """Where the figures of a command go.

    Attributes:
        command: `prefill`, `decode`, `memory` or `train`.
        output: folder of the figures.
        profiling: keep where time goes.
        profiles: titles and tables of what was profiled.
    """

    command: str
    output: Path
    profiling: bool = False
    profiles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Folder.open(self.output)

    @property
    def profile(self) -> Callable[[str, str], None] | None:
        """Takes a title and a table; None when nothing is to be profiled."""
        return self._keep_profile if self.profiling else None

    def _keep_profile(self, title: str, table: str) -> None:
        self.profiles.append(f"{title}\n{table}\n")

    def run(
        self, setting: Setting, lengths: Sequence[int], measure: Callable[[int], list[Figure]], console: Console
    ) -> list[Figure]:
        """Measures each length, the shortest first, and writes after each: an interrupt loses one length.

        Args:
            setting: what is measured on.
            lengths: tokens of each context.
            measure: the figures of one length.
            console: gets the tables.
        """
        figures: list[Figure] = []
        for length in sorted(lengths):
            with console.status(f"{self.command} at {length:,} tokens"):
                figures += measure(length)
            folder = self.folder.with_figures(self.command, figures, setting)
            folder.write()
            plot_figures(folder.figures, setting.line(), self.output / PLOT)
        console.print(escape(f"measured on {setting.line()}"), highlight=False, soft_wrap=True)
        for what in MEASURED_BY[self.command]:
            if any(figure.what == what for figure in figures):
                console.print(figures_table(figures, what))
        if self.profiles:
            path = self.output / f"profile-{self.command}.txt"
            with replacing(path) as temporary:
                temporary.write_text("\n".join(self.profiles), encoding="utf-8")
        console.print(f"written to {escape(str(self.output))}", soft_wrap=True)
        return figures
