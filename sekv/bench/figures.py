"""What `sekv bench` measures: figures, what they were measured on, and the files that hold both."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sekv import __version__
from sekv.backbone import Backbone
from sekv.errors import DataError
from sekv.evaluation.records import replacing

FIGURES, SETTINGS, TABLE, PLOT = "bench.json", "setting.json", "bench.csv", "bench.png"

MEASURED_BY = {
    "prefill": ("prefill", "build", "score"),
    "decode": ("decode", "end_to_end"),
    "memory": ("memory",),
    "train": ("train",),
}
"""The kinds of figures that each command writes."""


@dataclass(frozen=True)
class Figure:
    """One measured thing at one length.

    Attributes:
        what: `prefill` (reading the context with what the policy needs, and building its memory), `build` (building
            the memory alone), `score` (scoring all tokens alone), `decode` (one step), `end_to_end` (prefill, building
            and `new_tokens` steps), `memory` (bytes), `train` (an optimiser step).
        policy: its specification, as given.
        length: tokens of the context.
        budget: share of the context (at most 1) or number of rows, as given.
        median_seconds: median over the samples; None where only bytes count.
        ratio_to_full: median over the samples of the time over that of `full` taken right beside it; of `build`,
            `score` and `train` over a plain prefill; of `memory` the resident bytes over those of the full cache.
        resident_bytes: live tensors of the compressed context on the compute tier.
        host_bytes: live tensors of the compressed context on the host tier.
        moved_bytes_per_token: from the host, per step after the first few.
        hit_rate: share of the wanted rows that an earlier step had left on the compute tier; None where none was
            wanted.
        rows: mean context rows attended per query, layer and KV head.
        peak_bytes: most bytes of the accelerator while decoding, weights included; of `train` most bytes by which
            live tensors grow during a step.
        new_tokens: steps of `end_to_end`.
        samples: timings behind the median.
    """

    what: str
    policy: str
    length: int
    budget: float | int
    median_seconds: float | None = None
    ratio_to_full: float | None = None
    resident_bytes: int | None = None
    host_bytes: int | None = None
    moved_bytes_per_token: float | None = None
    hit_rate: float | None = None
    rows: float | None = None
    peak_bytes: int | None = None
    new_tokens: int | None = None
    samples: int = 0


@dataclass(frozen=True)
class Setting:
    """What figures were measured on.

    Attributes:
        backbone: its name.
        parameters: of the backbone.
        dtype: of keys and values.
        device: name of the hardware.
        threads: of torch on the host.
        load: processes that were ready to run on average over the last minute, when the measurement began; None where
            the system does not say.
        repeats: of every measurement.
        steps: timed decode steps per repeat.
        adapter: of sekv, as given.
        versions: of the packages that matter.
        date: when the measurement began, UTC.
    """

    backbone: str
    parameters: int
    dtype: str
    device: str
    threads: int
    load: float | None
    repeats: int
    steps: int
    adapter: str | None
    versions: dict[str, str]
    date: str

    @classmethod
    def here(cls, backbone: Backbone, repeats: int, steps: int = 0, adapter: str | None = None) -> Setting:
        """This machine, now."""
        return cls(
            backbone=backbone.name,
            parameters=backbone.num_parameters,
            dtype=str(backbone.dtype).removeprefix("torch."),
            device=device_name(backbone.device),
            threads=torch.get_num_threads(),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            repeats=repeats,
            steps=steps,
            adapter=adapter,
            versions={"sekv": __version__, "python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers", "numpy")},
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def line(self) -> str:
        """In one line, for titles."""
        load = "" if self.load is None else f", load {self.load:g}"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.backbone}, {self.dtype}, {self.device}, {threads}{load}, torch {self.versions['torch']}"


def device_name(device: torch.device) -> str:
    """The hardware's own name where it can be found."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Folder:
    """A folder of figures; a command replaces what it measured there before and keeps the figures of the others.

    Attributes:
        path: the folder.
        figures: it holds.
        settings: by command, what its figures were measured on.
    """

    path: Path
    figures: tuple[Figure, ...] = ()
    settings: tuple[tuple[str, Setting], ...] = ()

    @classmethod
    def open(cls, path: Path) -> Folder:
        """A folder with what it holds; it is made where there is none.

        Raises:
            DataError: the path is no folder, or what it holds cannot be read.
        """
        if path.exists() and not path.is_dir():
            raise DataError(f"'{path}' is a file; give a folder for the figures")
        path.mkdir(parents=True, exist_ok=True)
        figures = read_figures(path / FIGURES) if (path / FIGURES).exists() else []
        settings = _read_settings(path / SETTINGS) if (path / SETTINGS).exists() else {}
        return cls(path, tuple(figures), tuple(settings.items()))

    def with_figures(self, command: str, figures: Sequence[Figure], setting: Setting) -> Folder:
        """The folder with a command's figures in the place of its earlier ones."""
        kept = [figure for figure in self.figures if figure.what not in MEASURED_BY[command]]
        return Folder(self.path, (*kept, *figures), tuple({**dict(self.settings), command: setting}.items()))

    def write(self) -> None:
        """Writes bench.json, bench.csv and setting.json, each at once or not at all."""
        rows = [asdict(figure) for figure in self.figures]
        with replacing(self.path / FIGURES) as temporary:
            temporary.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        with replacing(self.path / TABLE) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Figure)])
            writer.writeheader()
            writer.writerows(rows)
        settings = {command: asdict(setting) for command, setting in self.settings}
        with replacing(self.path / SETTINGS) as temporary:
            temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def read_figures(path: Path) -> list[Figure]:
    """The figures of a bench.json.

    Raises:
        DataError: the file cannot be read or holds no such figures.
    """
    entries = _read_json(path)
    try:
        return [Figure(**entry) for entry in entries]
    except TypeError as error:
        raise DataError(f"'{path}' holds no figures of sekv bench ({error}); measure again") from None


def _read_settings(path: Path) -> dict[str, Setting]:
    entries = _read_json(path)
    try:
        return {command: Setting(**entry) for command, entry in entries.items()}
    except (TypeError, AttributeError) as error:
        raise DataError(f"'{path}' does not say what figures were measured on ({error}); remove it") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read ({error}); give another folder, or remove the file") from None
