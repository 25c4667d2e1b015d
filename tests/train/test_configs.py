"""Every shipped YAML is valid and says what its name says; no backbone is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sekv.adapter import SeKVConfig
from train.cli import TrainCLI
from train.losses import LossConfig
from train.module import SeKVModule
from train.windows import smallest_context

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = CONFIGS / "smollm2-135m.yaml"
FILES = sorted(CONFIGS.rglob("*.yaml"))
ABLATIONS = [path for path in FILES if path.parent.name == "ablations"]


def load(*files: Path) -> TrainCLI:
    arguments = [argument for file in files for argument in ("--config", str(file))]
    return TrainCLI([*arguments, "--trainer.logger", "false", "--trainer.accelerator", "cpu", "--name", "unused"])


def test_there_are_configurations():
    assert {BASE, CONFIGS / "demo.yaml"} <= set(FILES)
    assert len(ABLATIONS) >= 6


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_configuration_instantiates(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cli = load(BASE, file) if file in ABLATIONS else load(file)
    assert isinstance(cli.model, SeKVModule)
    assert cli.model.backbone is None
    assert cli.trainer.max_steps > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "files",
    [[], *([path] for path in FILES if path not in ABLATIONS)],
    ids=lambda files: "-".join(f.stem for f in files),
)
def test_documents_are_long_enough_for_every_budget(files, monkeypatch, tmp_path):
    """Of the defaults too: `sekv train` alone works."""
    monkeypatch.chdir(tmp_path)
    cli = load(*files)
    adapter = cli.model.adapter_config
    segmentation = adapter.cutting()
    for budget in (*cli.model.budgets, cli.model.val_budget):
        smallest = smallest_context(budget, segmentation, cli.datamodule.length)
        assert smallest + cli.model.query_window <= cli.datamodule.min_length


@pytest.mark.parametrize("file", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_changes_something(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cli = load(BASE, file)
    trained = (cli.model.adapter_config, cli.model.loss_config, cli.model.train_router)
    assert trained != (SeKVConfig(), LossConfig(), True)
