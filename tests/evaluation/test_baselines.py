"""The sweeps of all policies that are shipped: complete, alike, and one that runs on a small model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import yaml

from sekv.cli import main
from sekv.evaluation.sweep import Sweep
from sekv.policies.registry import available_policies

FOLDER = Path(__file__).parents[2] / "configs" / "sweeps"
SWEEPS = [FOLDER / "baselines.yaml", FOLDER / "baselines-query-aware.yaml"]


def test_every_policy_is_in_both_sweeps_which_differ_in_the_question_only():
    agnostic, aware = (asdict(Sweep.read(path)) for path in SWEEPS)
    # kvpress is an extra, and a bridge rather than a method.
    assert {spec.partition("[")[0].partition(":")[0] for spec in agnostic["policies"]} == {*available_policies()} - {
        "kvpress"
    }
    assert "hubkv:kvzip" in agnostic["policies"]
    assert agnostic["budgets"] == [0.1, 0.2]
    assert {key for key in agnostic if agnostic[key] != aware[key]} == {"query_aware", "output"}


def test_a_small_model_gives_the_table(tiny_backbone, tmp_path, capsys):
    tiny_backbone.model.save_pretrained(tmp_path / "backbone")
    tiny_backbone.tokenizer.save_pretrained(tmp_path / "backbone")
    for path in SWEEPS:
        content = yaml.safe_load(path.read_text())
        content["policies"].remove("sekv")  # its adapter belongs to the default backbone
        content |= {"backbone": str(tmp_path / "backbone"), "adapter": None, "device": "cpu", "output": str(tmp_path)}
        content |= {"tasks": ["niah:{length}"], "lengths": [600], "limit": 1, "budgets": [0.3]}
        (tmp_path / path.name).write_text(yaml.safe_dump(content))
        output = tmp_path / path.stem
        assert main(["sweep", str(tmp_path / path.name), "--output", str(output)]) == 0
        rows = [line for line in (output / "results.md").read_text().splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == content["policies"]
    assert "niah:600" in capsys.readouterr().out
