"""The report: one HTML page of a folder of results, which needs no network and no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sekv import __version__
from sekv.errors import DataError
from sekv.evaluation.page_data import Answers, Row, failures, needle_grids, result_rows
from sekv.evaluation.page_traces import read_traces, viewer_data, zoom_rates
from sekv.evaluation.records import replacing

PAGE = "report.html"
_SCRIPTS = ("base.js", "charts.js", "spans.js")


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Writes the page of a folder of results, whole or not at all.

    Args:
        folder: what `sekv evaluate` or `sekv sweep` wrote, finished or not.
        output: the page; `report.html` in the folder by default.

    Raises:
        DataError: the folder holds no answers, one of its files is malformed, or the page's folder is missing.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give one that sekv evaluate or sekv sweep wrote to")
    path = output or folder / PAGE
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"the page cannot be written to {path}; give the name of a file in a folder that exists")
    page = render(Answers.read(folder))
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def render(answers: Answers) -> str:
    """The page as text."""
    told = {
        record.key: {
            "question": record.question,
            "answers": list(record.answers),
            "output": record.output,
            "score": record.score,
        }
        for record in answers.records
    }
    traces = read_traces(answers.folder, set(told))
    viewer, traces_left_out = viewer_data(traces, told)
    shown = {key: number for number, (key, _) in enumerate(traces[: len(viewer)])}
    failed, failed_left_out = failures(answers, shown)
    results = result_rows(answers.records)
    return (
        _environment()
        .get_template("page.html")
        .render(
            folder=answers.folder.resolve().name,
            version=__version__,
            answers=answers,
            results=results,
            tasks=list(dict.fromkeys(row["task"] for row in results)),
            grids=needle_grids(answers.records),
            rates=zoom_rates(traces),
            viewer=viewer,
            traces_left_out=traces_left_out,
            failures=failed,
            failures_left_out=failed_left_out,
            data=_finite({"policies": answers.policies, "results": results, "traces": viewer}),
            style=Markup(_text("page.css")),  # noqa: S704  our own files, not what a model wrote
            script=Markup("\n".join(_text(name) for name in _SCRIPTS)),  # noqa: S704
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sekv.evaluation", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["seconds"] = lambda x: f"{x:.3g} s"
    environment.filters["groups"] = _groups
    environment.filters["fact"] = _fact
    return environment


def _fact(value: Any) -> str:
    """What all answers have in common, for a reader: of a fingerprint only what is one number or word."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {one}" for name, one in value.items() if isinstance(one, (str, int))
        )
    return str(value)


def _groups(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """Rows that agree in some values together, groups and rows in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _text(name: str) -> str:
    return (files("sekv.evaluation") / "html" / name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have: null instead."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
