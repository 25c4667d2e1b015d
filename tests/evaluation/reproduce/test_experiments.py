"""Every shipped experiment says something that can be run, at both scales; nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sekv.adapter import SeKVAdapter
from sekv.backbone import DEFAULT_BACKBONE
from sekv.bench.cli import build_parser as bench_parser
from sekv.budget import Budget
from sekv.errors import DataError
from sekv.evaluation.reproduce.experiment import Experiment, find_experiment, find_experiments
from sekv.evaluation.runner import Evaluation
from sekv.policies.registry import build_policy

FOLDER = Path(__file__).parents[3] / "configs" / "reproduce"
CONFIGS = FOLDER.parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PUBLISHED = {
    *("main-table", "needle-heatmaps", "memory", "latency", "gsm8k-50-shot", "ablations", "budget-table"),
    *("zoom-heatmaps", "hubkv-scorers", "nestedkv-keydiff"),
}
GOOD: dict[str, Any] = {
    "title": "t",
    "source": "s",
    "view": "scores",
    "small": {"policies": ["full"], "budgets": [0.5], "tasks": ["niah:400"]},
    "paper": {"policies": ["full"], "budgets": [0.5], "tasks": ["niah:400"]},
}


def write(folder: Path, **keys: Any) -> Path:
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (GOOD | keys).items() if value is not None}))
    return path


def test_every_published_table_and_figure_is_there() -> None:
    assert set(NAMES) >= PUBLISHED
    assert find_experiments(FOLDER).keys() == set(NAMES)
    assert find_experiments().keys() == set(NAMES)  # in this checkout, wherever the tests run


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_valid(name: str, scale: str, tiny_backbone, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    made = getattr(find_experiment(name), scale)
    adapter = SeKVAdapter.create(tiny_backbone)
    for sweep in made.sweeps.values():
        trained = sweep.adapter if scale == "small" else adapter
        evaluation = Evaluation.plan(
            sweep.policies,
            sweep.task_specs,
            sweep.budgets,
            tmp_path,
            adapter=trained,
            limit=sweep.limit,
            seeds=sweep.seeds,
            baseline=sweep.baseline,
            trace=sweep.trace,
        )
        assert evaluation.answers_per_question > 0
        assert sweep.backbone == DEFAULT_BACKBONE if scale == "small" else "/" in sweep.backbone
        if any(policy.partition("[")[0] == "sekv" for policy in sweep.policies):
            assert sweep.adapter is not None
    for one in made.bench:
        assert all(build_policy(spec, adapter=adapter) for spec in one["policies"])
        assert Budget.parse(one.get("budget", 0.1))
        flags = [
            f"--{key.replace('_', '-')}={value}" for key, value in one.items() if key not in ("command", "lengths")
        ]
        assert (
            bench_parser().parse_args([one["command"], *flags, "--lengths=1", "--output=x"]).command == one["command"]
        )
        assert all(isinstance(length, int) for length in one["lengths"])
        assert one["backbone"] == DEFAULT_BACKBONE if scale == "small" else "/" in one["backbone"]


def test_adapters_at_paper_scale_are_those_that_configurations_train() -> None:
    trained = {path.stem for path in CONFIGS.glob("*.yaml")}
    ablations = {path.stem for path in (CONFIGS / "ablations").glob("*.yaml")}
    for name in NAMES:
        for sweep in find_experiment(name, FOLDER).paper.sweeps.values():
            if sweep.adapter is None:
                continue
            run = sweep.adapter.removeprefix("runs/").removesuffix("/adapter")
            assert any(run == base or run.removeprefix(f"{base}-") in ablations for base in trained)


def test_hubkv_is_compared_from_half_to_nineteen_twentieths_removed() -> None:
    for sweep in find_experiment("hubkv-scorers", FOLDER).paper.sweeps.values():
        assert {0.5, 0.05} <= set(sweep.budgets)
    assert find_experiment("budget-table", FOLDER).paper.sweeps[""].budgets == [0.05, 0.1, 0.15, 0.2]
    assert find_experiment("needle-heatmaps", FOLDER).paper.sweeps[""].budgets == [128]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vew": 1}, "unknown key 'vew'"),
        ({"title": None}, "'title' is missing"),
        ({"view": "tables"}, "view 'tables' is none of scores, needles"),
        ({"view": "pairs"}, "needs 'pairs'"),
        ({"pairs": {"full": "full"}}, "needs 'pairs'"),
        ({"view": "pairs", "pairs": {"full": "keydiff"}}, "small: 'pairs' names keydiff, which no policy is"),
        ({"view": "bench"}, "small: the view bench, and no other, needs 'bench'"),
        ({"small": {"policies": ["full"]}}, "small: 'budgets' is missing, 'tasks' is missing"),
        ({"small": GOOD["small"] | {"output": "x"}}, "small: 'output' is no key of an experiment"),
        ({"small": GOOD["small"] | {"runs": {"a": {"limit": "x"}}}}, "small, run 'a': 'limit' is not a whole number"),
        ({"small": GOOD["small"] | {"runs": ["a"]}}, "'runs' is not a mapping"),
        ({"small": {"bench": [{"command": "memory"}]}}, "needs command, policies and lengths"),
        ({"small": 3}, "small has no keys"),
    ],
)
def test_a_mistake_in_an_experiment_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Experiment.read(write(tmp_path, **keys))


def test_an_unknown_experiment_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown experiment 'table-9'; known: ablations, "):
        find_experiment("table-9", FOLDER)
    with pytest.raises(DataError, match="run this in a checkout of sekv, or give --configs"):
        find_experiment("main-table", tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        find_experiment(str(tmp_path / "gone.yaml"))
