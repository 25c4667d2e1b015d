"""Checkpoint to adapter folder, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sekv.adapter import SeKVAdapter, read_adapter_config
from sekv.errors import AdapterError
from train.export import export_checkpoint


@pytest.fixture
def checkpoint(make_module, make_data, make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2)
    trainer.fit(make_module(), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def rewritten(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    return path


def test_the_export_says_where_it_comes_from(checkpoint, tmp_path, backbone_folder):
    folder = export_checkpoint(checkpoint, tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    training = read_adapter_config(folder)["training"]
    assert training["steps"] == 2
    assert training["backbone"] == str(backbone_folder)
    assert training["metrics"]["train/loss"] > 0
    assert training["hyper_parameters"]["query_window"] == 16


def test_the_export_loads_over_its_backbone_and_no_other(checkpoint, tmp_path, make_tiny_backbone):
    folder = export_checkpoint(checkpoint, tmp_path / "out")
    adapter = SeKVAdapter.from_pretrained(folder, make_tiny_backbone("llama"))
    assert adapter.parameter_share is not None
    with pytest.raises(AdapterError, match="another backbone"):
        SeKVAdapter.from_pretrained(folder, make_tiny_backbone("llama", seed=5))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AdapterError, match=r"gone\.ckpt does not exist"):
        export_checkpoint(tmp_path / "gone.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_nothing_is_written(checkpoint, tmp_path, keep):
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[: keep if keep > 1 else int(keep * len(data))])
    with pytest.raises(
        AdapterError,
        match=r"x\.ckpt is not a training checkpoint of sekv, or it is damaged or truncated",
    ):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Payload:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_is_not_executed(tmp_path, capsys):
    torch.save({"state_dict": Payload()}, tmp_path / "evil.ckpt")
    with pytest.raises(AdapterError, match=r"evil\.ckpt is not a training checkpoint"):
        export_checkpoint(tmp_path / "evil.ckpt", tmp_path / "out")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("sekv"), "not a training checkpoint of sekv: it lacks sekv"),
        (lambda c: c["state_dict"].pop("adapter.bias"), "does not hold a complete adapter.*bias"),
        (lambda c: c["state_dict"].update({"adapter.new": torch.zeros(1)}), "does not hold a complete adapter.*new"),
        (lambda c: c["state_dict"].update({"adapter.bias": torch.zeros(3)}), "does not hold a complete adapter.*bias"),
        (lambda c: c["state_dict"]["adapter.bias"].fill_(torch.nan), "not finite in bias"),
        (lambda c: c["sekv"]["config"].update({"colour": 1}), "does not hold a complete adapter.*colour"),
        (lambda c: c["sekv"].pop("fingerprint"), "does not hold a complete adapter.*fingerprint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path, change, message):
    with pytest.raises(AdapterError, match=message):
        export_checkpoint(rewritten(checkpoint, change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_something_else_than_a_checkpoint_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(AdapterError, match="not a training checkpoint of sekv: it holds list"):
        export_checkpoint(tmp_path / "list.ckpt", tmp_path / "out")


@pytest.mark.parametrize("content", [b"hello there\n", b"\x80\x02}q\x00.", bytes(range(256)) * 40, b"(((("])
def test_a_foreign_file_is_refused_without_advice_to_execute_it(tmp_path, content):
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(AdapterError, match=r"notes\.txt is not a training checkpoint of sekv") as caught:
        export_checkpoint(tmp_path / "notes.txt", tmp_path / "out")
    assert "weights_only" not in str(caught.value)


def test_a_folder_is_not_a_checkpoint(tmp_path):
    with pytest.raises(AdapterError, match=r"is a folder; give a checkpoint, such as runs/NAME/checkpoints/best\.ckpt"):
        export_checkpoint(tmp_path, tmp_path / "out")
