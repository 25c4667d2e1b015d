"""Fetching ahead: what a layer chooses is brought for the next one, changes no answer, and stays within its bound."""

from __future__ import annotations

import pytest
import torch

from sekv.policies.base import compress
from sekv.policies.registry import build_policy
from sekv.prefill import prefill
from sekv.stores.offloaded import OffloadedStore

SPECS = ["sekv[routing=mean]", "sekv[routing=mean,summary_share=1.0]", "quest"]


def decoded(backbone, cache, steps=12):
    """Hidden states of steps over the same tokens."""
    tokens = torch.randint(3, 259, (steps, 1, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.cat([backbone.hidden_states(token.expand(2, 1), cache=cache) for token in tokens], dim=1)


@pytest.fixture(scope="module")
def context(make_tiny_backbone):
    backbone = make_tiny_backbone("llama", num_hidden_layers=3)
    ids = torch.randint(3, 259, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    return prefill(backbone, ids, mask)


@pytest.mark.parametrize("spec", SPECS)
def test_answers_stay_the_same(context, monkeypatch, spec):
    policy = build_policy(spec)
    plain = decoded(context.backbone, compress(context, policy, 0.3))
    monkeypatch.setattr(OffloadedStore, "fetches_ahead", True)
    cache = compress(context, policy, 0.3)
    torch.testing.assert_close(decoded(context.backbone, cache.fork()), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded(context.backbone, cache), plain, rtol=0, atol=1e-5)
    first, *later = [store.meter for store in cache.stores]
    assert (first.ahead_rows, first.ahead_used_rows) == (0, 0)
    assert all(0 < meter.ahead_used_rows <= meter.ahead_rows for meter in later)


def test_nothing_is_fetched_ahead_unless_asked_for(context):
    cache = compress(context, build_policy(SPECS[0]), 0.3)
    decoded(context.backbone, cache)
    assert all(store.meter.ahead_rows == 0 for store in cache.stores)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_the_compute_tier_never_exceeds_its_bound(context, monkeypatch, spec, ahead):
    """Slots are all there from the start: decoding adds the tail, and at most a quarter of the slots fetched ahead."""
    monkeypatch.setattr(OffloadedStore, "fetches_ahead", ahead)
    cache = compress(context, build_policy(spec), 0.3)
    start = [store.resident_bytes for store in cache.stores]
    for token in torch.randint(3, 259, (12, 1, 1), generator=torch.Generator().manual_seed(1)):
        with torch.no_grad():
            context.backbone.hidden_states(token.expand(2, 1), cache=cache)
        for store, before in zip(cache.stores, start, strict=True):
            rows = store.exact.key
            row_bytes = 2 * rows.shape[3] * rows.element_size()
            tail = row_bytes * rows.shape[0] * rows.shape[1] * (store.exact._key.shape[2] - store.exact.n_context)
            slots = row_bytes * rows.shape[0] * rows.shape[1] * store.reader.slots.capacity
            assert store.resident_bytes <= before + tail + (slots // 4 if ahead else 0)


def test_a_choice_beyond_the_slots_is_a_fault(context):
    store = compress(context, build_policy(SPECS[0]), 0.3).stores[0]
    with pytest.raises(AssertionError, match="exceeds the slots"):
        store.reader.slots.admit(store.reader._length > 0)
