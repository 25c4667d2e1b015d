"""Under `max_rows` tokens that leave the tail compete by the policy's own score, where keys alone give it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.base import compress
from sekv.policies.registry import build_policy
from sekv.prefill import prefill
from sekv.stores.evicted import EvictedStore
from tests.policies.specs import left_padding, randn

B, K, D, N, ROWS = 2, 2, 16, 150, 60
LENGTHS = [150, 110]


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def kept_rows(store: EvictedStore) -> list[list[Tensor]]:
    """Kept keys of every batch row and head [rows, d]."""
    counts, flat, at = store.rows_per_head, store.key_blocks.flatten(0, 1), 0
    result = []
    for b in range(counts.shape[0]):
        result.append([])
        for k in range(counts.shape[1]):
            n = int(counts[b, k])
            result[-1].append(flat[at : at + n].clone())
            at += -(-n // store.block) * store.block
    return result


def loop_scores(spec: str, keys: Tensor) -> Tensor:
    """Scores [n] of keys [n, d] in the order of their positions."""
    if spec.startswith("streaming_llm"):
        return torch.arange(len(keys)).float()
    unit = torch.stack([key / key.norm() for key in keys])
    mean = unit.mean(0)
    return torch.stack([-(key @ mean) / (key.norm() * mean.norm()) for key in unit])


@torch.no_grad()
@pytest.mark.parametrize("spec", ["streaming_llm", "keydiff", "keydiff[allocation=headwise,sinks=2]"])
def test_the_block_competes_head_by_head(tiny_backbone, spec):
    options = "max_rows=140,tail=8"
    policy = build_policy(spec.replace("]", f",{options}]") if "[" in spec else f"{spec}[{options}]")
    state = prefill(tiny_backbone, ids(B, N), left_padding(LENGTHS))
    memory = compress(state, policy, ROWS)
    store, n_bytes = memory.stores[1].fork(), memory.stores[1].resident_bytes
    before = kept_rows(store)
    keys, real = randn(B, K, 81, D, seed=3), torch.ones(B, 1, 1, 81, dtype=torch.bool)
    keys[..., 0] += torch.linspace(-4, 4, 81)
    real[1, ..., :7] = False  # padding of a question
    store.append(keys, keys)
    store.settle(real)
    n = store.forgotten
    assert n == 81 - 80 + 32 and store.tail_length == 81 - n
    torch.testing.assert_close(store.exact.key, keys[:, :, n:])
    sinks, changed = policy.sinks, 0
    for b in range(B):
        for k in range(K):
            later = keys[b, k, 7 * b : n]
            candidates = torch.cat([before[b][k], later])
            scores = loop_scores(spec, candidates)
            scores[:sinks] = torch.inf
            kept = scores.topk(len(before[b][k])).indices.sort().values
            torch.testing.assert_close(kept_rows(store)[b][k], candidates[kept])
            changed += int((kept >= len(before[b][k])).sum())
    assert changed > 0
    assert torch.equal(store.rows_per_head, memory.stores[1].rows_per_head)
    # The memory that was forked is as it was, and takes no more bytes than the rows of before.
    after = [rows for heads in kept_rows(memory.stores[1]) for rows in heads]
    assert all(map(torch.equal, after, [rows for heads in before for rows in heads]))
    assert memory.stores[1].resident_bytes == n_bytes
    with pytest.raises(PolicyError, match="fork it before decoding"):
        store.fork()


@torch.no_grad()
def test_streaming_llm_is_a_window_through_a_long_generation(tiny_backbone):
    """What a query sees are the sinks and the most recent tokens of context and answer, whatever lies between."""
    context, later = ids(1, 120), ids(1, 200, seed=1)
    policy = build_policy("streaming_llm[max_rows=100]")
    cache = compress(prefill(tiny_backbone, context), policy, 50)
    for t in range(200):
        tiny_backbone.hidden_states(later[:, t : t + 1], position_ids=torch.tensor([[120 + t]]), cache=cache)
    store = cache.stores[0]
    keys, _ = prefill(tiny_backbone, torch.cat([context, later], dim=1)).key_value(0)  # the first layer's see no window
    tail = store.tail_length
    for k in range(2):
        want = torch.cat([keys[0, k, :4], keys[0, k, 320 - tail - 46 : 320 - tail]])
        torch.testing.assert_close(kept_rows(store)[0][k], want, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 320 and tail < 50


@torch.no_grad()
@pytest.mark.parametrize("spec", ["nestedkv", "snapkv", "hubkv", "expected_attention"])
def test_other_scorers_keep_their_context(tiny_backbone, spec):
    policy = build_policy(f"{spec}[max_rows=120]")
    state = prefill(tiny_backbone, ids(1, N), window=policy.window, observers=policy.observers)
    cache = compress(state, policy, ROWS)
    before = kept_rows(cache.stores[0])[0]
    tiny_backbone.hidden_states(ids(1, 90, seed=1), position_ids=N + torch.arange(90)[None], cache=cache)
    assert cache.stores[0].forgotten > 0
    assert all(map(torch.equal, kept_rows(cache.stores[0])[0], before))
