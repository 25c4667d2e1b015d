"""How a context is expected to be cut before anything of it is known: anchors and spans, from the constants alone."""

from __future__ import annotations

from typing import NamedTuple

from sekv.adapter import SeKVConfig
from sekv.budget import Budget


class Cut(NamedTuple):
    """How a context is expected to be cut: the anchors and spans that fill their share of the budget.

    Attributes:
        exact: E.
        spans: S.
        longest: m, tokens.
        span_tokens: T.
    """

    exact: int
    spans: int
    longest: int
    span_tokens: int


def expected_cut(config: SeKVConfig, budget: Budget, context: int) -> Cut:
    """As many anchors as persistent rows allow; a cut costs a row, and on average half a span more than the fewest."""
    rows = budget.rows_for(context)
    cutting = config.cutting()
    cutting = cutting.for_budget(context, rows)
    protected = cutting.sinks + cutting.tail
    if context <= rows or context <= protected:
        return Cut(context, 1, 1, 1)
    pieces = -(-(context - protected) // cutting.max_span)
    spare = max(0, int(cutting.persistent_share * rows) - protected - cutting.summary_rows(rows, pieces))
    if cutting.method == "fixed":
        spare = 0
    if cutting.merges:  # more spans cost nothing; anchors that lie close together make what is between them exact
        density = 6 / (context - protected)  # exact tokens per pair of anchors
        own = 1.0 if cutting.anchors else 0.0  # rows of an anchor itself
        opened = min(context // 6, ((own**2 + 4 * density * spare) ** 0.5 - own) / (2 * density))
        exact = protected + min(spare, int(own * opened + density * opened**2))
        return Cut(exact, pieces + int(opened / 2), cutting.max_span, context - exact)
    anchors = 2 * spare // 3 if cutting.anchors else 0
    exact = protected + anchors
    return Cut(exact, pieces + spare - anchors, cutting.max_span, context - exact)
