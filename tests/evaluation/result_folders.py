"""Folders of results as an evaluation leaves them, made without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sekv.evaluation.records import Key, Record
from sekv.evaluation.trace import TRACES, Trace

HOSTILE = "</script><script>document.title = 'broken'</script><b>&amp; \u2028 \"'"
POLICIES = ("full", "nestedkv", "sekv[routing=mean]")
TEXT = "The harbour was quiet. The number of the jade locker is 4421907. Rain fell on the roofs, and nobody came by. "


def make_record(task: str, index: int, policy: str, budget: float | int, score: float, **values: Any) -> Record:
    """A record with plain values where none are given."""
    length = int(task.rpartition(":")[2]) if task[-1].isdigit() else 300
    share = 1.0 if policy == "full" else budget
    told: dict[str, Any] = {
        "policy": policy,
        "task": task,
        "budget": budget,
        "query_aware": False,
        "seed": 0,
        "index": index,
        "sample": f"{task}{index}",
        "depth": 25.0 * index,
        "context_tokens": length - 20,
        "truncated": 0,
        "question": "What is the number?",
        "answers": ("4421907",),
        "output": "4421907" if score == 100 else "no idea",
        "new_tokens": 4,
        "metric": "match_all",
        "score": score,
        "rows": share * length,
        "resident_bytes": int(23_040 * share * length),
        "host_bytes": 0 if policy == "full" else 11_000 * length,
        "moved_bytes_per_token": 0.0 if policy == "full" else 900.0 * length,
        "seconds": 0.4 + 0.001 * share * length,
        "prefill_seconds": 0.002 * length,
    }
    return Record(**{**told, **values})


def make_records(policies: Sequence[str] = POLICIES, budgets: Sequence[float] = (0.1, 0.2), n: int = 5) -> list[Record]:
    """Needle answers at two lengths; a bigger budget and a shallower needle score better, the full cache scores 100."""
    return [
        make_record(f"niah:{length}", i, policy, budget, 100.0 if policy == "full" or i < 20 * budget else 0.0)
        for length in (512, 1024)
        for i in range(n)
        for policy in policies
        for budget in budgets
    ]


def make_trace(layers: int = 3, heads: int = 2, seed: int = 0, text: str = TEXT * 4) -> Trace:
    """Zooms drawn at random over a text of one token per three letters: spans of 7 tokens, an anchor before each."""
    rng = np.random.default_rng(seed)
    context = [text[i : i + 3] for i in range(0, len(text), 3)]
    start = np.arange(1, len(context) - 7, 8)
    exact = np.ones(len(context), dtype=bool)
    exact[(start[:, None] + np.arange(7)).ravel()] = False
    question, answer = [" Number", "?"], [" 44", "219", "07", "<eos>"]
    rate = rng.random(len(start)) ** 3 * np.linspace(0.3, 1.0, layers * heads).reshape(layers, heads, 1, 1)
    zoomed = rng.random((layers, heads, len(question) + len(answer) - 1, len(start))) < rate
    ids = [list(range(len(part))) for part in (context, question, answer)]
    length = np.full(len(start), 7)
    return Trace(context, question, answer, *ids, exact, start, length, list(range(layers)), "kv", zoomed)


def write_folder(folder: Path, records: Sequence[Record], traces: dict[Key, Trace] | None = None, **extra: Any) -> Path:
    """Writes the answers, `extra` values in each line, and traces; no results, as in a folder that is not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({**asdict(record), **extra}) + "\n" for record in records)
    (folder / "samples.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps({"backbone": "tiny", "dtype": "torch.float32", "adapter": None}))
    for key, trace in (traces or {}).items():
        trace.save(folder / TRACES, key)
    return folder
