"""SemantiCache: chunks at delimiters, greedy seeds against a loop, rows within the budget, and merged attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.errors import BudgetError, PolicyError
from sekv.policies.semanticache import SemantiCachePolicy, _seeds
from sekv.prefill import prefill
from sekv.stores.merged import MergedStore, merge_rows
from tests.policies.specs import randn


def read(backbone: Backbone, text: str):
    return prefill(backbone, torch.tensor([[1, *backbone.tokenizer(text, add_special_tokens=False).input_ids]]))


def loop_seeds(similarity: Tensor, threshold: float) -> list[int]:
    """The seed of each token of one chunk [L, L], in plain Python."""
    seed: list[int | None] = [None] * len(similarity)
    for i in range(len(seed)):
        if seed[i] is not None:
            continue
        for j in range(i, len(seed)):
            if seed[j] is None and (j == i or float(similarity[i, j]) >= threshold):
                seed[j] = i
    return [int(s) for s in seed if s is not None]


@pytest.mark.parametrize("threshold", [-1.5, -0.2, 0.1, 0.4, 1.5])
def test_greedy_seeds_equal_the_loop(threshold):
    lengths = [9, 4, 1]
    unit = torch.nn.functional.normalize(randn(1, 2, 3, 9, 4), dim=-1)
    similarity = unit @ unit.mT
    real = (torch.arange(9) < torch.tensor(lengths)[:, None])[None, None]
    seed = _seeds(similarity, real, torch.full((1, 2), threshold))
    for k in range(2):
        for c, n in enumerate(lengths):
            assert seed[0, k, c, :n].tolist() == loop_seeds(similarity[0, k, c, :n, :n], threshold)
            assert seed[0, k, c, n:].tolist() == list(range(n, 9))


@given(st.integers(20, 400), st.integers(1, 60), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_chunks_never_outnumber_the_rows(n, cores, every):
    class Marked(SemantiCachePolicy):
        def _delimits(self, state):
            return torch.arange(n)[None] % (every + 1) == every

    policy = Marked(sinks=2, tail=3)
    free = torch.ones(1, n, dtype=torch.bool)
    ends = policy.chunk_ends(None, free, torch.tensor([cores]))
    chunks = int(ends[0, :-1].sum()) + 1
    assert chunks <= cores


def test_chunks_end_at_delimiters_where_the_budget_allows(tiny_backbone):
    state = read(tiny_backbone, "One two. Three four; five six! Seven eight? Nine ten eleven. " * 3)
    policy = SemantiCachePolicy(sinks=1, tail=2)
    plan = policy.prepare(state, Budget(rows=150))
    last = plan.index[0].gather(1, (plan.real[0].sum(dim=1) - 1)[:, None])[:, 0]
    texts = [tiny_backbone.tokenizer.decode(state.input_ids[0, i]) for i in last.tolist()]
    assert set(texts[:-1]) <= set(".!?;\n")
    assert len(texts) == 15
    tokens = plan.index[0][plan.real[0]].sort().values
    assert torch.equal(tokens, torch.arange(1, state.n_tokens - 2))  # a partition of what is not exact


@pytest.mark.parametrize("rows", [20, 60, 100, 199])
def test_every_row_is_used_and_every_token_counts_once(tiny_backbone, rows):
    state = read(tiny_backbone, "The quick brown fox jumps. " * 8)
    policy = SemantiCachePolicy(sinks=3, tail=8)
    plan = policy.prepare(state, Budget(rows=rows))
    for layer in (0, 1):
        store = policy.compress(state, layer, plan)
        assert store.rows_per_head.tolist() == [[rows, rows]]
        size = store.log_size.exp()
        torch.testing.assert_close(size.sum(dim=-1), torch.full((1, 2), float(state.n_tokens)))
        assert (size[..., :3] == 1).all()
        assert (size[..., -8:] == 1).all()


def test_merged_rows_are_means_and_answer_as_their_tokens_would():
    n, query = 12, randn(1, 4, 3, 8, seed=2)
    key, value = randn(1, 2, n, 8), randn(1, 2, n, 8, seed=1)
    row = torch.tensor([0, 1, 1, 2, 0, 0, 3, 3, 3, 3, 4, 5]).expand(1, 2, -1)
    merged_key, size = merge_rows(key, row, 6)
    merged_value, _ = merge_rows(value, row, 6)
    torch.testing.assert_close(merged_key[0, 0, 0], key[0, 0, [0, 4, 5]].mean(dim=0))
    assert size[0, 0].tolist() == [3, 2, 1, 4, 1, 1]
    store = MergedStore(merged_key, merged_value, size, torch.tensor([n]))
    tail_key, tail_value = randn(1, 2, 3, 8, seed=3), randn(1, 2, 3, 8, seed=4)
    store.append(tail_key, tail_value)
    # Each token with its row's key and value: the same softmax, row by row.
    keys = torch.cat([merged_key.gather(2, row[..., None].expand(-1, -1, -1, 8)), tail_key], dim=2)
    values = torch.cat([merged_value.gather(2, row[..., None].expand(-1, -1, -1, 8)), tail_value], dim=2)
    mask = torch.ones(3, n + 3).tril(n).bool()
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(store.attend(query, 0.3, None), want)
    assert store.meter.mean_rows == 6


def test_budgets_and_options_out_of_range(tiny_backbone):
    state = read(tiny_backbone, "Some words here. " * 10)
    with pytest.raises(BudgetError, match=r"semanticache \(sinks, tail and one merged row\) needs at least 37"):
        SemantiCachePolicy().prepare(state, Budget(rows=36))
    with pytest.raises(PolicyError, match="delimiters is empty"):
        SemantiCachePolicy(delimiters="")
