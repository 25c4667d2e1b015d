"""What is compared with kvpress: plain data, read by both environments."""

from __future__ import annotations

from typing import NamedTuple

CONTEXT = 400  # tokens
QUESTION = "\n\nWhat is this text about?"
RATIO = 0.75  # share of the rows removed
KEPT = 100  # rows per head, CONTEXT * (1 - RATIO)
TOLERANCE = 1e-5  # of scores, relative to the largest
LOGIT_TOLERANCE = 1e-3  # of logits: float32 sums over up to 30 layers, in two releases of transformers


class Case(NamedTuple):
    """One method in both implementations.

    Attributes:
        name: in the table.
        spec: our policy.
        press: theirs, without the ratio; evaluated in kvpress' namespace by their side only.
        scored: first and last tokens whose scores are no scores there but marks of protection; None compares no scores.
        note: what decides a difference that is expected; empty where none is.
    """

    name: str
    spec: str
    press: str
    scored: tuple[int, int] | None
    note: str = ""


CASES = (
    Case("KeyDiff", "keydiff[sinks=0,tail=0]", "KeyDiffPress()", (0, 0)),
    Case("SnapKV", "snapkv[window=32,sinks=0,tail=0]", "SnapKVPress(window_size=32)", (0, 32)),
    Case("StreamingLLM", "streaming_llm[sinks=4,tail=0]", "StreamingLLMPress(n_sink=4)", None),
    Case("TOVA", "tova[sinks=0,tail=0]", "TOVAPress()", (0, 1)),
    Case("observed attention", "observed[sinks=0,tail=0]", "ObservedAttentionPress()", (0, 0)),
    Case("expected attention", "expected_attention[sinks=4,tail=0]", "ExpectedAttentionPress()", (4, 0)),
    Case(
        "expected attention, epsilon",
        "expected_attention[sinks=4,tail=0,epsilon=0.01]",
        "ExpectedAttentionPress(epsilon=0.01)",
        (4, 0),
    ),
    Case(
        "AdaKV over SnapKV",
        "snapkv[window=32,sinks=0,tail=0,allocation=headwise]",
        "AdaKVPress(SnapKVPress(window_size=32))",
        (0, 32),
    ),
    Case(
        "AdaKV over expected attention",
        "expected_attention[sinks=4,tail=0,allocation=headwise]",
        "AdaKVPress(ExpectedAttentionPress())",
        (4, 0),
    ),
    Case(
        "PyramidKV",
        "pyramidkv[window=4,sinks=0,tail=0]",
        "PyramidKVPress(window_size=4)",
        (0, 4),
        "the last tokens are retained in every layer, and the series divides the rows beside them, as in the authors' "
        "code (max_capacity_prompt - window_size is spread, the window is added); kvpress runs the series over all "
        "rows, the window among them, so its first layers keep more and its last ones fewer. The scores are the same.",
    ),
    Case(
        "ChunkKV over SnapKV",
        "chunkkv:snapkv[window=40,sinks=0,tail=0]",
        "ChunkKVPress(SnapKVPress(window_size=40), chunk_length=10)",
        None,
    ),
    Case("KVzip, heads and layers compete", "kvzip[sinks=4,tail=0]", "KVzipPress()", (4, 0)),
    Case(
        "KVzip, heads compete, small chunks",
        "kvzip[sinks=4,tail=0,layers=uniform,chunk_size=150]",
        "KVzipPress(layerwise=True, chunk_size=150)",
        (4, 0),
    ),
)
