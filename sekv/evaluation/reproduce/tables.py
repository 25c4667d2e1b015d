"""A table, for a terminal, for Markdown and for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from sekv.evaluation.records import replacing


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; the first columns say what a row is, the others hold figures.

    Attributes:
        title: above the table.
        columns: their names.
        rows: as many texts each as there are columns.
        labels: columns that are no figures.
        note: what the figures are.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    note: str = ""

    def for_terminal(self) -> RichTable:
        """As rich draws it."""
        table = RichTable(title=Text(self.title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.caption, table.padding = Text(self.note) if self.note else None, (0, 1, 0, 0)
        for i, name in enumerate(self.columns):
            justify: Literal["left", "right"] = "left" if i < self.labels else "right"
            table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=not i)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    @property
    def markdown(self) -> str:
        """As a table of Markdown below its title."""
        aligned = ["---" if i < self.labels else "---:" for i in range(len(self.columns))]
        lines = [_line(self.columns), _line(aligned, escape=False), *map(_line, self.rows)]
        note = [f"\n{self.note}"] if self.note else []
        return "\n".join([f"**{self.title}**", "", *lines, *note]) + "\n"

    @property
    def csv(self) -> str:
        """As comma-separated values."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def write(self, folder: Path, name: str = "table") -> list[Path]:
        """Writes NAME.csv and NAME.md, each whole or not at all."""
        paths = []
        for end, text in (("csv", self.csv), ("md", self.markdown)):
            paths.append(folder / f"{name}.{end}")
            with replacing(paths[-1]) as temporary:
                temporary.write_text(text, encoding="utf-8")
        return paths


def _line(cells: Sequence[str], escape: bool = True) -> str:
    texts = [cell.replace("|", "\\|") if escape else cell for cell in cells]
    return f"| {' | '.join(texts)} |"
