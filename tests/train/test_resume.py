"""A run that is killed or terminated and resumed ends with the adapter of one that never stopped, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.train.data_files import make_texts, write
from train.cli import main
from train.export import export_checkpoint
from train.module import SeKVModule

ROOT = Path(__file__).parents[2]
STEPS = 8
BATCHES = 12  # two for each of the first four steps, then one

# `sekv train`, which kills itself as it begins a batch: a signal from outside would come whenever the machine has time.
KILLED = """
import os, signal, sys
from train.cli import main
from train.module import SeKVModule

draw = SeKVModule._draw

def stop(module, batch):
    if module.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(module, batch)

SeKVModule._draw = stop
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, backbone_folder):
    """A YAML with everything that has to be restored: several streams, a curriculum, accumulation, random budgets."""
    folder = tmp_path_factory.mktemp("resume")
    for i in range(3):
        write(folder / "texts" / f"{i}.jsonl", make_texts(40, i, size=(300, 900)))
    content = {
        "runs": str(folder / "runs"),
        "save_every": 2,
        "model": {
            "backbone": str(backbone_folder),
            "dtype": "float32",
            "adapter": {"routing_dim": 8, "max_rank": 4, "gate_hidden": 8, "max_span": 16},
            "mining": {"queries": 8, "distance": 64, "layer_stride": 1},
            "warm_start": {"documents": 2, "steps": 5},
            "budgets": [0.3, 0.4],
            "val_budget": 0.3,
            "query_window": 16,
            "lr": 1e-2,
        },
        "data": {
            "class_path": "train.data.LocalFiles",
            "init_args": {
                "paths": [str(folder / "texts")],
                "length": 280,
                "min_length": 270,
                "streams": 2,
                "shuffle_buffer": 8,
                "curriculum": {4: 560},
                "val_sequences": 1,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": STEPS,
            "accumulate_grad_batches": 2,
            "val_check_interval": 3,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def adapter(config: Path, name: str) -> dict[str, torch.Tensor]:
    """The exported adapter of a run's last checkpoint."""
    run = config.parent / "runs" / name
    return load_file(
        export_checkpoint(run / "checkpoints" / "last.ckpt", run / "adapter") / "adapter_model.safetensors"
    )


@pytest.fixture(scope="module")
def whole(runs):
    """The adapter of the run that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        assert main(["--config", str(runs), "--name", "whole"]) == 0
    return adapter(runs, "whole")


def resume(config: Path, name: str) -> dict[str, torch.Tensor]:
    assert main(["--config", str(config), "--name", name, "--resume", "last"]) == 0
    return adapter(config, name)


def test_a_killed_and_resumed_run_ends_with_the_same_adapter(runs, whole, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    batch = random.Random(1).randint(5, BATCHES)  # behind the first save
    command = [sys.executable, "-c", KILLED, str(batch), "--config", str(runs), "--name", "killed"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, cwd=runs.parent, capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr
    checkpoint = runs.parent / "runs" / "killed" / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] in range(2, STEPS, 2)
    resumed = resume(runs, "killed")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("batch", [5, 6, 8])
def test_a_terminated_run_saves_where_it_is_and_resumes(batch, runs, whole, monkeypatch, capsys):
    """Between two steps, in the middle of one, and at a change of stage."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    name = f"terminated-{batch}"
    kept = signal.getsignal(signal.SIGTERM)
    draw = SeKVModule._draw

    def stop(module, *args):
        if module.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == batch:
            signal.raise_signal(signal.SIGTERM)
        return draw(module, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SeKVModule, "_draw", stop)
        assert main(["--config", str(runs), "--name", name]) == 143
    signal.signal(signal.SIGTERM, kept)
    assert f"stopped after step {batch // 2}; go on with --name {name} --resume last" in capsys.readouterr().err
    content = torch.load(runs.parent / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == batch // 2  # not of the last regular save
    gradients = next(state["gradients"] for state in content["callbacks"].values() if "gradients" in state)
    assert bool(gradients) == bool(batch % 2)
    resumed = resume(runs, name)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_validation_comes_every_so_many_steps_however_many_batches_they_take(runs, whole):
    pictures = {path.stem for path in (runs.parent / "runs" / "whole" / "heatmaps").iterdir()}
    assert pictures == {"zoom-step-000003", "zoom-step-000006"}


def test_a_checkpoint_is_at_most_four_adapters_and_loads_as_data(runs, whole):
    path = runs.parent / "runs" / "whole" / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    size = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
    assert path.stat().st_size < 4 * size + 60_000  # and bookkeeping, which does not grow with the adapter
    assert len(content["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["streams"]) == 2
