"""A sweep: policies x budgets x tasks x lengths x seeds, from one YAML file."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from sekv.errors import DataError
from sekv.evaluation.runner import Evaluation
from sekv.evaluation.session import Session

_LISTS = ("policies", "budgets", "tasks", "lengths", "seeds")


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep, one key of the file each.

    Attributes:
        policies: specifications, such as `hubkv:keydiff`.
        budgets: shares of the context or numbers of rows.
        tasks: as `sekv evaluate` takes them; `{length}` in a task stands for each of the lengths.
        output: folder of the results.
        lengths: tokens, for the tasks that say `{length}`.
        seeds: of generated samples.
        limit: most samples of each task and seed.
        baseline: one of the policies, which the others are compared with on the same samples.
        query_aware: compress the question with the context.
        adapter: folder of a trained adapter.
        cache: folder that keeps contexts once read, and their memories.
        trace: samples of each task and seed whose zooms are kept for the report.
        backbone: name, folder or Hub id.
        dtype: of the backbone.
        device: of the backbone.
    """

    policies: list[str]
    budgets: list[str | float | int]
    tasks: list[str]
    output: str
    lengths: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    limit: int | None = None
    baseline: str | None = None
    query_aware: bool = False
    adapter: str | None = None
    cache: str | None = None
    trace: int = 0
    backbone: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Reads the file.

        Raises:
            DataError: it cannot be read, a key is unknown or missing, or a value is of the wrong kind.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"sweep file '{path}' cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise DataError(f"sweep file '{path}' is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise DataError(f"sweep file '{path}' has no keys; it needs policies, budgets, tasks and output")
        return cls.of(content, f"sweep file '{path}'")

    @classmethod
    def of(cls, content: dict[str, Any], where: str) -> Sweep:
        """The sweep that the keys and values of a file say.

        Args:
            content: by key.
            where: the file, for errors.

        Raises:
            DataError: a key is unknown or missing, or a value is of the wrong kind.
        """
        known = {f.name: f for f in fields(cls)}
        required = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
        problems = [f"unknown key '{key}'" for key in content if key not in known]
        problems += [f"'{key}' is missing" for key in required if key not in content]
        problems += [
            f"'{key}' is not {what}"
            for key, value in content.items()
            if key in known and (what := _wrong_kind(key, str(known[key].type), value))
        ]
        if problems:
            raise DataError(f"{where}: {', '.join(problems)}; its keys: {', '.join(known)}")
        return cls(**content)

    @property
    def task_specs(self) -> list[str]:
        """Every task at every length.

        Raises:
            DataError: a task wants a length and there is none, or no task wants the lengths.
        """
        wanting = [task for task in self.tasks if "{length}" in task]
        if bool(wanting) != bool(self.lengths):
            said = f"task '{wanting[0]}' needs lengths" if wanting else "no task says {length}, so lengths do nothing"
            raise DataError(f"{said}; write a task as niah:{{length}} and lengths as [2048, 4096]")
        return [
            task.replace("{length}", str(length))
            for task in self.tasks
            for length in (self.lengths if "{length}" in task else [0])
        ]

    def plan(self, output: Path | None = None) -> Evaluation:
        """Checks everything that can be checked without the backbone.

        Args:
            output: instead of the file's folder.
        """
        return Evaluation.plan(
            self.policies,
            self.task_specs,
            self.budgets,
            output or self.output,
            adapter=self.adapter,
            limit=self.limit,
            seeds=self.seeds,
            query_aware=self.query_aware,
            baseline=self.baseline,
            cache=self.cache,
            trace=self.trace,
        )

    def session(self, restart: bool = False) -> Session:
        """How it is run."""
        return Session(self.backbone, self.dtype, self.device, restart)


def _wrong_kind(key: str, hint: str, value: Any) -> str | None:
    """What `value` should have been, or None when it is that."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in _LISTS:
        if not isinstance(value, list):
            return "a list"
        if key in ("lengths", "seeds"):
            good = all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
            return None if good else "a list of whole numbers"
        return None if all(isinstance(item, (str, int, float)) for item in value) else "a list of texts or numbers"
    if hint == "bool":
        return None if isinstance(value, bool) else "true or false"
    if value is None and "None" in hint:
        return None
    if hint.startswith("int"):
        return None if whole else "a whole number"
    return None if isinstance(value, str) else "a text"
