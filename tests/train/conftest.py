"""A backbone and a corpus small enough to train on in a test, both read from files as a user's would be."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from sekv.adapter import SeKVConfig
from sekv.backbone import Backbone
from train.data import LocalFiles
from train.module import SeKVModule
from train.objective import MiningConfig
from train.warmstart import WarmStartConfig

WORDS = [
    "span",
    "anchor",
    "summary",
    "basis",
    "rank",
    "gate",
    "router",
    "budget",
    "prefill",
    "decode",
    "query",
    "layer",
]
ADAPTER = SeKVConfig(routing_dim=8, max_rank=4, gate_hidden=8, max_span=16)


@pytest.fixture(scope="session")
def backbone_folder(make_tiny_backbone: Callable[..., Backbone], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with its tokenizer, saved as transformers saves."""
    folder = tmp_path_factory.mktemp("backbone")
    backbone = make_tiny_backbone("llama")
    backbone.model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of 260 to 420 bytes, some of them held out by their hash."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    for i in range(60):
        text = " ".join(generator.choice(WORDS) for _ in range(80))
        (folder / f"{i:02}.txt").write_text(text[: generator.randint(260, 420)])
    return folder


@pytest.fixture
def make_module(backbone_folder: Path) -> Callable[..., SeKVModule]:
    """Makes a module over the saved tiny backbone: `make_module(lr=1e-2)`."""

    def make(**options: Any) -> SeKVModule:
        settings: dict[str, Any] = {
            "backbone": str(backbone_folder),
            "dtype": "float32",
            "adapter": ADAPTER,
            "mining": MiningConfig(queries=8, distance=64, layer_stride=1),
            "budgets": (0.3, 0.4),
            "val_budget": 0.3,
            "query_window": 16,
            "warm_start": WarmStartConfig(documents=0),
            "lr": 1e-2,
        }
        return SeKVModule(**{**settings, **options})

    return make


@pytest.fixture
def make_data(corpus_folder: Path) -> Callable[..., LocalFiles]:
    """Makes a data module over the saved corpus: `make_data(batch_size=2)`."""

    def make(**options: Any) -> LocalFiles:
        settings: dict[str, Any] = {"length": 400, "min_length": 260, "batch_size": 2, "val_sequences": 2}
        return LocalFiles([str(corpus_folder)], **{**settings, **options})

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes a quiet CPU trainer: `make_trainer(max_steps=3)`."""

    def make(**options: Any) -> Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "check_val_every_n_epoch": None,
            "val_check_interval": 1000,
            "default_root_dir": tmp_path,
        }
        return Trainer(**{**settings, **options})

    return make


@pytest.fixture
def ready_module(make_module: Callable[..., SeKVModule]) -> SeKVModule:
    """A module with its backbone and a fresh adapter, outside any trainer."""
    module = make_module()
    module.configure_model()
    return module


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two documents of different length, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 259, (2, 330), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
