"""Where an answer was lost: the same context is asked again with one thing repaired at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sekv.budget import Budget
from sekv.policies.base import FullPolicy, Policy
from sekv.policies.sekv import SeKVPolicy

CAUSES = {
    "backbone": "the full cache does no better",
    "router": "the oracle's choice of spans over the same memory does",
    "bases": "exact rows of the spans that the oracle chooses do",
    "summaries": "summary rows of less weight do: they drowned the answer",
    "rows": "the oracle with twice the rows does",
    "memory": "none of these does",
}
"""Why an answer is worse than the full cache's, and what was found to give an answer as good."""

_LESS = -4.0  # bias on summary rows that all but silences them


def can_diagnose(policy: Policy) -> bool:
    """Whether a policy has parts that can be repaired one at a time."""
    return isinstance(policy, SeKVPolicy) and policy.routing == "learned"


def diagnose(
    policy: Policy, budget: Budget, n_tokens: int, score: Callable[[Policy, Budget], float], got: float
) -> str:
    """The first of `CAUSES` that explains an answer of SeKV.

    Args:
        policy: that gave the answer.
        budget: likewise.
        n_tokens: of the context.
        score: asks again under another policy and budget.
        got: score of the answer.

    Returns:
        A key of `CAUSES`.
    """
    assert isinstance(policy, SeKVPolicy)
    goal = score(FullPolicy(), Budget(share=1.0))
    if goal <= got:
        return "backbone"
    oracle = replace(policy, routing="oracle")
    exact = replace(oracle, exact_spans=True)
    more = Budget(rows=min(n_tokens, 2 * budget.rows_for(n_tokens)))
    for cause, repaired, rows in (
        ("router", oracle, budget),
        ("bases", exact, budget),
        ("summaries", replace(exact, summary_bias=_LESS), budget),
        ("rows", exact, more),
    ):
        if score(repaired, rows) >= goal:
            return cause
    return "memory"
