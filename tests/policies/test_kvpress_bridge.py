"""The bridge to kvpress, over a stub of its interface and over the real package where it is installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sekv.budget import Budget
from sekv.errors import PolicyError
from sekv.policies.base import compress
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.kvpress_bridge import KvpressPolicy, as_press, parse_press
from sekv.policies.nestedkv import NestedKVPolicy
from sekv.policies.registry import build_policy
from sekv.policies.snapkv import SnapKVPolicy
from sekv.prefill import prefill
from tests.policies import stub_kvpress
from tests.policies.specs import plain_prefill, randn

N = 50


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", stub_kvpress)
    return stub_kvpress


def read(backbone, **options):
    tokens = torch.randint(3, 259, (1, N), generator=torch.Generator().manual_seed(0))
    return prefill(backbone, tokens, **options)


def test_a_press_sees_what_the_layer_saw(stub, tiny_backbone):
    state = read(tiny_backbone, window=1)
    policy = build_policy("kvpress:LastQueryPress(scale=0.5)")
    for layer in (0, 1):
        query = state.queries[layer][0, :, 0].unflatten(0, (2, 2)).mean(dim=1)  # [K, d]
        expected = 0.5 * torch.einsum("kd,knd->kn", query, state.key_value(layer)[0][0])
        torch.testing.assert_close(policy.score(state, layer)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [7, 20, 49])
def test_a_press_keeps_the_rows_of_the_budget(stub, tiny_backbone, rows):
    state = read(tiny_backbone)
    before = [t.clone() for layer in (0, 1) for t in state.key_value(layer)]
    for spec in ("kvpress:LastQueryPress()", "kvpress:HeadwisePress(LastQueryPress())"):
        cache = compress(state, build_policy(spec), rows)
        assert [int(s.rows_per_head.sum()) for s in cache.stores] == [2 * rows, 2 * rows]
    assert all(map(torch.equal, before, [t for layer in (0, 1) for t in state.key_value(layer)]))
    store = cache.stores[0]
    assert store.rows_per_head.flatten().tolist() != [rows, rows] or rows == 49  # heads compete
    attention = tiny_backbone.attention_module(0)
    assert not hasattr(attention, "rotary_emb")  # the backbone is left as it was
    assert not hasattr(attention, "masked_key_indices")
    assert not attention._forward_hooks


def test_a_press_scores_for_hubkv(stub, tiny_backbone):
    state = read(tiny_backbone)
    policy = build_policy("hubkv:kvpress:LastQueryPress()")
    assert policy == HubKVPolicy(base=KvpressPolicy(press="LastQueryPress()"))
    cache = compress(state, policy, 0.8)
    assert cache.stores[0].rows_per_head.tolist() == [[40, 40]]
    refused = build_policy("hubkv:kvpress:HeadwisePress(LastQueryPress())")
    with pytest.raises(PolicyError, match="gives no scores, so it cannot be refined"):
        compress(state, refused, 0.8)


def test_a_press_that_empties_a_head_is_refused(stub, tiny_backbone):
    with pytest.raises(PolicyError, match="leaves a head of layer 1 without rows"):
        compress(read(tiny_backbone), build_policy("kvpress:HeadwisePress(LastQueryPress())"), 2)


def test_padding_is_refused(stub, tiny_backbone):
    tokens, mask = torch.full((2, N), 9), torch.ones(2, N, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(PolicyError, match="knows no padding"):
        compress(prefill(tiny_backbone, tokens, mask), build_policy("kvpress:LastQueryPress()"), 0.8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kvpress", r"kvpress needs a press: write kvpress:SnapKVPress\(window_size=32\)"),
        ("kvpress:NoPress()", "kvpress has no press 'NoPress'; it has BasePress, HeadwisePress"),
        ("kvpress:torch", "kvpress has no press 'torch'"),
        ("kvpress:LastQueryPress(", "is not a press; write"),
        ("kvpress:LastQueryPress() + 1", "is not a press; write"),
        ("kvpress:a.LastQueryPress()", "is not a press; write"),
        ("kvpress:1 2", "is not a press; write"),
        ("kvpress:LastQueryPress(scale=open)", "'open' in .* is not a number, a text or a press"),
        ("kvpress:LastQueryPress(scale=__import__('os'))", "kvpress has no press '__import__'"),
        ("kvpress:LastQueryPress(width=3)", r"kvpress refuses 'LastQueryPress\(width=3\)': .*width"),
        ("kvpress:LastQueryPress(compression_ratio=2)", "kvpress refuses .*between 0 and 1"),
        ("kvpress:OwnPassPress()", "runs passes of its own and has no place here; see the policy kvzip"),
    ],
)
def test_wrong_presses(stub, spec, message):
    with pytest.raises(PolicyError, match=message):
        build_policy(spec)


def test_a_missing_kvpress_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(PolicyError, match=r"kvpress cannot be imported .*pip install --no-deps kvpress"):
        build_policy("kvpress:SnapKVPress()")
    with pytest.raises(PolicyError, match="kvpress cannot be imported"):
        as_press(NestedKVPolicy())


@pytest.mark.parametrize("policy", [NestedKVPolicy(allocation="uniform"), HubKVPolicy(), KeyDiffPolicy(sinks=2)])
def test_our_scorers_select_the_same_as_presses(stub, policy):
    key, value = randn(1, 2, 200, 16), randn(1, 2, 200, 16, seed=1)
    kept, _ = as_press(policy, 0.75).compress(SimpleNamespace(head_dim=16), None, key, value, None, {})
    keep = policy.keep(plain_prefill(key), 0, torch.tensor([50]))
    for head in range(2):
        found = (kept[0, head][:, None] == key[0, head]).all(dim=-1).any(dim=0)
        assert torch.equal(found, keep[0, head])


@pytest.mark.parametrize("policy", [SnapKVPolicy(), KeyDiffPolicy(layers="pyramid")])
def test_scorers_that_need_more_than_a_layer_are_no_presses(stub, policy):
    with pytest.raises(PolicyError, match=f"{policy.name} needs more than a layer's keys and values"):
        as_press(policy)


def test_the_real_kvpress_runs_and_agrees(tiny_backbone):
    pytest.importorskip("kvpress")
    state = read(tiny_backbone, window=16)
    theirs = parse_press("SnapKVPress(window_size=16)")
    assert theirs.window_size == 16
    ours = SnapKVPolicy(window=16)
    bridged = build_policy("kvpress:SnapKVPress(window_size=16)")
    for layer in (0, 1):
        torch.testing.assert_close(
            bridged.score(state, layer)[..., :-16], ours.score(state, layer)[..., :-16], atol=1e-6, rtol=1e-4
        )
    for spec in (
        "kvpress:AdaKVPress(SnapKVPress(window_size=16))",
        "kvpress:ChunkKVPress(press=KnormPress(), chunk_length=5)",
        "hubkv:kvpress:ExpectedAttentionPress(epsilon=0.01)",
    ):
        cache = compress(state, build_policy(spec), Budget(rows=40))
        assert [int(s.rows_per_head.sum()) for s in cache.stores] == [80, 80]
    made = as_press(HubKVPolicy(), 0.5)
    key = randn(1, 2, 60, 16)
    assert made.compress(SimpleNamespace(head_dim=16), None, key, key, None, {})[0].shape == (1, 2, 30, 16)
