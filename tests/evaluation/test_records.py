from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sekv.errors import DataError
from sekv.evaluation.journal import Journal, read_records
from sekv.evaluation.plots import plot_scores
from sekv.evaluation.records import Record, paired_differences, replacing, summarise
from sekv.evaluation.report import budget_label, format_bytes, results_table
from sekv.evaluation.shards import Shard

RECORD = Record(
    policy="keydiff",
    task="niah:512",
    budget=0.1,
    query_aware=False,
    seed=0,
    index=0,
    sample="d",
    depth=50.0,
    context_tokens=500,
    truncated=0,
    question="q",
    answers=("a", "b"),
    output="ä b",
    new_tokens=4,
    metric="match_all",
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


SETTINGS = {"backbone": {"layers": 2}, "dtype": "float32"}


def finished(folder: Path, made: list[Record]) -> None:
    with Journal(folder, SETTINGS) as journal:
        for record in made:
            journal.add(record)
    assert journal.finish([record.key for record in made]) == summarise(made)


def test_answers_are_readable_as_they_come_and_summarised_when_all_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    one, two = RECORD, records()[2]
    with Journal(folder, SETTINGS) as journal:
        assert not folder.exists()
        journal.add(one)
        assert read_records(folder / "samples.jsonl") == [one]
        assert journal.finish([one.key, two.key]) is None
        journal.add(two)
    assert journal.finish([one.key, two.key], baseline="full") == summarise([one, two])
    names = ["paired.csv", "paired.json", "results.csv", "results.json", "results.md", "run.json", "samples.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("torn", ["", '{"policy": "ful', '{"policy": "full"}', "\u00e4"])
def test_a_line_that_a_kill_cut_off_is_forgotten(tmp_path: Path, torn: str) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add(RECORD)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes() + torn.encode()[:-1])
    two = records()[2]
    with Journal(tmp_path, SETTINGS) as journal:
        assert list(journal.records.values()) == [RECORD]
        journal.add(two)
    assert read_records(path) == [RECORD, two]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    finished(tmp_path, [RECORD])
    path = tmp_path / "samples.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(DataError, match=r"samples.jsonl, line 1 is no answer"):
        Journal(tmp_path, SETTINGS)


def test_answers_of_other_settings_are_refused_unless_thrown_away(tmp_path: Path) -> None:
    finished(tmp_path, records())
    with pytest.raises(DataError, match=r'another run .dtype: "float32" there, "float16" here.*--restart'):
        Journal(tmp_path, SETTINGS | {"dtype": "float16"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with Journal(tmp_path, SETTINGS | {"dtype": "float16"}, restart=True) as journal:
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        journal.add(RECORD)
    assert read_records(tmp_path / "samples.jsonl") == [RECORD]
    assert not (tmp_path / "results.json").exists()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as first:
        first.add(RECORD)
        with Journal(tmp_path, SETTINGS) as second, pytest.raises(DataError, match="another process writes"):
            second.add(records()[2])
    assert read_records(tmp_path / "samples.jsonl") == [RECORD]


def test_shards_are_merged_by_the_last_one_in_order(tmp_path: Path) -> None:
    made = records()
    keys = [record.key for record in made]
    with Journal(tmp_path, SETTINGS, Shard(1, 2)) as one:
        for record in made[2:]:
            one.add(record)
    assert one.finish(keys) is None
    with Journal(tmp_path, SETTINGS, Shard(0, 2)) as zero:
        for record in made[:2]:
            zero.add(record)
    assert zero.finish(keys) == summarise(made)
    assert read_records(tmp_path / "samples.jsonl") == made
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "results.csv", "results.json", "results.md", "run.json", "samples.jsonl",
    ]  # fmt: skip


def test_earlier_results_stay_until_all_new_ones_are_complete(tmp_path: Path, monkeypatch) -> None:
    finished(tmp_path, [RECORD])
    old = {path.name: path.read_text() for path in tmp_path.glob("results.*")}
    with Journal(tmp_path, SETTINGS) as journal:
        journal.add(records()[2])
    monkeypatch.setattr(csv.DictWriter, "writerows", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        journal.finish([RECORD.key])
    assert {path.name: path.read_text() for path in tmp_path.glob("results.*")} == old


def test_results_json_is_replaced_last(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: order.append(Path(new).name) or real(old, new))
    finished(tmp_path, records())
    assert order == ["run.json", "results.md", "results.csv", "results.json"]


def test_results_are_written_as_json_and_csv(tmp_path: Path) -> None:
    finished(tmp_path, records())
    loaded = json.loads((tmp_path / "results.json").read_text())
    assert [(r["policy"], r["budget"]) for r in loaded] == [("keydiff", 0.1), ("full", 0.1), ("keydiff", 64)]
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert list(rows[0]) == list(loaded[0])
    assert float(rows[0]["score"]) == 75.0


def test_differences_pair_the_same_samples_only() -> None:
    base = [replace(RECORD, index=i, policy="base", score=s) for i, s in enumerate((50.0, 0.0, 100.0))]
    mine = [replace(RECORD, index=i, policy="mine", score=s) for i, s in enumerate((100.0, 0.0, 75.0))]
    alone = [replace(RECORD, index=9, policy="mine"), replace(RECORD, index=0, policy="mine", budget=0.2)]
    (one,) = paired_differences([*base, *mine, *alone], "base")
    assert (one.policy, one.baseline, one.n, one.wins, one.losses) == ("mine", "base", 3, 1, 1)
    assert one.difference == pytest.approx(25 / 3)
    assert -25.0 <= one.low < one.difference < one.high <= 50.0


def test_perplexities_are_summarised_as_such() -> None:
    made = [replace(RECORD, index=i, nll=nll, ppl_ratio=r) for i, (nll, r) in enumerate([(1.0, 2.0), (3.0, 8.0)])]
    (result,) = summarise(made)
    assert result.perplexity == pytest.approx(math.exp(2.0))
    assert result.ppl_ratio == pytest.approx(4.0)
    assert summarise([RECORD])[0].perplexity is None


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
