"""Every shipped YAML is valid and says what its name says; no backbone is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from sekv.architecture import find_architecture
from sekv.cache import RecordingLayer
from train.cli import TrainCLI
from train.footprint import peak
from train.module import SeKVModule
from train.plan import make_plan
from train.windows import smallest_context

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = CONFIGS / "smollm2-135m.yaml"
EVALUATIONS = ("reproduce", "sweeps")  # they train nothing
FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name not in EVALUATIONS]
ABLATIONS = [path for path in FILES if path.parent.name == "ablations"]


PUBLISHED = {  # L, H, K, d, adapter parameters, most of the backbone (a share)
    "llama-3.2-3b": (28, 24, 8, 128, 1_844_056, 0.0006),
    "llama-3-8b": (32, 32, 8, 128, 2_632_248, 0.0005),
    "llama-3.1-8b": (32, 32, 8, 128, 2_632_248, 0.0005),
    "mistral-7b-v0.2": (32, 32, 8, 128, 2_632_248, 0.0005),
    "qwen2.5-14b": (48, 40, 8, 128, 4_733_880, 0.0005),
    "qwen3-4b": (36, 32, 8, 128, 2_960_568, 0.0008),
    "qwen3-8b": (36, 32, 8, 128, 2_960_568, 0.0005),
    "smollm2-135m": (30, 9, 3, 64, 557_950, 0.0042),
}


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
    [[], *([BASE, path] if path in ABLATIONS else [path] for path in FILES)],
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_backbone_of_the_papers_has_the_adapter_it_should(name, monkeypatch, tmp_path):
    """Of the published architecture: the adapter's size and share, and the shapes that the adapter meets."""
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path))
    cli = load(CONFIGS / f"{name}.yaml")
    layers, heads, kv_heads, dim, parameters, most = PUBLISHED[name]
    architecture = find_architecture(cli.config.model.backbone)
    backbone, adapter = architecture.backbone, architecture.adapter(cli.model.adapter_config)
    shape = backbone.geometry
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (layers, heads, kv_heads, dim)
    assert adapter.num_parameters == parameters
    assert adapter.parameter_share < most
    rank = cli.model.adapter_config.routing_dim
    assert adapter.projection.shape == (layers, heads, rank, dim)
    assert adapter.key_projection.shape == (layers, kv_heads, rank, dim)

    recording = [RecordingLayer(64, window=16) for _ in range(layers)]
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = recording, None
    hidden = backbone.hidden_states(torch.zeros(2, 64, dtype=torch.long, device="meta"), cache=cache)
    assert backbone.logits(hidden[:, -1:]).shape == (2, 1, shape.vocab_size)
    for layer in recording:
        assert layer.keys.shape == layer.values.shape == (2, kv_heads, 64, dim)
        assert layer.queries.shape == (2, heads, 16, dim)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_backbone_of_the_papers_is_planned(name, monkeypatch, tmp_path):
    """The curriculum stays within the positions, and the first stage fits a device of 80 GiB."""
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path))
    plan = make_plan(["--config", str(CONFIGS / f"{name}.yaml")], 80 * 2**30, 10**12)
    assert max(stage.length for stage in plan.stages) <= plan.architecture.backbone.geometry.max_positions
    assert peak(plan.parts(plan.stages[0])) < 80 * 2**30
    assert len({plan.tokens_per_step(stage) for stage in plan.stages}) == 1


def test_every_ablation_of_the_paper_is_there():
    """Seven rows; unweighted and mean-pooled summaries are one switch here."""
    table = {"fixed-chunks", "no-anchors", "unweighted-summaries", "untrained-zoom", "no-reconstruction"}
    assert table | {"global-threshold"} <= {path.stem for path in ABLATIONS}


def test_the_papers_setting_is_what_the_paper_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = load(BASE, CONFIGS / "ablations" / "paper.yaml").model
    adapter, labels = module.adapter_config, module.loss_config
    assert (adapter.index, adapter.routing_dim, adapter.max_span, adapter.basis_bits) == ("summary", 32, 64, 0)
    assert (adapter.summary_share, adapter.summary_bias, adapter.persistent_share) == (1.0, 0.0, 0.5)
    assert (labels.labels, labels.coverage, labels.positive) == ("cover", 0.9, 10.0)
    assert module.warm_start.documents == module.warm_start.retrieval == 0


@pytest.mark.parametrize(
    ("name", "change", "labels"),
    [
        ("summary-index", {"index": "summary"}, "mass"),
        ("own-summary-rows", {"summary_share": 1.0, "max_span": 64}, "share"),
        ("per-head-masks", {"share_group": False, "summary_share": 1.0, "max_span": 64}, "share"),
        ("cover-labels", {}, "cover"),
    ],
)
def test_an_ablation_of_the_index_changes_that_alone(name, change, labels, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    base, module = (load(BASE, *more).model for more in ((), (CONFIGS / "ablations" / f"{name}.yaml",)))
    assert module.adapter_config == replace(base.adapter_config, **change)
    assert module.loss_config.labels == labels


@pytest.mark.parametrize("file", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_changes_something(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    base, changed = (
        (model.adapter_config, model.loss_config, model.train_router, model.warm_start)
        for model in (load(BASE, *more).model for more in ((), (file,)))
    )
    assert changed != base
