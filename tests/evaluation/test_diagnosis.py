"""Diagnosis: each cause is found when its repair is the first that helps, and the repairs change what they say."""

from __future__ import annotations

import pytest
import torch

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.budget import Budget
from sekv.evaluation.diagnosis import CAUSES, can_diagnose, diagnose
from sekv.policies.base import FullPolicy, Policy, compress
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import prefill


@pytest.fixture
def policy(tiny_backbone) -> SeKVPolicy:
    return SeKVPolicy(adapter=SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8)))


def cause_of(policy: Policy, asked: Policy, budget: Budget) -> str:
    """Which step of the diagnosis asks this."""
    if isinstance(asked, FullPolicy):
        return "backbone"
    assert isinstance(asked, SeKVPolicy)
    assert asked.routing == "oracle"
    if budget.rows is not None:
        return "rows"
    if asked.summary_bias is not None:
        return "summaries"
    return "bases" if asked.exact_spans else "router"


@pytest.mark.parametrize("cause", [c for c in CAUSES if c not in ("backbone", "memory")])
def test_the_first_repair_that_helps_names_the_cause(policy, cause):
    helps = list(CAUSES)[list(CAUSES).index(cause) :]

    def score(asked: Policy, budget: Budget) -> float:
        found = cause_of(policy, asked, budget)
        return 100.0 if found == "backbone" or found in helps else 0.0

    assert diagnose(policy, Budget(share=0.1), 1000, score, 0.0) == cause


def test_what_the_full_cache_does_not_know_is_the_backbones(policy):
    assert diagnose(policy, Budget(share=0.1), 1000, lambda *_: 50.0, 50.0) == "backbone"


def test_what_nothing_repairs_is_the_memorys(policy):
    score = lambda asked, _: 100.0 if isinstance(asked, FullPolicy) else 0.0  # noqa: E731
    assert diagnose(policy, Budget(share=0.1), 1000, score, 0.0) == "memory"


def test_only_learned_routing_is_diagnosed(policy):
    assert can_diagnose(policy)
    assert not can_diagnose(SeKVPolicy(routing="mean"))
    assert not can_diagnose(FullPolicy())


@torch.no_grad()
def test_exact_spans_keep_every_row_raw(tiny_backbone):
    context = torch.randint(3, 259, (1, 200), generator=torch.Generator().manual_seed(0))
    read = prefill(tiny_backbone, context)
    stores = compress(read, SeKVPolicy(routing="mean", exact_spans=True), 0.5).stores
    real = stores[0].plan.segmentation.span_length[0] > 0
    assert all(bool(s.reader.bank.is_raw.view(2, 2, -1)[..., real].all()) for s in stores)
