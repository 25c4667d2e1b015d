"""The evicted store against a plain loop over its kept rows, and its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sekv.stores.evicted as evicted_module
from sekv.stores.evicted import EvictedStore
from sekv.stores.full import FullStore
from tests.policies.specs import left_padding, randn

B, K, G, D, DV, N = 2, 3, 2, 8, 6, 150
LENGTHS = [150, 70]


def ragged_keep(seed: int = 0) -> Tensor:
    """From one row in a head to nearly all."""
    share = torch.tensor([[0.001, 0.3, 0.95], [0.5, 0.02, 0.2]])[..., None]
    keep = torch.rand(B, K, N, generator=torch.Generator().manual_seed(seed)) < share
    keep[..., -1] = True
    return keep & left_padding(LENGTHS)[:, None]


def uniform_keep(rows: int = 37) -> Tensor:
    keep = torch.zeros(B, K, N, dtype=torch.bool)
    for b in range(B):
        for k in range(K):
            order = torch.randperm(LENGTHS[b], generator=torch.Generator().manual_seed(b * K + k))
            keep[b, k, N - LENGTHS[b] + order[:rows]] = True
    return keep


def make_store(keep: Tensor, n_tail: int = 0) -> tuple[EvictedStore, Tensor, Tensor, Tensor, Tensor]:
    key, value = randn(B, K, N, D), randn(B, K, N, DV, seed=1)
    tail_key, tail_value = randn(B, K, n_tail, D, seed=2), randn(B, K, n_tail, DV, seed=3)
    store = EvictedStore(key, value, keep, torch.tensor(LENGTHS))
    if n_tail:
        store.append(tail_key, tail_value)
    return store, key, value, tail_key, tail_value


def loop_attention(query, key, value, keep, tail_key, tail_value, visible) -> Tensor:
    """One softmax per batch row, head and query over kept rows and visible tail; `visible` [B, Q, T]."""
    out = torch.zeros(*query.shape[:3], DV)
    for b in range(B):
        for h in range(K * G):
            k = h // G
            for q in range(query.shape[2]):
                keys = torch.cat([key[b, k, keep[b, k]], tail_key[b, k, visible[b, q]]])
                values = torch.cat([value[b, k, keep[b, k]], tail_value[b, k, visible[b, q]]])
                out[b, h, q] = (keys @ query[b, h, q] * 0.3).softmax(0) @ values
    return out


KEEPS = {"ragged": ragged_keep(), "uniform": uniform_keep(), "one row": uniform_keep(1), "one block": uniform_keep(32)}


@pytest.mark.parametrize("kind", KEEPS)
@pytest.mark.parametrize("n_queries", [1, 5])
@pytest.mark.parametrize("n_tail", [0, 5, 90])
@pytest.mark.parametrize("workspace", [1, 2**30])
def test_equals_the_loop(monkeypatch, kind, n_queries, n_tail, workspace):
    monkeypatch.setattr(evicted_module, "_WORKSPACE_BYTES", workspace)  # one query at a time, and all together
    keep = KEEPS[kind]
    store, key, value, tail_key, tail_value = make_store(keep, n_tail)
    query = randn(B, K * G, n_queries, D, seed=4)
    if n_tail:
        position = torch.arange(n_tail)
        visible = (position <= position[n_tail - n_queries :, None]).expand(B, n_queries, n_tail)
        mask = None
    else:  # nothing to see in the tail
        visible = mask = torch.ones(B, n_queries, 0, dtype=torch.bool)
        mask = mask[:, None]
    expected = loop_attention(query, key, value, keep, tail_key, tail_value, visible)
    torch.testing.assert_close(store.attend(query, 0.3, mask), expected)
    assert store.meter.queries == B * K * n_queries
    assert store.meter.rows == int(keep.sum()) * n_queries


@pytest.mark.parametrize("workspace", [1, 2**30])
def test_a_tail_mask_hides_padded_questions(monkeypatch, workspace):
    monkeypatch.setattr(evicted_module, "_WORKSPACE_BYTES", workspace)
    keep = ragged_keep()
    store, key, value, tail_key, tail_value = make_store(keep, 6)
    visible = torch.ones(B, 4, 6).tril(2).bool()
    visible[0, :, :3] = False
    visible[0, 0] = False  # a padded query that sees no tail at all
    query = randn(B, K * G, 4, D, seed=4)
    expected = loop_attention(query, key, value, keep, tail_key, tail_value, visible)
    torch.testing.assert_close(store.attend(query, 0.3, visible[:, None]), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 60.0])
def test_half_precision_is_as_exact_as_its_inputs(dtype, scale):
    keep = ragged_keep()
    key, value, query = (scale * randn(B, K, N, D)).to(dtype), randn(B, K, N, DV, seed=1).to(dtype), None
    query = (scale * randn(B, K * G, 1, D, seed=4)).to(dtype)
    store = EvictedStore(key, value, keep, torch.tensor(LENGTHS))
    exact = EvictedStore(key.float(), value.float(), keep, torch.tensor(LENGTHS))
    output = store.attend(query, 0.3, None)
    assert output.dtype == dtype
    torch.testing.assert_close(output, exact.attend(query.float(), 0.3, None).to(dtype))
    assert output.isfinite().all()


def test_keeping_everything_equals_the_full_store():
    key, value, mask = randn(B, K, N, D), randn(B, K, N, DV, seed=1), left_padding(LENGTHS)
    evicted = EvictedStore(key, value, mask[:, None].expand(B, K, N), mask.sum(1))
    full = FullStore(key, value, mask)
    query, tail = randn(B, K * G, 3, D, seed=4), (randn(B, K, 3, D, seed=2), randn(B, K, 3, DV, seed=3))
    for store in (evicted, full):
        store.append(*tail)
    torch.testing.assert_close(evicted.attend(query, 0.3, None), full.attend(query, 0.3, None))
    assert evicted.meter == full.meter


def test_bytes_follow_the_kept_rows():
    row_bytes = 4 * (D + DV)
    for keep in KEEPS.values():
        store = make_store(keep)[0]
        kept = int(keep.sum())
        tables = (store.group, store.bias, store.members, store.rows_per_head, store._first)
        index_bytes = sum(t.nbytes for t in tables if t is not None)
        packed = store.resident_bytes - index_bytes
        assert kept * row_bytes <= packed < (kept + B * K * 32) * row_bytes
        if store.group is None:
            assert packed == kept * row_bytes
        assert index_bytes < 0.2 * packed + 512
    longest = int(ragged_keep().sum(-1).max())
    assert make_store(ragged_keep())[0].resident_bytes < 0.6 * B * K * longest * row_bytes


def test_the_full_keys_are_not_held():
    store, key, value, *_ = make_store(uniform_keep())
    before = store.attend(randn(B, K * G, 1, D), 0.3, None)
    key.fill_(7.0)
    value.fill_(7.0)
    assert torch.equal(store.attend(randn(B, K * G, 1, D), 0.3, None), before)


def test_forks_share_rows_and_never_write_them():
    store, *_ = make_store(ragged_keep())
    snapshot = [t.clone() for t in store.resident_tensors() if t is not None]
    first, second = store.fork(), store.fork()
    for twin, seed in ((first, 10), (second, 11)):
        twin.append(randn(B, K, 3, D, seed=seed), randn(B, K, 3, DV, seed=seed))
        twin.attend(randn(B, K * G, 3, D), 0.3, None)
    assert first.key_blocks is second.key_blocks is store.key_blocks
    assert (store.tail_length, first.tail_length, store.meter.queries) == (0, 3, 0)
    assert all(map(torch.equal, snapshot, [t for t in store.resident_tensors() if t is not None]))


def test_a_head_without_rows_is_refused():
    keep = uniform_keep()
    keep[1, 2] = False
    with pytest.raises(ValueError, match="at least one row"):
        make_store(keep)
