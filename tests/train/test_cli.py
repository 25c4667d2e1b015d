"""`sekv train` from one YAML: what it leaves behind, how it resumes, and one line for each mistake."""

from __future__ import annotations

import csv
import errno
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml

from sekv.adapter import SeKVAdapter
from train import losses
from train.cli import TrainCLI, main
from train.export import export_checkpoint
from train.module import SeKVModule


@pytest.fixture
def config(tmp_path, backbone_folder, corpus_folder, monkeypatch):
    """A YAML for a run of a few seconds; other tests than wandb's own switch wandb off."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    content = {
        "runs": str(tmp_path / "runs"),
        "name": "tiny",
        "save_every": 2,
        "model": {
            "backbone": str(backbone_folder),
            "dtype": "float32",
            "adapter": {"routing_dim": 8, "max_rank": 4, "gate_hidden": 8, "max_span": 16},
            "mining": {"queries": 8, "distance": 64, "layer_stride": 1},
            "warm_start": {"documents": 2, "steps": 5},
            "budgets": [0.3],
            "val_budget": 0.3,
            "query_window": 16,
        },
        "data": {
            "class_path": "train.data.LocalFiles",
            "init_args": {"paths": [str(corpus_folder)], "length": 400, "min_length": 260, "val_sequences": 2},
        },
        "trainer": {"accelerator": "cpu", "max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run_folder(config) -> Path:
    return config.parent / "runs" / "tiny"


def test_a_run_leaves_checkpoints_curves_and_its_configuration(config, capsys):
    assert main(["--config", str(config)]) == 0
    run = run_folder(config)
    assert {path.name for path in run.iterdir()} == {"checkpoints", "csv", "config.yaml", "heatmaps"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    for path in (run / "checkpoints").iterdir():
        assert torch.load(path, weights_only=True)["global_step"] in (2, 4)
    rows = list(csv.DictReader((run / "csv" / "version_0" / "metrics.csv").read_text().splitlines()))
    assert sum(bool(row["train/loss"]) for row in rows) == 4
    assert {"train/zoom", "val/recall_learned", "val/recall_mean", "val/recall_oracle", "train/rank"} <= set(rows[0])
    printed = capsys.readouterr().out
    assert "step 4/4" in printed
    assert "s/step" in printed
    assert "covered by the learned router" in printed
    assert printed.count("trainable parameters") == 2  # at the start and in the summary
    assert f"sekv export {run}/checkpoints/best.ckpt {run}/adapter" in " ".join(printed.split())


def test_the_saved_configuration_repeats_the_run(config, tmp_path):
    assert main(["--config", str(config)]) == 0
    saved = run_folder(config) / "config.yaml"
    assert main(["--config", str(saved), "--name", "again"]) == 0
    first, second = (
        torch.load(tmp_path / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("tiny", "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_configuration_and_the_command_line_override(config, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("model: {adapter: {anchors: false}, lr: 0.5}\n")
    assert (
        main(["--config", str(config), "--config", str(more), "--model.lr", "0.002", "--trainer.max_steps", "2"]) == 0
    )
    content = torch.load(run_folder(config) / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["hyper_parameters"]["lr"] == 0.002
    assert content["hyper_parameters"]["adapter"]["anchors"] is False
    assert content["global_step"] == 2


def test_resuming_goes_on_from_the_last_checkpoint(config):
    assert main(["--config", str(config), "--trainer.max_steps", "2"]) == 0
    assert main(["--config", str(config), "--resume", "last"]) == 0
    content = torch.load(run_folder(config) / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    assert content["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["batches"] == 4


def test_an_earlier_run_is_not_overwritten_unless_told(config, capsys):
    assert main(["--config", str(config), "--trainer.max_steps", "2"]) == 0
    before = (run_folder(config) / "checkpoints" / "last.ckpt").read_bytes()
    assert main(["--config", str(config)]) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert (run_folder(config) / "checkpoints" / "last.ckpt").read_bytes() == before
    assert main(["--config", str(config), "--overwrite", "true"]) == 0
    assert (run_folder(config) / "checkpoints" / "best.ckpt").exists()
    capsys.readouterr()
    assert main(["--config", str(config), "--overwrite", "true", "--data.val_sequences", "0"]) == 0
    assert "checkpoints/last.ckpt" in capsys.readouterr().out  # not the best of the run that was replaced


def test_the_exported_adapter_loads_and_equals_the_trained_one(config, make_tiny_backbone):
    assert main(["--config", str(config)]) == 0
    checkpoint = run_folder(config) / "checkpoints" / "best.ckpt"
    folder = export_checkpoint(checkpoint, config.parent / "adapter")
    adapter = SeKVAdapter.from_pretrained(folder, make_tiny_backbone("llama"))
    trained = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(trained[f"adapter.{name}"], p) for name, p in adapter.state_dict().items())


def test_wandb_works_offline_without_account_or_network(config, monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["--config", str(config), "--trainer.max_steps", "2"]) == 0
    runs = list((run_folder(config) / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert any(path.suffix == ".wandb" and path.stat().st_size > 0 for path in runs[0].iterdir())


def test_wandb_can_be_switched_off(config):
    assert main(["--config", str(config), "--trainer.max_steps", "1"]) == 0
    assert not (run_folder(config) / "wandb").exists()


def test_without_held_out_text_the_last_checkpoint_is_the_one_to_export(config, capsys):
    assert main(["--config", str(config), "--data.val_sequences", "0"]) == 0
    assert {path.name for path in (run_folder(config) / "checkpoints").iterdir()} == {"last.ckpt"}
    assert "checkpoints/last.ckpt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.adaptor.alpha", "1"], "unrecognized arguments: --model.adaptor.alpha"),
        (["--model.adapter.routng_dim", "8"], "routng_dim"),
        (["--data.lenght", "8"], "Option 'lenght' is not accepted"),
        (["--model.lr", "fast"], "model.lr"),
        (["--model.losses.zoom", "-1"], "'zoom' must be 0 or more"),
        (["--model.adapter.segmentation", "sentences"], "segmentation 'sentences' is unknown"),
        (["--data.paths", "[/no/such/folder]"], "/no/such/folder does not exist"),
        (["--data", "NoSuchSource"], "NoSuchSource"),
        (["--resume", "/no/such.ckpt"], "no checkpoint /no/such.ckpt to resume from"),
        (["--resume", "last"], "last.ckpt to resume from; give --name"),
        (["--model.budgets", "[0.15]"], "a budget of 0.15 needs documents of at least"),
        (["--model.lr", "-1"], "model.lr must be a number above 0, got -1"),
        (["--model.weight_decay", "-1"], "model.weight_decay must be 0 or more, got -1"),
        (["--data.max_documents", "-1"], "need data.max_documents >= 1, got -1"),
        (["--data.num_workers", "-1"], "need data.num_workers >= 0, got -1"),
        (["--trainer.accelerator", "foo"], "the trainer cannot be made: You selected an invalid accelerator"),
        (["--trainer.val_check_interval", "0"], "trainer.val_check_interval must be above 0"),
        (["--trainer.log_every_n_steps", "0"], "trainer.log_every_n_steps must be above 0"),
        (["--save_every", "0"], "save_every must be above 0"),
        (["--trainer.max_steps", "0"], "nothing left to train"),
        (["--trainer.max_steps", "-1"], "set trainer.max_steps"),
    ],
)
def test_a_mistake_is_one_line_before_the_backbone_loads(config, arguments, message, capsys):
    assert main(["--config", str(config), "--model.backbone", "no/such-backbone", *arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("sekv train: error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in captured.err
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("modle: {lr: 1}", "modle"),
        ("model: {adapter: {routng_dim: 8}}", "routng_dim"),
        ("data: {class_path: train.data.BuiltinCorpus, init_args: {lenght: 8}}", "lenght"),
        ("trainer: {max_stepz: 8}", "max_stepz"),
    ],
)
def test_an_unknown_key_in_a_file_is_named(config, tmp_path, content, message, capsys):
    more = tmp_path / "more.yaml"
    more.write_text(content)
    assert main(["--config", str(config), "--config", str(more)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_backbone_is_one_line(config, capsys):
    assert main(["--config", str(config), "--model.backbone", "/no/such-backbone"]) == 2
    assert "backbone '/no/such-backbone' is neither a folder" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_one_is_refused(config, tmp_path, capsys):
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"not a checkpoint")
    assert main(["--config", str(config), "--resume", str(broken)]) == 2
    assert "broken.ckpt is not a training checkpoint of sekv" in capsys.readouterr().err


def test_a_finished_run_has_nothing_left_to_train(config, capsys):
    assert main(["--config", str(config), "--trainer.max_steps", "2"]) == 0
    last = run_folder(config) / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    assert main(["--config", str(config), "--trainer.max_steps", "2", "--resume", "last"]) == 2
    assert "last.ckpt is at step 2 and trainer.max_steps is 2; raise" in capsys.readouterr().err
    assert last.read_bytes() == before


@pytest.mark.parametrize("runs", ["tiny.yaml", "tiny.yaml/deep"])
def test_runs_inside_a_file_are_refused(config, runs, capsys):
    assert main(["--config", str(config), "--runs", str(config.parent / runs)]) == 2
    assert "tiny.yaml is not a folder; give other --runs" in capsys.readouterr().err


def test_an_unwritable_place_is_named(config, monkeypatch, capsys):
    access = os.access  # the superuser may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert main(["--config", str(config)]) == 2
    assert f"{config.parent} is not writable" in capsys.readouterr().err


def test_a_failed_write_is_one_line_with_the_path(config, monkeypatch, capsys):
    def full(cli):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/tiny/config.yaml")

    monkeypatch.setattr(TrainCLI, "fit", full)
    assert main(["--config", str(config)]) == 2
    assert capsys.readouterr().err == "sekv train: error: runs/tiny/config.yaml: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the checkpoint was trained over another backbone"),
        (["--model.adapter.max_rank", "3"], "max_rank was 4 and is 3"),
        (["--resume", "null", "--data.batch_size", "1000"], "too few for a batch of 1000 on each of 1 process"),
        (["--resume", "null", "--data.length", "100000"], "data.length is 100000 tokens"),
    ],
)
def test_a_run_refused_once_the_backbone_is_there_leaves_no_folder(
    config, arguments, message, make_tiny_backbone, tmp_path, monkeypatch, capsys
):
    """Under the name it gets by default, with all loggers on."""
    assert main(["--config", str(config), "--trainer.max_steps", "1"]) == 0
    other = make_tiny_backbone("llama", seed=7)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    checkpoint = run_folder(config) / "checkpoints" / "last.ckpt"
    resume = ["--resume", str(checkpoint), "--name", "null", "--runs", "elsewhere"]
    assert main(["--config", str(config), *resume, "--model.backbone", str(tmp_path / "other"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_says_how_to_go_on(config, number, code, monkeypatch, capsys):
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

    def stop(module, batch):
        if module.global_step == 2:
            signal.raise_signal(number)
        return draw(module, batch)

    draw = SeKVModule._draw
    monkeypatch.setattr(SeKVModule, "_draw", stop)
    try:
        assert main(["--config", str(config)]) == code
    finally:
        for n, handler in kept.items():
            signal.signal(n, handler)
    assert re.search(
        r"sekv train: stopped after step \d; go on with --name tiny --resume last", capsys.readouterr().err
    )


def test_a_run_whose_held_out_loss_stays_stops_early(config, capsys):
    """At a rate that changes no weight, the second validation finds what the first found."""
    arguments = ["--model.lr", "1e-30", "--trainer.val_check_interval", "1", "--patience", "1"]
    assert main(["--config", str(config), *arguments]) == 0
    assert "Stopped early: 1 validations in a row without a better held-out loss." in capsys.readouterr().out
    steps = {
        name: torch.load(run_folder(config) / "checkpoints" / f"{name}.ckpt", weights_only=True)["global_step"]
        for name in ("best", "last")
    }
    assert steps == {"best": 1, "last": 2}


def test_a_loss_that_is_no_number_stops_the_run_and_can_be_looked_at(config, monkeypatch, capsys):
    total = losses.total

    def broken(*args, **kwargs):
        loss = total(*args, **kwargs)
        return loss * math.nan if loss.requires_grad and len(drawn) == 2 else loss

    drawn: list[bool] = []
    draw = SeKVModule._draw
    monkeypatch.setattr(SeKVModule, "_draw", lambda module, batch: drawn.append(True) or draw(module, batch))
    monkeypatch.setattr(losses, "total", broken)
    assert main(["--config", str(config)]) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sekv train: error:")]
    path = run_folder(config) / "divergence-step-1.safetensors"
    assert "step 1: the loss is not finite" in message
    assert str(path) in message
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    before = {p: p.stat().st_mtime_ns for p in run_folder(config).rglob("*")}
    assert main(["--config", str(run_folder(config) / "config.yaml"), "--replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "gradient of projection" in printed
    assert "nan" not in printed
    assert {p: p.stat().st_mtime_ns for p in run_folder(config).rglob("*")} == before  # looking changes nothing


def test_help_teaches(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for hint in ("sekv train --config configs/demo.yaml", "--resume last", "sekv export", "--model.adapter.max_span"):
        assert hint in text


def test_print_config_trains_nothing(config, capsys):
    assert main(["--config", str(config), "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["query_window"] == 16
    assert not run_folder(config).exists()
