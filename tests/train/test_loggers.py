"""wandb online, offline and resumed: the same run, its steps and its configuration; no account, no network."""

from __future__ import annotations

import json
import os
import struct

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from train import loggers
from train.cli import main
from train.loggers import WandbRun, run_loggers


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # Lightning and wandb set variables of their own
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ["NETRC"] = str(tmp_path / "no-netrc")


def wandb_of(made):
    return next(logger for logger in made if isinstance(logger, WandbLogger))


def mode_of(made):
    return wandb_of(made)._offline


@pytest.mark.parametrize(
    ("mode", "key", "offline"),
    [("", "", True), ("", "secret", False), ("offline", "secret", True), ("dryrun", "", True), ("online", "", False)],
)
def test_a_fresh_run_is_online_only_with_an_account_or_on_request(tmp_path, mode, key, offline):
    os.environ.update({"WANDB_MODE": mode, "WANDB_API_KEY": key})
    made, run = run_loggers(tmp_path / "run")
    assert mode_of(made) == run.offline == offline
    assert wandb_of(made).version == run.id
    assert not (tmp_path / "run").exists()


def test_disabled_leaves_the_csv(tmp_path):
    os.environ["WANDB_MODE"] = "disabled"
    made, run = run_loggers(tmp_path)
    assert [type(logger) for logger in made] == [CSVLogger]
    assert run is None


@pytest.mark.parametrize("offline", [True, False])
def test_a_resumed_run_is_the_same_run_in_the_same_mode(tmp_path, offline):
    """Also when somebody has logged in or out in between."""
    os.environ["WANDB_API_KEY"] = "secret" if offline else ""
    WandbRun("abc", offline).save(tmp_path)
    made, run = run_loggers(tmp_path, resuming=True)
    assert run == WandbRun("abc", offline)
    assert (mode_of(made), wandb_of(made).version) == (offline, "abc")
    assert wandb_of(made)._wandb_init["resume"] == "allow"


def test_the_mode_asked_for_wins_over_that_of_the_earlier_part(tmp_path):
    WandbRun("abc", offline=True).save(tmp_path)
    os.environ["WANDB_MODE"] = "online"
    made, run = run_loggers(tmp_path, resuming=True)
    assert run == WandbRun("abc", offline=False)
    assert not mode_of(made)


def test_a_run_that_replaces_another_is_a_new_one(tmp_path):
    WandbRun("abc", offline=True).save(tmp_path)
    assert run_loggers(tmp_path)[1].id != "abc"


@pytest.mark.parametrize("content", [None, "{", '{"id": "x"}', "[]"])
def test_a_lost_record_makes_a_new_run(tmp_path, content):
    if content is not None:
        (tmp_path / "wandb-run.json").write_text(content)
    assert run_loggers(tmp_path, resuming=True)[1].id


def messages(file):
    """The messages of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    block, content = 32768, file.read_bytes()
    at, message = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no header fits into what is left of a block
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield message
            message = b""


def records(folder):
    """Steps logged, configuration, and pictures of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("*.wandb")
    steps, config, images = [], {}, 0
    for message in messages(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "train/loss" in values:
            steps.append(json.loads(values["trainer/global_step"]))
        images += any("val/zoom_heatmap" in key for key in values)
    return steps, config, images


def test_an_offline_run_goes_on_as_itself(tmp_path, backbone_folder, corpus_folder):
    """Train, stop, resume: one wandb run whose steps go on and whose configuration is there, still offline."""
    os.environ["WANDB_SILENT"] = "true"
    os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # nothing listens there
    content = {
        "runs": str(tmp_path / "runs"),
        "name": "tiny",
        "model": {
            "backbone": str(backbone_folder),
            "dtype": "float32",
            "adapter": {"routing_dim": 8, "max_rank": 4, "gate_hidden": 8, "max_span": 16},
            "mining": {"queries": 8, "distance": 64, "layer_stride": 1},
            "warm_start": {"documents": 0},
            "budgets": [0.3],
            "val_budget": 0.3,
            "query_window": 16,
        },
        "data": {
            "class_path": "train.data.LocalFiles",
            "init_args": {"paths": [str(corpus_folder)], "length": 400, "min_length": 260, "val_sequences": 1},
        },
        "trainer": {"accelerator": "cpu", "val_check_interval": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0},
    }
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(content))
    assert main(["--config", str(config), "--trainer.max_steps", "2"]) == 0
    os.environ["WANDB_API_KEY"] = "secret"  # somebody logs in
    os.environ.pop("WANDB_MODE", None)
    assert main(["--config", str(config), "--trainer.max_steps", "4", "--resume", "last"]) == 0

    run = tmp_path / "runs" / "tiny"
    folders = sorted(
        (run / "wandb").glob("offline-run-*"), key=lambda folder: next(folder.glob("*.wandb")).stat().st_mtime
    )
    assert len(folders) == 2
    assert {folder.name.rpartition("-")[2] for folder in folders} == {loggers.WandbRun.load(run).id}
    (first, config_first, images_first), (second, config_second, _) = map(records, folders)
    assert (first, second) == ([0, 1], [2, 3])
    assert images_first == 1
    for held in (config_first, config_second):
        assert held["query_window"] == 16
        assert held["data"]["class_path"] == "train.data.LocalFiles"
    assert len(list((run / "heatmaps").iterdir())) == 2
    assert len(list((run / "csv").rglob("metrics.csv"))) == 2
