"""Experiments from the YAML to the table and the figure, on the tiny backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sekv.cli import main
from sekv.evaluation.reproduce.run import _with_data
from sekv.evaluation.reproduce.tables import Table

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory, tiny_backbone) -> str:
    path = tmp_path_factory.mktemp("backbone")
    tiny_backbone.model.save_pretrained(path)
    tiny_backbone.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(tmp_path: Path, backbone_folder: str, monkeypatch):
    """Runs an experiment of these keys, twice, and gives its table; the second time nothing is answered."""
    monkeypatch.chdir(tmp_path)

    def make(view: str, small: dict[str, Any], **keys: Any) -> Path:
        if "bench" not in small:
            small = {"backbone": backbone_folder, "device": "cpu", **small}
        content = {"title": "A title", "source": "here", "view": view, "small": small, "paper": small, **keys}
        path = tmp_path / "try.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def go(view: str, small: dict[str, Any], **keys: Any) -> list[list[str]]:
        path, out = make(view, small, **keys), tmp_path / "results" / "reproduce" / "try-small"
        assert main(["reproduce", str(path)]) == 0
        table = (out / "table.csv").read_text()
        before = {file: file.stat().st_mtime_ns for file in out.rglob("samples.jsonl")}
        assert main(["reproduce", str(path)]) == 0
        assert {file: file.stat().st_mtime_ns for file in out.rglob("samples.jsonl")} == before
        assert (out / "table.csv").read_text() == table
        assert (out / "table.md").read_text().startswith("**A title**\n\n| ")
        assert (out / "figure.png").read_bytes().startswith(PNG)
        return [line.split(",") for line in table.splitlines()]

    go.make = make  # type: ignore[attr-defined]
    return go


def test_scores_of_several_runs_come_under_their_names(run, tmp_path: Path) -> None:
    shared = {"budgets": [0.5], "tasks": ["niah:{length}", "ppl:400"], "lengths": [400], "limit": 2}
    runs = {"all of it": {"policies": ["full"]}, "Two, at once": {"policies": ["keydiff", "streaming_llm"]}}
    header, *rows = run("scores", shared | {"runs": runs})
    assert header == ["policy", "budget", "niah:400", "ppl:400", "mean"]
    out = tmp_path / "results" / "reproduce" / "try-small"
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"all-of-it", "two-at-once"}
    text = (out / "table.md").read_text()
    assert "| all of it | 50% |" in text
    assert "| Two, at once: keydiff | 50% |" in text
    assert len(rows) == 3
    assert "(1.000x)" in text  # the full cache against itself


def test_needles_by_depth_and_length(run) -> None:
    sweep = {"policies": ["full", "keydiff"], "budgets": [64], "tasks": ["niah:{length}"], "lengths": [400, 500]}
    header, *rows = run("needles", sweep | {"limit": 3})
    assert header == ["policy", "budget", "depth", "400", "500"]
    assert [row[:3] for row in rows] == [
        [policy, "64 rows", depth] for policy in ("full", "keydiff") for depth in ("0%", "50%", "100%")
    ]


def test_pairs_are_compared_on_the_same_samples(run, tmp_path: Path) -> None:
    sweep = {"policies": ["keydiff", "nestedkv", "hubkv:keydiff"], "budgets": [0.5, 0.2], "tasks": ["ppl:500"]}
    header, *rows = run("pairs", sweep | {"limit": 2}, pairs={"nestedkv": "keydiff", "hubkv:keydiff": "keydiff"})
    assert header[:4] == ["policy", "against", "task", "r"]
    assert [row[:4] for row in rows] == [
        [policy, "keydiff", "ppl:500", r] for policy in ("nestedkv", "hubkv:keydiff") for r in ("0.80", "0.50")
    ]
    lines = (tmp_path / "results/reproduce/try-small/samples.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]

    def mean(policy: str) -> float:
        scores = [one["score"] for one in answers if one["policy"] == policy and one["budget"] == 0.2]
        return sum(scores) / len(scores)

    assert float(rows[0][4].strip('"').partition(" ")[0]) == pytest.approx(mean("nestedkv") - mean("keydiff"), abs=0.06)


def test_zooms_by_layer_and_head(run) -> None:
    sweep = {"policies": ["sekv[routing=mean,tail=8]"], "budgets": [0.5], "tasks": ["niah:400"], "limit": 2, "trace": 2}
    header, *rows = run("zooms", sweep)
    assert header[-2:] == ["head 0", "head 1"]
    assert [row[-3] for row in rows] == ["0", "1"]  # layers
    assert all(0 <= float(cell) <= 100 for row in rows for cell in row[-2:])


def test_measurements_go_through_bench(run, tmp_path: Path, backbone_folder: str) -> None:
    command = {"command": "memory", "policies": ["full", "keydiff"], "lengths": [200], "budget": 0.5, "steps": 2}
    path = run.make("bench", {"bench": [command | {"backbone": backbone_folder, "repeats": 1}]})
    assert main(["reproduce", str(path), "--output", "out", "--device", "cpu"]) == 0
    header, *rows = [line.split(",") for line in (tmp_path / "out" / "table.csv").read_text().splitlines()]
    assert header[:4] == ["what", "policy", "length", "budget"]
    assert [row[:4] for row in rows] == [["memory", policy, "200", "50%"] for policy in ("full", "keydiff")]
    assert "resident bytes" in header
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("no_network")
def test_a_benchmark_without_network_names_the_option_before_anything_is_loaded(run, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = run.make("scores", {"policies": ["full"], "budgets": [0.5], "tasks": ["gsm8k"], "backbone": "nowhere"})
    assert main(["reproduce", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'openai/gsm8k' cannot be had from the Hub" in said
    assert "--data FOLDER" in said
    assert said.count("error") <= 2


def test_published_files_are_read_from_the_folder_given(run, tmp_path: Path) -> None:
    folder = tmp_path / "published" / "gsm8k"
    folder.mkdir(parents=True)
    for split, n in (("train", 3), ("test", 2)):
        lines = [json.dumps({"question": f"How many are {i}?", "answer": f"As many. #### {i}"}) for i in range(n)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    sweep = {"policies": ["full"], "budgets": [0.5], "tasks": ["gsm8k[max_new_tokens=4]"]}
    path = run.make("scores", sweep)
    assert main(["reproduce", str(path), "--data", str(tmp_path / "published"), "--output", "out"]) == 0
    assert (tmp_path / "out" / "table.csv").read_text().splitlines()[0] == "policy,budget,gsm8k,mean"


def test_data_goes_to_benchmarks_alone(tmp_path: Path) -> None:
    (tmp_path / "longbench").mkdir()
    assert _with_data("niah:400", tmp_path) == "niah:400"
    assert _with_data("gsm8k", tmp_path) == f"gsm8k[data={tmp_path}]"
    assert _with_data("longbench:qasper[max_length=9]", tmp_path) == (
        f"longbench:qasper[data={tmp_path}/longbench,max_length=9]"
    )
    assert _with_data("gsm8k[data=x]", tmp_path) == "gsm8k[data=x]"


def test_an_adapter_that_was_not_trained_is_named(run, capsys) -> None:
    sweep = {"policies": ["sekv"], "budgets": [0.5], "tasks": ["niah:400"], "adapter": "runs/x/adapter"}
    assert main(["reproduce", str(run.make("scores", sweep))]) == 2
    assert "needs the adapter 'runs/x/adapter', which is not there" in " ".join(capsys.readouterr().err.split())


def test_the_list_and_a_missing_name(capsys) -> None:
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "needle-heatmaps" in shown
    assert "SeKV, table 1" in shown
    assert main(["reproduce"]) == 2
    assert "sekv reproduce --list" in capsys.readouterr().err


def test_a_table_in_its_three_forms() -> None:
    table = Table("Title", ["name", "n"], [["a|b", "1"], ["c,d", "2"]], note="A note.")
    assert table.csv == 'name,n\na|b,1\n"c,d",2\n'
    assert table.markdown == "**Title**\n\n| name | n |\n| --- | ---: |\n| a\\|b | 1 |\n| c,d | 2 |\n\nA note.\n"
    assert table.for_terminal().row_count == 2
