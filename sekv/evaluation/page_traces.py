"""The zooms of single answers as the report page needs them: rates by layer and head, and data of the span viewer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sekv.evaluation.page_data import Row
from sekv.evaluation.records import Key
from sekv.evaluation.report import budget_label
from sekv.evaluation.trace import Array, Trace, load_trace, trace_files

_MOST_BYTES = 24_000_000  # of zooms within the page, before base64


def read_traces(folder: Path, keys: set[Key]) -> list[tuple[Key, Trace]]:
    """The traces of a folder whose answers are there, by task, sample, policy and budget.

    Raises:
        DataError: a trace is malformed.
    """
    found = [load_trace(path) for path in trace_files(folder)]
    return sorted(((key, trace) for key, trace in found if key in keys), key=lambda pair: pair[0])


def zoom_rates(traces: Sequence[tuple[Key, Trace]]) -> list[Row]:
    """How often each layer and head zooms into a span, one table per policy and budget over all of their traces.

    Returns:
        Each with `policy`, `budget_label`, `heads`, `n` (answers), `layers` (numbers), `rates`: mean share of the spans
        that a new token zoomed into, by layer and head, each answer counting alike; and `top`, the largest.
    """
    groups: dict[tuple[str, float | int], list[Trace]] = {}
    for key, trace in traces:
        groups.setdefault((key.policy, key.budget), []).append(trace)
    tables = []
    for (policy, budget), group in groups.items():
        rates = np.mean([trace.answer_zooms.mean(axis=(2, 3)) for trace in group], axis=0)
        tables.append(
            {
                "policy": policy,
                "budget_label": budget_label(budget),
                "heads": group[0].heads,
                "n": len(group),
                "layers": [
                    {"number": number, "rates": row.tolist()}
                    for number, row in zip(group[0].layers, rates, strict=True)
                ],
                "top": float(rates.max()),
            }
        )
    return tables


def viewer_data(traces: Sequence[tuple[Key, Trace]], told: dict[Key, Row]) -> tuple[list[Row], int]:
    """What the span viewer draws, for as many traces as the page can hold, and how many it cannot.

    Args:
        traces: in the order to be offered.
        told: question, expected answers, score and output of each answer.

    Returns:
        Each with its answer's values, `tokens` of the answer, `pieces` of the context in order and `zooms`. A piece is
        [first token, tokens, text, number of the span or -1 where exact, 1 where it holds an expected answer]. `zooms`
        is in base64: bits of spans, packed from the highest, by layer, head and new token.
    """
    shown: list[Row] = []
    used = 0
    for key, trace in traces:
        packed = np.packbits(trace.answer_zooms, axis=-1)
        used += packed.nbytes
        if used > _MOST_BYTES:
            break
        shown.append(
            {
                **key._asdict(),
                "budget_label": budget_label(key.budget),
                **told[key],
                "tokens": trace.answer,
                "heads": trace.heads,
                "layers": trace.layers,
                "shape": list(trace.answer_zooms.shape),
                "zooms": base64.b64encode(packed.tobytes()).decode("ascii"),
                "pieces": _pieces(trace, told[key]["answers"]),
            }
        )
    return shown, len(traces) - len(shown)


def _pieces(trace: Trace, answers: Sequence[str]) -> list[list[Any]]:
    """The context cut into spans and runs of exact tokens."""
    span_of = np.full(len(trace.context), -1)
    for number, (start, length) in enumerate(zip(trace.span_start, trace.span_length, strict=True)):
        span_of[start : start + length] = number
    cuts = np.flatnonzero(np.diff(span_of, prepend=-2) != 0)
    ends = [*cuts[1:].tolist(), len(span_of)]
    holds = _holds(trace.context, answers)
    return [
        [start, end - start, "".join(trace.context[start:end]), int(span_of[start]), int(holds[start:end].any())]
        for start, end in zip(cuts.tolist(), ends, strict=True)
    ]


def _holds(context: Sequence[str], answers: Sequence[str]) -> Array:
    """True for tokens within an occurrence of an expected answer, in any case of letters [N]."""
    text = "".join(context).lower()
    ends = np.cumsum([len(piece) for piece in context])
    found = np.zeros(len(context), dtype=bool)
    for answer in {answer.strip().lower() for answer in answers} - {""}:
        at = text.find(answer)
        while at >= 0:
            first, last = np.searchsorted(ends, [at, at + len(answer) - 1], side="right")
            found[first : last + 1] = True
            at = text.find(answer, at + len(answer))
    return found
