"""Memories on disk: what comes back is the very same memory, and another one is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.errors import DataError
from sekv.generation import answer, read_context
from sekv.memory_cache import MemoryCache
from sekv.policies.base import Policy
from sekv.policies.registry import build_policy
from sekv.prefill import Prefill
from tests.policies.specs import SMALLEST_SHARE

IDS = [(7 * i) % 250 + 3 for i in range(200)]
QUESTION = list(range(40, 52))
KEPT_WHOLE = ("full", "quest", "sentencekv")
BUDGET = Budget(share=0.5)


class Reads:
    """Reads the context and counts how often."""

    def __init__(self, backbone: Backbone, policy: Policy) -> None:
        self.backbone, self.policy, self.n = backbone, policy, 0

    def __call__(self) -> tuple[Prefill, float]:
        self.n += 1
        return read_context(self.backbone, IDS, [self.policy]), 3.0


def learned(backbone: Backbone, **config: Any) -> Policy:
    torch.manual_seed(0)
    adapter = SeKVAdapter.create(backbone, SeKVConfig(routing_dim=8, max_rank=4, **config))
    return build_policy("sekv[tail=8]", adapter=adapter)


def both(backbone: Backbone, policy: Policy, folder: Path) -> tuple[Reads, Any, Any]:
    """The memory when it is made, and when it comes from the folder."""
    reads = Reads(backbone, policy)
    made = MemoryCache(folder, backbone).get(IDS, policy, BUDGET, reads)
    return reads, made, MemoryCache(folder, backbone).get(IDS, policy, BUDGET, reads)


def check_same(backbone: Backbone, made: Any, again: Any) -> None:
    one, two = (answer(backbone, memory.cache, IDS, QUESTION, 6) for memory in (made, again))
    assert one.ids == two.ids
    for name in ("rows", "resident_bytes", "host_bytes", "moved_bytes_per_token"):
        assert getattr(one, name) == getattr(two, name)
    assert again.prefill_seconds == made.prefill_seconds == 3.0
    ids = torch.tensor([QUESTION])
    with torch.no_grad():
        logits = [backbone.hidden_states(ids, cache=memory.cache.fork()) for memory in (made, again)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("spec", SMALLEST_SHARE)
def test_a_memory_comes_back_as_it_was(tiny_backbone, tmp_path: Path, spec: str) -> None:
    reads, made, again = both(tiny_backbone, build_policy(spec), tmp_path)
    check_same(tiny_backbone, made, again)
    whole = spec.partition("[")[0] in KEPT_WHOLE
    assert reads.n == (2 if whole else 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) == (0 if whole else 1)
    if not whole:
        assert again.seconds == made.seconds


@pytest.mark.parametrize(
    "config",
    [{}, {"index": "summary"}, {"basis_bits": 0}, {"share_group": False, "summary_share": 1.0}, {"rope": "post"}],
    ids=str,
)
def test_a_learned_memory_comes_back_as_it_was(tiny_backbone, tmp_path: Path, config: dict[str, Any]) -> None:
    reads, made, again = both(tiny_backbone, learned(tiny_backbone, **config), tmp_path)
    check_same(tiny_backbone, made, again)
    assert reads.n == 1


def test_a_restored_memory_takes_in_later_tokens_as_the_first_one_did(tiny_backbone, tmp_path: Path) -> None:
    for spec in ("keydiff[max_rows=140]", "sekv[routing=mean,tail=8,max_rows=140]"):
        _, made, again = both(tiny_backbone, build_policy(spec), tmp_path)
        outputs = [
            answer(tiny_backbone, memory.cache, IDS, QUESTION, 90, eos_token_id=None) for memory in (made, again)
        ]
        assert outputs[0].ids == outputs[1].ids


def test_what_keeps_everything_is_made_of_the_prefill_again(tiny_backbone, tmp_path: Path) -> None:
    policy = build_policy("keydiff")
    reads = Reads(tiny_backbone, policy)
    for _ in range(2):
        MemoryCache(tmp_path, tiny_backbone).get(IDS, policy, Budget(share=1.0), reads)
    assert reads.n == 2
    assert list(tmp_path.iterdir()) == []


def test_every_policy_option_budget_and_adapter_has_a_file_of_its_own(tiny_backbone, tmp_path: Path) -> None:
    policies = [build_policy("keydiff"), build_policy("keydiff[tail=8]"), learned(tiny_backbone)]
    other = learned(tiny_backbone)
    with torch.no_grad():
        other.adapter.projection.add_(0.1)  # type: ignore[attr-defined]
    cache = MemoryCache(tmp_path, tiny_backbone)
    for policy in (*policies, other):
        for budget in (Budget(share=0.5), Budget(rows=90)):
            cache.get(IDS, policy, budget, Reads(tiny_backbone, policy))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 8


def test_another_memory_and_a_damaged_one_are_refused(tiny_backbone, tmp_path: Path) -> None:
    policies = [build_policy("keydiff"), build_policy("snapkv")]
    cache = MemoryCache(tmp_path, tiny_backbone)
    files = []
    for policy in policies:
        cache.get(IDS, policy, BUDGET, Reads(tiny_backbone, policy))
        files.append(next(path for path in tmp_path.rglob("*.safetensors") if path not in files))
    os.replace(files[0], files[1])
    with pytest.raises(DataError, match=r"holds another memory \(policy differ\); delete it"):
        cache.get(IDS, policies[1], BUDGET, Reads(tiny_backbone, policies[1]))
    files[1].write_bytes(files[1].read_bytes()[:-50])
    with pytest.raises(DataError, match=r"is damaged .*delete it"):
        cache.get(IDS, policies[1], BUDGET, Reads(tiny_backbone, policies[1]))
