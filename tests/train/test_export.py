"""Checkpoint to adapter folder, and what is refused."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub.errors import LocalTokenNotFoundError

import sekv.hub
from sekv.adapter import SeKVAdapter, read_adapter_config
from sekv.cli import main
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
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    training = read_adapter_config(folder)["training"]
    assert training["steps"] == 2
    assert training["backbone"] == str(backbone_folder)
    assert training["metrics"]["train/loss"] > 0
    assert training["hyper_parameters"]["query_window"] == 16
    assert training["parameters"] == SeKVAdapter.from_pretrained(folder).num_parameters
    card = (folder / "README.md").read_text()
    assert "| steps, end to end | 2 |" in card
    assert f"# {folder.name}\n" in card


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


class Hub:
    """Stands for the Hub's client; keeps what it is asked."""

    def __init__(self, broken=()):
        self.calls, self.broken = [], broken

    def __getattr__(self, name):
        def call(*arguments, **options):
            if name in self.broken:
                raise self.broken[name]
            self.calls.append((name, arguments, options))
            return "https://hub/me/mine"

        return call


@pytest.fixture
def hub(monkeypatch):
    client = Hub()
    monkeypatch.setattr(sekv.hub, "HfApi", lambda: client)
    monkeypatch.setattr(sekv.hub.constants, "HF_HUB_OFFLINE", False)
    return client


def test_an_export_is_pushed_as_one_commit(checkpoint, tmp_path, hub, capsys):
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--push-to-hub", "me/mine", "--private"]) == 0
    (who, _, _), (create, repository, options), (upload, _, what) = hub.calls
    assert (who, create, upload) == ("whoami", "create_repo", "upload_folder")
    assert (repository, options) == (("me/mine",), {"private": True, "exist_ok": True})
    assert (what["repo_id"], what["folder_path"]) == ("me/mine", out)
    assert set(what["allow_patterns"]) == {path.name for path in out.iterdir()}
    assert what["commit_message"] == "Adapter after 2 steps"
    assert 'from_pretrained("me/mine", backbone)' in (out / "README.md").read_text()
    assert "pushed to https://hub/me/mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("repository", "broken", "message"),
    [
        ("mine", {}, "'mine' is no name for the Hub; give ORGANISATION/NAME"),
        ("me/mine", {"whoami": LocalTokenNotFoundError("no")}, "nobody is logged in to the Hub; run `hf auth login`"),
        ("me/mine", {"whoami": OSError("no route")}, "the Hub does not let you in (OSError: no route)"),
    ],
)
def test_a_push_that_must_fail_is_refused_before_anything_is_written(
    checkpoint, tmp_path, hub, repository, broken, message, capsys
):
    hub.broken = broken
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", repository]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_push_that_breaks_off_leaves_the_folder(checkpoint, tmp_path, hub, capsys):
    hub.broken = {"upload_folder": OSError("connection lost")}
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "me/mine"]) == 2
    assert "pushing to 'me/mine' failed (OSError: connection lost)" in capsys.readouterr().err
    assert SeKVAdapter.from_pretrained(tmp_path / "out").num_parameters > 0


def test_no_push_while_offline_is_set(checkpoint, tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setattr(sekv.hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "me/mine"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert hub.calls == []


def test_results_are_part_of_the_card(checkpoint, tmp_path, capsys):
    (tmp_path / "results.json").write_text("nonsense")
    arguments = ["export", str(checkpoint), str(tmp_path / "out"), "--results", str(tmp_path / "results.json")]
    assert main(arguments) == 2
    assert "results.json is not a results.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
