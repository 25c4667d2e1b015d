"""`sekv bench train`: a step is compared with a plain prefill of the same tokens."""

from __future__ import annotations

import json

import pytest

from sekv.cli import main


@pytest.fixture
def options(tmp_path, make_tiny_model):
    make_tiny_model("llama").config.save_pretrained(tmp_path / "config")
    settings = {"backbone": f"config:{tmp_path / 'config'}", "lengths": "400", "budget": "0.2", "repeats": "1"}
    settings |= {"dtype": "float32", "device": "cpu", "output": str(tmp_path / "out")}
    return ["bench", "train", *(part for key, value in settings.items() for part in (f"--{key}", value))]


def test_a_step_is_compared_with_a_prefill(options, tmp_path, capsys):
    assert main([*options, "--window", "64", "--profile"]) == 0
    plain, step = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (plain["policy"], plain["ratio_to_full"], plain["peak_bytes"]) == ("full", 1.0, None)
    assert step["ratio_to_full"] == step["median_seconds"] / plain["median_seconds"]
    # The document's keys and values alone: 2 layers, K and V, 2 KV heads, 400 tokens, 16 numbers of 4 bytes.
    assert step["peak_bytes"] > 2 * 2 * 2 * 400 * 16 * 4
    assert "train: an optimiser step" in " ".join(capsys.readouterr().out.split())
    assert "an optimiser step over 400 tokens" in (tmp_path / "out" / "profile-train.txt").read_text()


def test_a_window_as_long_as_the_document_is_refused(options, capsys):
    assert main([*options, "--window", "400"]) == 2
    assert "--window 400 leaves no context in documents of 400 tokens" in capsys.readouterr().err
