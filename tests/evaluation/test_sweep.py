from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sekv.cli import main
from sekv.errors import DataError
from sekv.evaluation.sweep import Sweep

GOOD: dict[str, Any] = {"policies": ["full"], "budgets": [0.5], "tasks": ["niah:400"], "output": "out"}


def write(folder: Path, **keys: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(GOOD | keys))
    return path


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory, tiny_backbone) -> str:
    path = tmp_path_factory.mktemp("backbone")
    tiny_backbone.model.save_pretrained(path)
    tiny_backbone.tokenizer.save_pretrained(path)
    return str(path)


def test_lengths_are_filled_into_the_tasks_that_want_them(tmp_path: Path) -> None:
    keys = {"tasks": ["niah:{length}", "ruler:vt:{length}", "niah:777"], "lengths": [512, 1024]}
    sweep = Sweep.read(write(tmp_path, **keys))
    assert sweep.task_specs == ["niah:512", "niah:1024", "ruler:vt:512", "ruler:vt:1024", "niah:777"]
    for wrong in ({"lengths": [512]}, {"tasks": ["niah:{length}"]}):
        with pytest.raises(DataError, match="lengths"):
            _ = Sweep.read(write(tmp_path, **wrong)).task_specs


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"polices": []}, "unknown key 'polices'"),
        ({"budgets": 0.5}, "'budgets' is not a list"),
        ({"seeds": ["x"]}, "'seeds' is not a list of whole numbers"),
        ({"limit": "x"}, "'limit' is not a whole number"),
        ({"query_aware": 1}, "'query_aware' is not true or false"),
        ({"output": 3}, "'output' is not a text"),
        ({"policies": [["x"]]}, "'policies' is not a list of texts or numbers"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Sweep.read(write(tmp_path, **keys))


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("limit: 3\n")
    with pytest.raises(DataError, match="'policies' is missing, 'budgets' is missing, 'tasks' is missing, 'output'"):
        Sweep.read(path)
    path.write_text("[")
    with pytest.raises(DataError, match="is not YAML"):
        Sweep.read(path)
    path.write_text("3")
    with pytest.raises(DataError, match="has no keys"):
        Sweep.read(path)


def test_a_sweep_killed_twice_gives_what_an_uninterrupted_one_does(
    backbone_folder: str, tmp_path: Path, capsys
) -> None:
    keys = {
        "policies": ["full", "keydiff", "streaming_llm"],
        "budgets": [0.3, 64],
        "tasks": ["niah:{length}", "ppl:1024"],
        "lengths": [400, 700],
        "seeds": [0, 1],
        "limit": 2,
        "baseline": "streaming_llm",
        "backbone": backbone_folder,
        "device": "cpu",
    }
    path = write(tmp_path, **keys)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "sekv", "sweep", str(path), "--output", str(killed)]
    samples = killed / "samples.jsonl"

    def answered() -> int:
        return samples.read_text().count("\n") if samples.exists() else 0

    rng = random.Random(11)
    left = 0
    for _ in range(2):  # each time at another point: somewhere within the answer after the next few
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = left + rng.randint(3, 20)
        while process.poll() is None and answered() < wanted:
            time.sleep(0.02)
        time.sleep(rng.random() / 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert answered() > left
        left = answered()
    assert left < 60
    assert main(["sweep", str(path), "--output", str(killed)]) == 0
    shown = capsys.readouterr()
    assert f"{left} of 60 answers are in" in " ".join(shown.err.split())
    assert "score minus that of streaming_llm" in shown.out
    assert main(["sweep", str(path), "--output", str(whole)]) == 0

    def records(folder: Path) -> list[dict[str, Any]]:
        lines = (folder / "samples.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]

    assert len(records(whole)) == 60
    assert records(killed) == records(whole)
    assert {row["baseline"] for row in json.loads((whole / "paired.json").read_text())} == {"streaming_llm"}
    assert (whole / "scores.png").exists()
    assert (whole / "run.json").exists()
