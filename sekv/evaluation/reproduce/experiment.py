"""An experiment of the papers: one YAML that says what is run, in a small form and at the paper's scale, and shown how.

    title: what it shows
    source: the paper's table or figure
    view: scores | needles | pairs | zooms | bench
    pairs: {POLICY: BASELINE, ...}       # of the view pairs
    small: ...                           # the keys of a sweep without output,
    paper: ...                           # or `runs`, or `bench`

`runs` names several sweeps that share the keys beside it: {NAME: {keys of its own}, ...}. `bench` lists commands of
`sekv bench`: [{command: memory, policies: [...], lengths: [...], ...}, ...].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import sekv
from sekv.errors import DataError
from sekv.evaluation.sweep import Sweep

VIEWS = ("scores", "needles", "pairs", "zooms", "bench")
SCALES = ("small", "paper")
_FOLDER = Path("configs") / "reproduce"
_KEYS = ("title", "source", "view", "pairs", *SCALES)
_BENCH_KEYS = (
    *("command", "policies", "lengths", "budget", "repeats", "steps", "new_tokens"),
    *("backbone", "adapter", "dtype", "device"),
)


@dataclass(frozen=True)
class Scale:
    """What is run at one scale: sweeps or commands of `sekv bench`.

    Attributes:
        sweeps: by name; a single one without a name has the name "".
        bench: options of each command.
    """

    sweeps: dict[str, Sweep] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)

    def with_options(self, **given: Any) -> Scale:
        """With some settings replaced everywhere: `backbone`, `adapter`, `dtype`, `device`, and of sweeps `limit`."""
        options = {key: value for key, value in given.items() if value is not None}
        of_bench = {key: value for key, value in options.items() if key in _BENCH_KEYS}
        return Scale(
            {name: replace(sweep, **options) for name, sweep in self.sweeps.items()},
            [one | of_bench for one in self.bench],
        )


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes:
        name: of the file.
        title: what it shows.
        source: where it is published.
        view: how it is shown, one of `VIEWS`.
        pairs: policies, and what each is compared with on the same samples.
        small: runs on a CPU.
        paper: the published backbone, lengths and samples.
    """

    name: str
    title: str
    source: str
    view: str
    pairs: dict[str, str]
    small: Scale
    paper: Scale

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """Reads and checks the file, both of its scales.

        Raises:
            DataError: it cannot be read, or says something that cannot be run.
        """
        where = f"experiment '{path}'"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{where} cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise DataError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise DataError(f"{where} has no keys; its keys: {', '.join(_KEYS)}")
        problems = [f"unknown key '{key}'" for key in content if key not in _KEYS]
        problems += [f"'{key}' is missing" for key in _KEYS if key not in content and key != "pairs"]
        if content.get("view") not in VIEWS:
            problems.append(f"view '{content.get('view')}' is none of {', '.join(VIEWS)}")
        if bool(content.get("pairs")) != (content.get("view") == "pairs"):
            problems.append("the view pairs, and no other, needs 'pairs'")
        if problems:
            raise DataError(f"{where}: {', '.join(problems)}; its keys: {', '.join(_KEYS)}")
        pairs = {str(one): str(other) for one, other in (content.get("pairs") or {}).items()}
        scales = {scale: _scale(content[scale], f"{where}, {scale}") for scale in SCALES}
        for scale, made in scales.items():
            if bool(made.bench) != (content["view"] == "bench"):
                raise DataError(f"{where}, {scale}: the view bench, and no other, needs 'bench'")
            listed = {policy for sweep in made.sweeps.values() for policy in sweep.policies}
            if missing := sorted({*pairs, *pairs.values()} - listed) if pairs else []:
                raise DataError(f"{where}, {scale}: 'pairs' names {', '.join(missing)}, which no policy is")
        return cls(path.stem, str(content["title"]), str(content["source"]), content["view"], pairs, **scales)


def find_experiments(folder: Path | None = None) -> dict[str, Path]:
    """The files of all experiments by name: of `folder`, of configs/reproduce here, or of the checkout of this package.

    Raises:
        DataError: there are none.
    """
    places = [folder] if folder else [_FOLDER, Path(sekv.__file__).parents[1] / _FOLDER]
    for place in places:
        if found := sorted(place.glob("*.yaml")):
            return {path.stem: path for path in found}
    raise DataError(
        f"no experiments in {' or '.join(map(str, places))}; run this in a checkout of sekv, or give --configs DIR"
    )


def find_experiment(name: str, folder: Path | None = None) -> Experiment:
    """An experiment by its name, or by the path of its file.

    Raises:
        DataError: it is unknown or malformed.
    """
    if name.endswith((".yaml", ".yml")):
        return Experiment.read(Path(name))
    known = find_experiments(folder)
    if name not in known:
        raise DataError(f"unknown experiment '{name}'; known: {', '.join(known)}")
    return Experiment.read(known[name])


def folder_name(name: str) -> str:
    """A name of a run as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


def _scale(content: Any, where: str) -> Scale:
    if not isinstance(content, dict):
        raise DataError(f"{where} has no keys; give those of a sweep, or bench")
    if "bench" in content:
        return Scale(bench=_bench(content, where))
    runs = content.get("runs", {"": {}})
    if not isinstance(runs, dict) or not runs or not all(isinstance(own, dict) for own in runs.values()):
        raise DataError(f"{where}: 'runs' is not a mapping of names to keys of sweeps")
    shared = {key: value for key, value in content.items() if key != "runs"}
    sweeps = {
        str(name): _sweep(shared | own, f"{where}, run '{name}'" if name else where) for name, own in runs.items()
    }
    if len({folder_name(name) for name in sweeps}) < len(sweeps):
        raise DataError(f"{where}: two runs have names that differ in punctuation only")
    return Scale(sweeps)


def _sweep(content: Mapping[str, Any], where: str) -> Sweep:
    if "output" in content:
        raise DataError(f"{where}: 'output' is no key of an experiment; give --output")
    return Sweep.of({**content, "output": ""}, where)


def _bench(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    commands = content["bench"]
    if len(content) > 1 or not isinstance(commands, list) or not commands:
        raise DataError(f"{where}: 'bench' is a list of commands and stands alone")
    for one in commands:
        if not isinstance(one, dict) or not {"command", "policies", "lengths"} <= one.keys():
            raise DataError(f"{where}: a command of bench needs command, policies and lengths")
        if unknown := [key for key in one if key not in _BENCH_KEYS]:
            raise DataError(f"{where}: bench has no key '{unknown[0]}'; its keys: {', '.join(_BENCH_KEYS)}")
    return [dict(one) for one in commands]
