from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sekv.cli import main
from sekv.errors import DataError
from sekv.evaluation.diagnosis import CAUSES
from sekv.evaluation.page import write_page
from sekv.evaluation.page_data import Answers, failures, family_and_length, needle_grids, result_rows
from sekv.evaluation.page_traces import viewer_data, zoom_rates
from sekv.evaluation.records import Key, paired_differences, summarise
from tests.evaluation.result_folders import HOSTILE, POLICIES, make_record, make_records, make_trace, write_folder

KEY = Key("niah:512", 0, 1, "sekv[routing=mean]", 0.1)


class Page(HTMLParser):
    """What a browser would find: scripts, text, addresses that would be fetched, and ids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.text, self.fetched, self.ids = "", [], set()
        self._inside = ""
        self.feed(path.read_text())
        self.data: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        told = dict(attrs)
        self.ids.add(told.get("id"))
        self.fetched += [told[name] for name in ("src", "data", "action") if name in told]
        if tag == "link":
            self.fetched.append(told["href"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def test_the_page_says_what_the_records_say(tmp_path: Path) -> None:
    records = make_records()
    page = Page(write_page(write_folder(tmp_path / "out", records)))
    assert page.data["policies"] == list(POLICIES)
    by_key = {(r["task"], r["policy"], r["budget"]): r for r in page.data["results"]}
    results = summarise(records)
    assert len(by_key) == len(results) == 2 * 3 * 2
    for result in results:
        row = by_key[result.task, result.policy, result.budget]
        assert {name: row[name] for name in asdict(result)} == asdict(result)
        assert row["length"] == int(result.task.partition(":")[2])
        assert f"{result.score_low:.1f} to {result.score_high:.1f}" in page.text
    assert {"summary", "scores", "needles", "costs", "failures", "unfinished"} <= page.ids
    assert not {"spans", "zooms", "differences"} & page.ids


def test_of_a_fingerprint_the_page_shows_what_a_person_reads(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", make_records())
    backbone = {"model_type": "llama", "num_layers": 30, "compressible": [0, 1], "weight_sketch": {"0": [1.5]}}
    (folder / "run.json").write_text(json.dumps({"backbone": backbone, "dtype": "torch.float32"}))
    text = Page(write_page(folder)).text
    assert "model type llama, num layers 30" in text
    assert "weight" not in text and "compressible" not in text


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = write_page(write_folder(tmp_path / "out", make_records(), {KEY: make_trace()}))
    page = Page(path)
    assert page.fetched == ["data:,"]
    text = path.read_text()
    assert "@import" not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert len(page.scripts) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "run.json", "samples.jsonl", "traces"]


def test_text_of_models_and_tasks_stays_text(tmp_path: Path) -> None:
    record = make_record("niah:512", 1, KEY.policy, 0.1, 0.0, output=HOSTILE, question=HOSTILE, answers=(HOSTILE,))
    trace = make_trace()
    trace = replace(trace, context=[HOSTILE, *trace.context[1:]], answer=[HOSTILE, *trace.answer[1:]])
    folder = write_folder(tmp_path / "</script>", [record], {KEY: trace}, diagnosis=HOSTILE)
    page = Page(write_page(folder))
    assert len(page.scripts) == 2
    assert page.text.count(HOSTILE) == 4  # question, expected answer, output and diagnosis of the failed sample
    (shown,) = page.data["traces"]
    assert shown["output"] == shown["tokens"][0] == HOSTILE
    assert shown["pieces"][0][2] == HOSTILE


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    record = make_record("ppl:512", 0, "full", 0.1, 0.0, nll=float("nan"), ppl_ratio=2.0, metric="perplexity")
    page = Page(write_page(write_folder(tmp_path / "out", [record])))
    (row,) = page.data["results"]
    assert row["perplexity"] is None
    assert row["ppl_ratio"] == pytest.approx(2.0)


def test_differences_are_shown_when_they_were_written(tmp_path: Path) -> None:
    records = make_records()
    folder = write_folder(tmp_path / "out", records)
    differences = paired_differences(records, "nestedkv")
    (folder / "paired.json").write_text(json.dumps([asdict(d) for d in differences]))
    (folder / "results.json").write_text("[]")
    page = Page(write_page(folder))
    assert "differences" in page.ids
    assert "unfinished" not in page.ids
    for one in differences:
        assert f"{one.difference:+.1f}" in page.text


@pytest.mark.parametrize(
    ("task", "family", "length"),
    [
        ("niah:4096", "niah", 4096),
        ("ruler:vt:8192", "ruler:vt", 8192),
        ("ruler:qa_1:4096[data=f.json]", "ruler:qa_1[data=f.json]", 4096),
        ("gsm8k", "gsm8k", None),
        ("mmlu_pro:law", "mmlu_pro:law", None),
    ],
)
def test_a_task_s_name_tells_its_length(task: str, family: str, length: int | None) -> None:
    assert family_and_length(task) == (family, length)


def test_needle_grids_hold_the_mean_of_each_depth_and_length() -> None:
    records = make_records()
    grids = {(g["policy"], g["budget"]): g for g in needle_grids(records)}
    assert len(grids) == 3 * 2
    grid = grids["nestedkv", 0.1]
    assert grid["lengths"] == [512, 1024]
    assert [row["depth"] for row in grid["rows"]] == ["0%", "25%", "50%", "75%", "100%"]
    for i, row in enumerate(grid["rows"]):
        assert [cell["score"] for cell in row["cells"]] == [100.0 if i < 2 else 0.0] * 2
    half = needle_grids([r for r in records if not (r.task == "niah:512" and r.index == 0)])
    assert half[0]["rows"][0]["cells"][0] is None


def test_many_depths_are_put_into_tenths() -> None:
    records = [make_record("niah:512", i, "full", 1.0, 100.0 * (i % 2), depth=100.0 * i / 39) for i in range(40)]
    (grid,) = needle_grids(records)
    assert [row["depth"] for row in grid["rows"]] == [f"{10 * i} to {10 * i + 10}%" for i in range(10)]
    assert sum(row["cells"][0]["n"] for row in grid["rows"]) == 40


def test_failed_samples_come_with_what_is_known_of_them(tmp_path: Path) -> None:
    records = [
        *make_records(),
        make_record("ppl:512", 0, "full", 0.1, 50.0, metric="perplexity", ppl_ratio=2.0, nll=1.0),
    ]
    answers = Answers.read(write_folder(tmp_path / "out", records, diagnosis="router"))
    rows, left_out = failures(answers, {KEY._replace(number=2): 7})
    wrong = [r for r in records if r.score < 100 and r.metric != "perplexity"]
    assert len(rows) == len(wrong) > 0
    assert left_out == 0
    assert {row["diagnosis"] for row in rows} == {f"router: {CAUSES['router']}"}
    assert {row["full_score"] for row in rows} == {100.0}
    assert [row["trace"] for row in rows if row["trace"] is not None] == [7]
    plain = Answers.read(write_folder(tmp_path / "plain", records))
    assert all(row["diagnosis"] is None for row in failures(plain, {})[0])


def test_a_long_list_of_failures_is_cut_fairly(tmp_path: Path) -> None:
    records = [
        make_record(f"niah:{n}", i, "keydiff", 0.1, 0.0) for n, most in ((512, 900), (1024, 300)) for i in range(most)
    ]
    rows, left_out = failures(Answers.read(write_folder(tmp_path / "out", records)), {})
    assert (len(rows), left_out) == (500, 700)
    assert {task: sum(row["task"] == task for row in rows) for task in ("niah:512", "niah:1024")} == {
        "niah:512": 250,
        "niah:1024": 250,
    }


def test_rates_and_bits_equal_the_trace() -> None:
    traces = [(KEY._replace(number=i), make_trace(seed=i)) for i in range(2)]
    (table,) = zoom_rates(traces)
    expected = np.mean([trace.answer_zooms.mean(axis=(2, 3)) for _, trace in traces], axis=0)
    assert [layer["rates"] for layer in table["layers"]] == expected.tolist()
    assert (table["n"], table["top"]) == (2, expected.max())
    told = {key: {"question": "?", "answers": ["4421907"], "output": "", "score": 0.0} for key, _ in traces}
    shown, left_out = viewer_data(traces, told)
    assert left_out == 0
    for one, (_, trace) in zip(shown, traces, strict=True):
        layers, heads, steps, spans = one["shape"]
        packed = np.frombuffer(base64.b64decode(one["zooms"]), dtype=np.uint8).reshape(layers, heads, steps, -1)
        assert np.array_equal(np.unpackbits(packed, axis=-1, count=spans), trace.answer_zooms)
        assert steps == len(trace.answer)


def test_pieces_partition_the_context_and_mark_expected_answers() -> None:
    trace = make_trace()
    told = {KEY: {"question": "?", "answers": ["4421907", ""], "output": "", "score": 0.0}}
    ((shown,), _) = viewer_data([(KEY, trace)], told)
    pieces = shown["pieces"]
    assert "".join(text for _, _, text, _, _ in pieces) == "".join(trace.context)
    assert [first for first, *_ in pieces] == np.cumsum([0, *(n for _, n, *_ in pieces[:-1])]).tolist()
    spans = [(first, n) for first, n, _, span, _ in pieces if span >= 0]
    assert spans == list(zip(trace.span_start.tolist(), trace.span_length.tolist(), strict=True))
    for first, n, text, span, holds in pieces:
        assert trace.exact[first : first + n].all() == (span < 0)
        if "4421907" in text:
            assert holds
        if not set("4421907") & set(text):
            assert not holds
    assert sum(holds for *_, holds in pieces) >= 4  # the text says it four times


def test_traces_beyond_the_page_s_room_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traces = {KEY._replace(number=i): make_trace(seed=i) for i in range(3)}
    size = np.packbits(make_trace().answer_zooms, axis=-1).nbytes
    monkeypatch.setattr("sekv.evaluation.page_traces._MOST_BYTES", 2 * size)
    page = Page(write_page(write_folder(tmp_path / "out", make_records(), traces)))
    assert [trace["number"] for trace in page.data["traces"]] == [0, 1]
    assert "1 more traces are in the folder" in page.text


def test_traces_of_other_answers_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", make_records(), {KEY._replace(number=99): make_trace()})
    assert Page(write_page(folder)).data["traces"] == []


def test_means_over_all_samples_are_sorted_by_task_and_budget() -> None:
    rows = result_rows(make_records(budgets=(0.2, 0.1)))
    assert [row["budget"] for row in rows[:6]] == [0.1] * 3 + [0.2] * 3
    assert rows[0]["prefill_seconds"] == pytest.approx(0.002 * 512)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "out", make_records())
    assert main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()


@pytest.mark.parametrize("what", ["missing", "empty", "run", "paired", "trace", "output"])
def test_what_cannot_be_shown_is_named(what: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "out", None
    message = {
        "missing": "no folder",
        "empty": "holds no answers",
        "run": r"run.json is not JSON",
        "paired": r"paired.json holds no list",
        "trace": r"is no trace of an answer .* remove it",
        "output": "cannot be written",
    }[what]
    if what == "empty":
        folder.mkdir()
    elif what != "missing":
        write_folder(folder, make_records(), {KEY: make_trace()})
    if what == "run":
        (folder / "run.json").write_text("{")
    if what == "paired":
        (folder / "paired.json").write_text("{}")
    if what == "trace":
        next((folder / "traces").glob("*.safetensors")).unlink()
    if what == "output":
        output = tmp_path / "nowhere" / "page.html"
    with pytest.raises(DataError, match=message):
        write_page(folder, output)
    assert not (folder / "report.html").exists()
