from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sekv.budget import Budget
from sekv.errors import DataError
from sekv.evaluation.journal import read_records
from sekv.evaluation.records import Key
from sekv.evaluation.runner import Evaluation, evaluate
from sekv.evaluation.trace import load_trace, trace_files
from sekv.evaluation.zooms import ZoomRecorder, token_texts
from sekv.generation import answer, read_context
from sekv.policies.base import compress
from sekv.policies.registry import build_policy
from tests.evaluation.result_folders import make_trace

KEY = Key("niah:512", 0, 1, "sekv[routing=mean]", 0.1)


@pytest.mark.parametrize("spec", ["sekv[routing=mean]", "quest"])
def test_a_recorded_choice_is_what_the_meter_counted(tiny_backbone, spec: str) -> None:
    ids = torch.randint(3, 259, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    policy, question = build_policy(spec), list(range(3, 103))  # more than one chunk of queries
    context = read_context(tiny_backbone, ids, [policy])
    plain = answer(tiny_backbone, compress(context, policy, 0.4), ids, question, 6)
    cache, recorder = compress(context, policy, Budget(share=0.4)), ZoomRecorder()
    recorder.start(cache)
    found = answer(tiny_backbone, cache, ids, question, 6)
    assert (found.ids, found.rows) == (plain.ids, plain.rows)
    trace = recorder.trace(tiny_backbone.tokenizer, ids, question, found.ids)
    assert trace is not None
    assert trace.zoomed.shape[:3] == (2, 2, len(question) + len(found.ids) - 1)
    assert trace.heads == "kv"
    covered = np.zeros(len(ids), dtype=int)
    for start, length in zip(trace.span_start, trace.span_length, strict=True):
        covered[start : start + length] += 1
    assert np.array_equal(covered, 1 - trace.exact.astype(int))  # spans and exact tokens are a partition
    zoomed = (trace.zoomed * trace.span_length).sum(-1).mean()
    summaries = found.rows - trace.exact.sum() - zoomed  # rows that are neither exact nor zoomed
    assert -1e-6 < summaries < (1e-6 if spec == "quest" else len(trace.span_start))


def test_nothing_is_kept_unless_asked_for_and_nothing_by_stores_that_never_choose(tiny_backbone) -> None:
    ids = list(range(3, 203))
    for spec, budget, kept in (
        ("sekv[routing=mean]", 0.4, {0, 1}),
        ("sekv[routing=mean]", 1.0, set()),
        ("keydiff", 0.4, set()),
    ):
        policy = build_policy(spec)
        cache = compress(read_context(tiny_backbone, ids, [policy]), policy, budget)
        assert all(getattr(store, "_choices", None) is None for store in cache.stores)
        recorder = ZoomRecorder()
        recorder.start(cache)
        assert cache.record_zooms().keys() == kept
        assert recorder.trace(tiny_backbone.tokenizer, ids, [5], [6]) is None  # nothing was asked yet


def test_the_first_samples_are_traced_and_a_restart_forgets_them(tiny_backbone, tmp_path: Path) -> None:
    specs, out = ["keydiff", "sekv[routing=mean]"], tmp_path / "out"
    evaluate(tiny_backbone, specs, ["niah:400"], [0.4], out, limit=3, trace=2)
    records = {record.key: record for record in read_records(out / "samples.jsonl")}
    traces = dict(load_trace(path) for path in trace_files(out))
    assert traces.keys() == {Key("niah:400", 0, i, specs[1], 0.4) for i in range(2)}
    for key, trace in traces.items():
        assert len(trace.context) == records[key].context_tokens
        assert "".join(trace.answer).replace("<eos>", "") == records[key].output
        assert "locker" in "".join(trace.context)
    evaluate(tiny_backbone, specs, ["niah:400"], [0.4], out, limit=3, trace=3)  # all answered: nothing new
    assert len(list(trace_files(out))) == 2
    evaluate(tiny_backbone, specs, ["niah:400"], [0.4], out, limit=1, restart=True)
    assert not list(trace_files(out))


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    trace = make_trace()
    path = trace.save(tmp_path / "traces", KEY)
    key, found = load_trace(path)
    assert key == KEY
    for name, value in vars(trace).items():
        assert np.array_equal(getattr(found, name), value), name
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".json", ".safetensors"]
    trace.save(tmp_path / "traces", KEY._replace(seed=1))
    assert len(list(trace_files(tmp_path))) == 2


@pytest.mark.parametrize("damage", ["format", "short", "cut"])
def test_a_damaged_trace_is_refused(tmp_path: Path, damage: str) -> None:
    path = make_trace().save(tmp_path, KEY)
    told = json.loads(path.read_text())
    if damage == "format":
        told["format"] = 0
    if damage == "short":
        told["answer"] = told["answer"][:1]
    path.write_text(json.dumps(told))
    if damage == "cut":
        path.with_suffix(".safetensors").write_bytes(b"half")
    with pytest.raises(DataError, match="is no trace of an answer"):
        load_trace(path)


def test_a_negative_number_of_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="trace -1 is no number of samples"):
        Evaluation.plan(["full"], ["niah:512"], [0.5], tmp_path, trace=-1)


@pytest.mark.parametrize("text", ["plain words here", "naïve café", "日本語 🙂 text", "  two  spaces\n\nand lines"])
def test_token_texts_join_to_the_text(tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_that_never_ends_is_shown_as_one(tokenizer) -> None:
    ids = tokenizer("a🙂", add_special_tokens=False).input_ids[:-1]
    assert token_texts(tokenizer, ids) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
