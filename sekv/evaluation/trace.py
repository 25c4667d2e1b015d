"""What single answers zoomed into, kept for the report: each query's choice of spans, by layer and head.

An answer's trace is two files: NAME.safetensors holds ids, the partition and the choices, NAME.json the tokens as text
and which answer it is. The JSON file is written last: a trace without it is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sekv.errors import DataError
from sekv.evaluation.records import Key, replacing

TRACES = "traces"  # folder beside the answers
_FORMAT = 1

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Trace:
    """One answer's zooms.

    Dimensions: N context tokens, S spans, L layers, h KV heads or query heads, n question tokens, m new tokens.

    Attributes:
        context: text of each context token [N]; joined they are the context. Tokens that end within a character have
            no text, the one that completes it has all of it.
        question: text of each token asked with [n].
        answer: text of each new token [m].
        context_ids: [N].
        question_ids: [n].
        answer_ids: [m].
        exact: tokens kept at full resolution: sinks, anchors, short spans and the tail [N], bool.
        span_start: first token of each span [S].
        span_length: tokens of each span [S].
        layers: numbers of the layers that choose [L].
        heads: `kv` when all query heads of a group share a choice, `query` when each chooses for itself.
        zoomed: spans that each token zoomed into [L, h, n + m - 1, S], bool. The last new token is never fed back.
    """

    context: list[str]
    question: list[str]
    answer: list[str]
    context_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]
    exact: Array
    span_start: Array
    span_length: Array
    layers: list[int]
    heads: str
    zoomed: Array

    @property
    def answer_zooms(self) -> Array:
        """What was zoomed into to write each new token [L, h, m, S]: the choice of the token before it."""
        return self.zoomed[:, :, len(self.question) - 1 :]

    def save(self, folder: Path, key: Key) -> Path:
        """Writes both files; `folder` is made where it is missing.

        Returns:
            The JSON file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_name(key)}.json"
        tensors = {
            "context_ids": np.asarray(self.context_ids, dtype=np.int64),
            "question_ids": np.asarray(self.question_ids, dtype=np.int64),
            "answer_ids": np.asarray(self.answer_ids, dtype=np.int64),
            "exact": self.exact,
            "span_start": self.span_start,
            "span_length": self.span_length,
            "zoomed": np.packbits(self.zoomed, axis=-1),
        }
        told = {
            "format": _FORMAT,
            **key._asdict(),
            "heads": self.heads,
            "layers": self.layers,
            "context": self.context,
            "question": self.question,
            "answer": self.answer,
        }
        with replacing(path.with_suffix(".safetensors")) as temporary:
            save_file(tensors, temporary)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def load_trace(path: Path) -> tuple[Key, Trace]:
    """Reads what `Trace.save` wrote.

    Args:
        path: the JSON file.

    Raises:
        DataError: one of the two files is missing, malformed, or does not belong to the other.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise ValueError(f"format {told['format']} is not {_FORMAT}")
        found = load_file(path.with_suffix(".safetensors"))
        ids = [[int(i) for i in found[f"{part}_ids"]] for part in ("context", "question", "answer")]
        zoomed = np.unpackbits(found["zoomed"], axis=-1, count=len(found["span_start"])).astype(bool)
        trace = Trace(
            context=told["context"],
            question=told["question"],
            answer=told["answer"],
            context_ids=ids[0],
            question_ids=ids[1],
            answer_ids=ids[2],
            exact=found["exact"],
            span_start=found["span_start"],
            span_length=found["span_length"],
            layers=told["layers"],
            heads=told["heads"],
            zoomed=zoomed,
        )
        steps = len(trace.question) + len(trace.answer) - 1
        if (len(trace.layers), steps) != (zoomed.shape[0], zoomed.shape[2]) or len(trace.context) != len(trace.exact):
            raise ValueError("its two files are of different answers")
        return Key(*(told[name] for name in Key._fields)), trace
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{path} is no trace of an answer ({error}); remove it") from None


def trace_files(folder: Path) -> Iterator[Path]:
    """The JSON files of the traces in a folder of results, in the order of their names."""
    yield from sorted((folder / TRACES).glob("*.json"))


def _name(key: Key) -> str:
    """A name that says the task and sample, and is the answer's alone."""
    told = re.sub(r"[^A-Za-z0-9.]+", "-", f"{key.task}-{key.number}-{key.policy}")[:80].strip("-")
    return f"{told}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}"
