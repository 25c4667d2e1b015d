"""Predicted bytes of a compressed context against live tensors, and what follows for a link."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.architecture import find_architecture
from sekv.bench.figures import Figure, Folder, Setting
from sekv.bench.footprint import Footprint
from sekv.bench.plan import Machine, Outlook
from sekv.budget import Budget
from sekv.cli import main
from sekv.expected_cut import Cut
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import prefill


@pytest.fixture(scope="module")
def llama():
    return find_architecture("meta-llama/Llama-3.1-8B").backbone.geometry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"segmentation": "fixed", "index": "summary"},
        {"basis_bits": 0, "max_rank": 4},
        {"max_rank": 4},
        {"rope": "post"},
    ],
)
def test_predicted_bytes_are_those_of_live_tensors(make_tiny_backbone, settings, dtype):
    """Given how the context is cut; how well that is foreseen is what `test_a_context_is_cut_as_expected` holds."""
    backbone = make_tiny_backbone("llama")
    backbone.model.to(dtype)
    config = SeKVConfig(routing_dim=8, **settings)
    adapter = SeKVAdapter.create(backbone, config)
    budget, n = Budget.parse(0.2), 1500
    ids = torch.randint(3, 259, (1, n), generator=torch.Generator().manual_seed(0))
    memory = compress(prefill(backbone, ids), SeKVPolicy(adapter=adapter), budget)
    cut = memory.stores[0].plan.segmentation
    lengths = cut.span_length[cut.span_length > 0]
    predicted = Footprint(backbone.geometry, config, budget, n, dtype.itemsize)
    vars(predicted)["cut"] = Cut(int(cut.exact_mask.sum()), len(lengths), int(lengths.max()), int(lengths.sum()))
    assert predicted.resident_bytes == pytest.approx(memory.resident_bytes, rel=0.02)
    assert predicted.host_bytes == pytest.approx(memory.host_bytes, rel=0.05)
    assert predicted.full_bytes == 2 * 2 * 2 * 16 * n * dtype.itemsize


def test_moved_bytes_follow_expansion_and_reuse(llama):
    footprint = Footprint(llama, SeKVConfig(), Budget.parse(0.1), 32768, 2)
    # All rows left for zooming, keys and values in 8 bits with a step for each row.
    rows = 2 * 32 * 8 * (128 + 4) * footprint.zoom_rows
    # The summary of each zoomed span, whether its rows are there already or not, in bfloat16.
    summaries = 2 * 32 * 8 * 128 * 2 * footprint.zoom_rows * footprint.cut.spans / footprint.cut.span_tokens
    assert footprint.moved_bytes(1.0, 0.0) == pytest.approx(rows + summaries, rel=0.01)
    assert footprint.moved_bytes(0.5, 0.8) == pytest.approx(0.1 * rows + 0.5 * summaries, rel=0.01)


def test_a_budget_that_keeps_everything_needs_no_host(llama):
    footprint = Footprint(llama, SeKVConfig(), Budget(rows=9000), 8192, 2)
    assert footprint.resident_bytes == footprint.full_bytes == 2 * 32 * 8 * 128 * 2 * 8192
    assert (footprint.host_bytes, footprint.moved_bytes(1.0, 0.0)) == (0, 0.0)


def test_the_break_even_bandwidth_is_where_both_take_as_long(llama):
    footprint = Footprint(llama, SeKVConfig(), Budget.parse(0.1), 131072, 2)
    outlook = Outlook(footprint, 1e8, Machine(link=25 * 10**9, memory=2 * 10**12))
    assert outlook.added_seconds == 0.004
    even = Outlook(footprint, 1e8, Machine(link=round(outlook.break_even), memory=2 * 10**12))
    assert even.added_seconds == pytest.approx(even.saved_seconds)
    assert Outlook(footprint, 0.0, outlook.machine).break_even == 0.0
    whole = Footprint(llama, SeKVConfig(), Budget(rows=9000), 8192, 2)
    assert math.isinf(Outlook(whole, 1.0, outlook.machine).break_even)


def test_the_command_says_it_for_every_length(tmp_path, monkeypatch, no_network, capsys):
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))
    assert main(["plan", "inference", "--backbone", "meta-llama/Llama-3.1-8B", "--reuse", "0.9"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("8,192", "1,048,576", "137 GB", "GB/s", "90% of them fetched before", "beyond 131,072 tokens"):
        assert part in printed
    assert not list(tmp_path.iterdir())


def test_measured_figures_set_what_is_moved_and_are_compared(tmp_path, tiny_backbone, capsys):
    tiny_backbone.model.config.save_pretrained(tmp_path / "tiny")
    backbone = find_architecture(str(tmp_path / "tiny")).random_backbone(torch.float32, torch.device("cpu"))
    geometry = backbone.geometry
    one = Footprint(geometry, SeKVConfig(), Budget.parse(0.2), 1000, 4)
    figure = Figure("memory", "sekv[fill=true]", 1000, 0.2, None, 0.2, one.resident_bytes, 2 * one.host_bytes, 1e6)
    Folder.open(tmp_path).with_figures("memory", [figure], Setting.here(backbone, 1)).write()
    options = ["--backbone", str(tmp_path / "tiny"), "--dtype", "float32", "--lengths", "1000,2000"]
    file = str(tmp_path / "bench.json")
    assert main(["plan", "inference", *options, "--budget", "0.2", "--measured", file]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1.000" in printed
    assert "0.500" in printed
    assert "as measured" in printed
    assert "1 MB" in printed
    assert main(["plan", "inference", *options, "--budget", "0.3", "--measured", file]) == 2
    assert "holds no decode or memory figures of sekv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reuse", "2"], "--reuse 2.0 is no share"),
        (["--link-bandwidth", "fast"], "'fast' is no bandwidth"),
        (["--measured", "/no/such.json"], "'/no/such.json' is no file"),
        (["--lengths", "x"], "names no lengths"),
    ],
)
def test_a_mistake_is_one_line(options, message, capsys):
    assert main(["plan", "inference", "--backbone", "meta-llama/Llama-3.1-8B", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_bench_json_of_the_table_reads_back(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps([{"what": "memory", "policy": "full", "length": 8, "budget": 0.1}]))
    assert Folder.open(tmp_path).figures == (Figure("memory", "full", 8, 0.1),)
