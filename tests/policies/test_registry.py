"""Policies by name: what a spec may say, and what a wrong one is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

import sekv.policies.registry as registry
from sekv.errors import PolicyError
from sekv.policies.base import FullPolicy
from sekv.policies.chunkkv import ChunkKVPolicy
from sekv.policies.expected_attention import ExpectedAttentionPolicy
from sekv.policies.h2o import H2OPolicy
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.kvzip import KVzipPolicy
from sekv.policies.nestedkv import NestedKVPolicy
from sekv.policies.pyramidkv import PyramidKVPolicy
from sekv.policies.registry import available_policies, build_policy, register, split_specs
from sekv.policies.snapkv import SnapKVPolicy
from tests.policies.specs import SMALLEST_SHARE


@dataclass(kw_only=True)
class OptionalPolicy(FullPolicy):
    """A policy with an option of every kind."""

    name: ClassVar[str] = "optional"

    whole: int | None = None
    number: float = 0.0
    switch: bool = False
    text: str = "a"
    adapter: object | None = field(default=None, repr=False)


@pytest.fixture
def optional(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register(OptionalPolicy)


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("full", FullPolicy()),
        (" keydiff ", KeyDiffPolicy()),
        ("keydiff[]", KeyDiffPolicy()),
        ("snapkv[window=32, pooling=max]", SnapKVPolicy(window=32, pooling="max")),
        ("nestedkv[safeguard=0.1,sinks=2]", NestedKVPolicy(safeguard=0.1, sinks=2)),
        ("hubkv", HubKVPolicy(base=KeyDiffPolicy())),
        ("hubkv:snapkv", HubKVPolicy(base=SnapKVPolicy())),
        ("hubkv[gamma=0.25]:snapkv[window=32]", HubKVPolicy(gamma=0.25, base=SnapKVPolicy(window=32))),
        ("h2o[recent_share=0.25]", H2OPolicy(recent_share=0.25)),
        ("pyramidkv", PyramidKVPolicy(layers="pyramid", beta=20.0)),
        ("chunkkv", ChunkKVPolicy(base=SnapKVPolicy())),
        ("hubkv:kvzip", HubKVPolicy(base=KVzipPolicy(layers="pooled"))),
        ("expected_attention[covariance=false]", ExpectedAttentionPolicy(covariance=False)),
    ],
)
def test_specs(spec, policy):
    assert build_policy(spec) == policy


def test_option_types(optional):
    assert build_policy("optional[whole=3,number=1e-3,switch=True,text=b]") == OptionalPolicy(
        whole=3, number=0.001, switch=True, text="b"
    )


def test_context_reaches_the_policies_that_ask_for_it(optional):
    adapter = object()
    assert build_policy("optional", adapter=adapter).adapter is adapter
    assert build_policy("hubkv:snapkv", adapter=adapter) == HubKVPolicy(base=SnapKVPolicy())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snap", "unknown policy 'snap' .*known: .*snapkv, streaming_llm"),
        ("", "unknown policy ''"),
        ("hubkv:", "unknown policy ''"),
        ("snapkv[width=3]", "'snapkv' has no option 'width'; its options: allocation, .*window"),
        ("hubkv[sinks=3]", r"'hubkv' has no option 'sinks', it belongs to .*: write hubkv:keydiff\[sinks=3\]"),
        ("hubkv[tail=2]:snapkv", "'hubkv' has no option 'tail', it belongs to the policy that hubkv wraps"),
        ("hubkv[width=3]", "'hubkv' has no option 'width'; its options: exponent, gamma"),
        ("hubkv[gate_power=-1]", "gate_power must be 0 or more, got -1.0"),
        ("hubkv[exponent=-1]", "exponent must be 0 or more, got -1.0"),
        ("hubkv[kernel_size=0]", "kernel_size must be odd and positive, got 0"),
        ("snapkv[kernel_size=-1]", "kernel_size must be odd and positive, got -1"),
        ("nestedkv[gate_slope=-1]", "gate_slope must be 0 or more, got -1.0"),
        ("hubkv[base=snapkv]", "'hubkv' has no option 'base'"),
        ("optional[adapter=x]", "'optional' has no option 'adapter'"),
        ("snapkv[window=many]", "option window=many is not a whole number"),
        ("snapkv[window=1.5]", "option window=1.5 is not a whole number"),
        ("hubkv[gamma=nan]", "option gamma=nan is not a number"),
        ("optional[switch=1]", "option switch=1 is not true or false"),
        ("snapkv[window=0]", "window must be 1 or more, got 0"),
        ("keydiff[sinks=-1]", "sinks must be 0 or more"),
        ("keydiff[allocation=fair]", "allocation 'fair' is unknown; give uniform or headwise"),
        ("keydiff[safeguard=2]", "safeguard must be from 0 to 1"),
        ("keydiff[layers=tower]", "layers 'tower' is unknown; give uniform, pyramid or pooled"),
        ("keydiff[layers=pooled]", "layers=pooled lets heads compete; give allocation=headwise with it"),
        ("keydiff[beta=0.5]", "beta must be 1 or more, got 0.5"),
        ("chunkkv:chunkkv", "chunkkv refines a scorer"),
        ("snapkv[window]", "option 'window' in .* is malformed"),
        ("snapkv[window=1,window=2]", "option 'window' is given twice"),
        ("snapkv[window=1", "brackets in policy spec .* do not match"),
        ("snapkv]window=1[", "brackets in policy spec .* do not match"),
        ("snapkv[window=1]x", "is malformed"),
        ("snapkv:keydiff", "policy 'snapkv' wraps no other policy; remove ':keydiff'"),
        ("hubkv:full", "hubkv refines a scorer"),
        ("sekv[routing=learned]", "adapter"),
    ],
)
def test_wrong_specs(optional, spec, message):
    with pytest.raises(PolicyError, match=message):
        build_policy(spec)


def test_split_specs():
    text = "sekv[a=1,b=2], nestedkv,hubkv[gamma=1]:snapkv[window=8,sinks=1],kvpress:A(b=C(d=1,e=2),f=3)"
    expected = ["sekv[a=1,b=2]", "nestedkv", "hubkv[gamma=1]:snapkv[window=8,sinks=1]", "kvpress:A(b=C(d=1,e=2),f=3)"]
    assert split_specs(text) == expected
    for wrong in ("", "full,", "full,,keydiff", "snapkv[window=1,full", "kvpress:A(b=1,full"):
        with pytest.raises(PolicyError):
            split_specs(wrong)


def test_a_name_is_taken_once(optional):
    @dataclass(kw_only=True)
    class Other(FullPolicy):
        """Another one."""

        name: ClassVar[str] = "optional"

    with pytest.raises(PolicyError, match=r"'optional' is already registered as .*OptionalPolicy"):
        register(Other)
    assert register(OptionalPolicy) is OptionalPolicy


def test_every_policy_is_described_and_in_the_matrix():
    described = available_policies()
    assert all(line and len(line) < 120 for line in described.values())
    assert {spec.split("[")[0].split(":")[0] for spec in SMALLEST_SHARE} <= described.keys()
