"""`sekv bench` as a user runs it: files, table, plot; one line for each mistake, before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sekv.bench.workload import open_backbone
from sekv.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory, make_tiny_model):
    """A folder with nothing but a config.json."""
    folder = tmp_path_factory.mktemp("config")
    make_tiny_model("llama").config.save_pretrained(folder)
    return folder


def arguments(config, output, what="decode", **options):
    settings = {
        "backbone": f"config:{config}",
        "policies": "full,sekv[fill=true],nestedkv",
        "adapter": "untrained",
        "lengths": "600,400",
        "budget": "0.2",
        "dtype": "float32",
        "device": "cpu",
        "output": str(output),
        **options,
    }
    return ["bench", what, *(part for key, value in settings.items() for part in (f"--{key}", value))]


def test_decode_writes_a_table_a_plot_and_what_it_measured_on(config, tmp_path, capsys):
    options = {"steps": "2", "repeats": "1", "new-tokens": "3"}
    assert main([*arguments(config, tmp_path, **options), "--profile"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("decode: one decode step, budget 20%", "end_to_end", "sekv[fill=true]", "measured on", "1.000"):
        assert part in printed
    entries = json.loads((tmp_path / "bench.json").read_text())
    assert [(e["what"], e["length"]) for e in entries if e["policy"] == "full"] == [
        ("decode", 400),
        ("end_to_end", 400),
        ("decode", 600),
        ("end_to_end", 600),
    ]
    assert json.loads((tmp_path / "setting.json").read_text())["decode"]["dtype"] == "float32"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "a decode step of nestedkv behind 600 tokens" in (tmp_path / "profile-decode.txt").read_text()

    assert main(arguments(config, tmp_path, "prefill", repeats="1", lengths="400")) == 0
    entries = json.loads((tmp_path / "bench.json").read_text())
    assert {e["what"] for e in entries} == {"decode", "end_to_end", "prefill", "build", "score"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_random_weights_are_the_same_every_time(config):
    first, second = (open_backbone(f"config:{config}", "float32", "cpu") for _ in range(2))
    assert first.tokenizer is None
    assert all((a == b).all() for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "400,4090"}, "4090 tokens and 40 decoded ones exceed the 4096 positions"),
        ({"lengths": "some"}, "--lengths 'some' names no lengths"),
        ({"repeats": "0"}, "--repeats 0 measures nothing"),
        ({"new-tokens": "-1"}, "--new-tokens -1 measures nothing"),
        ({"budget": "2.5"}, "budget '2.5'"),
        ({"policies": "full,snapk"}, "unknown policy 'snapk'"),
        ({"policies": "sekv", "adapter": "/no/such"}, "/no/such"),
        ({"backbone": "config:/no/such"}, "'/no/such' is neither a folder"),
    ],
)
def test_a_mistake_is_one_line_before_any_work(config, tmp_path, options, message, capsys):
    assert main(arguments(config, tmp_path, **options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_needs_nothing_heavy():
    script = """
import sys
from sekv.cli import main
try:
    main(["bench", "decode", "--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--new-tokens" in done.stdout
    assert done.stdout.rstrip().endswith("False")


def test_the_gpu_script_runs_on_a_cpu(config, tmp_path):
    variables = {
        "BACKBONE": f"config:{config}",
        "POLICIES": "full,sekv[fill=true],snapkv",
        "LENGTHS": "500",
        "BUDGET": "0.2",
        "DTYPE": "bfloat16",
        "DEVICE": "cpu",
        "STEPS": "2",
        "REPEATS": "1",
        "LIMIT": "1200",
        "OUTPUT": str(tmp_path / "out"),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([ROOT / "benchmarks" / "gpu.sh"], env=os.environ | variables, check=True, capture_output=True)
    entries = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(e["what"], e["policy"]) for e in entries] == [
        (what, policy) for what in ("decode", "memory") for policy in ("full", "sekv[fill=true]", "snapkv")
    ]
    assert json.loads((tmp_path / "out" / "setting.json").read_text())["memory"]["dtype"] == "bfloat16"
