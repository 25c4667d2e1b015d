from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sekv.evaluation.plots import plot_scores
from sekv.evaluation.records import Record, SampleWriter, replacing, summarise
from sekv.evaluation.report import budget_label, format_bytes, results_table

RECORD = Record(
    policy="keydiff",
    task="niah:512",
    budget=0.1,
    query_aware=False,
    index=0,
    depth=50.0,
    context_tokens=500,
    truncated=0,
    question="q",
    answers=("a", "b"),
    output="ä b",
    new_tokens=4,
    score=50.0,
    rows=50.0,
    resident_bytes=1000,
    host_bytes=0,
    moved_bytes_per_token=0.0,
    seconds=1.0,
    prefill_seconds=2.0,
)


def records() -> list[Record]:
    other = replace(
        RECORD, index=1, score=100.0, rows=52.0, resident_bytes=3000, seconds=2.0, truncated=9, context_tokens=520
    )
    return [RECORD, replace(RECORD, policy="full", score=100.0), other, replace(RECORD, budget=64)]


def test_results_are_means_per_task_policy_and_budget() -> None:
    first, full, rows = summarise(records())
    assert (first.policy, first.task, first.budget, first.query_aware, first.n) == (
        "keydiff",
        "niah:512",
        0.1,
        False,
        2,
    )
    assert (first.score, first.score_stderr, first.rows, first.resident_bytes) == (
        75.0,
        pytest.approx(25.0),
        51.0,
        2000.0,
    )
    assert (first.seconds, first.truncated, first.context_tokens) == (1.5, 1, 510.0)
    assert (full.policy, full.n, full.score_stderr) == ("full", 1, 0.0)
    assert rows.budget == 64


def test_samples_are_readable_as_they_come_and_named_when_all_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    writer = SampleWriter(folder)
    assert not folder.exists()
    writer.add(RECORD)
    partial = folder / "samples.jsonl.partial"
    assert json.loads(partial.read_text("utf-8"))["output"] == "ä b"
    writer.add(records()[2])
    writer.finish()
    assert sorted(path.name for path in folder.iterdir()) == ["results.csv", "results.json", "samples.jsonl"]
    assert [json.loads(line)["index"] for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()] == [0, 1]


def finished(folder: Path, made: list[Record]) -> SampleWriter:
    writer = SampleWriter(folder)
    for record in made:
        writer.add(record)
    assert writer.finish() == summarise(made)
    return writer


def test_earlier_results_stay_until_all_new_ones_are_complete(tmp_path: Path, monkeypatch) -> None:
    finished(tmp_path, records())
    old = {path.name: path.read_text() for path in tmp_path.iterdir()}
    writer = SampleWriter(tmp_path)
    writer.add(replace(RECORD, score=1.0))
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        writer.finish()
    partial = tmp_path / "samples.jsonl.partial"
    assert json.loads(partial.read_text())["score"] == 1.0
    partial.unlink()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == old


def test_results_json_is_replaced_last(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: order.append(Path(new).name) or real(old, new))
    finished(tmp_path, records())
    assert order == ["samples.jsonl", "results.csv", "results.json"]


def test_results_are_written_as_json_and_csv(tmp_path: Path) -> None:
    finished(tmp_path, records())
    loaded = json.loads((tmp_path / "results.json").read_text())
    assert [(r["policy"], r["budget"]) for r in loaded] == [("keydiff", 0.1), ("full", 0.1), ("keydiff", 64)]
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert list(rows[0]) == list(loaded[0])
    assert float(rows[0]["score"]) == 75.0


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_the_table_shows_every_result_with_its_brackets(capsys) -> None:
    from rich.console import Console

    spec = "sekv[routing=mean,max_span=16]"
    results = summarise([replace(record, policy=spec) if record.policy == "full" else record for record in records()])
    Console(width=80).print(results_table(results, "niah:512"))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "compressed before the question is known" in shown
    assert sum("keydiff" in line for line in lines) == 2
    assert "sekv[routing=mean" in shown
    assert "75.0 ± 25" in shown
    assert "64 rows" in shown


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1.234e6, "1.23 MB"), (9e15, "9e+03 TB")]
)
def test_bytes_are_readable(n: float, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(("budget", "text"), [(0.1, "10%"), (1.0, "100%"), (0.125, "12.5%"), (409, "409 rows")])
def test_budgets_are_readable(budget: float, text: str) -> None:
    assert budget_label(budget) == text


@pytest.mark.parametrize("policies", [["full"], ["keydiff"], ["full", "keydiff", "sekv[routing=oracle,max_span=32]"]])
@pytest.mark.parametrize("n_tasks", [1, 4])
def test_a_plot_is_drawn_for_any_mix(tmp_path: Path, policies: list[str], n_tasks: int) -> None:
    made = [
        replace(RECORD, policy=policy, task=rf"t$\x{i}$", budget=budget)
        for policy in policies
        for i in range(n_tasks)
        for budget in (0.1, 409)
    ]
    plot_scores(summarise(made), tmp_path / "scores.png")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.png"]
    assert (tmp_path / "scores.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
