"""`max_rows`: a long generation stays within it, and every token keeps its true position."""

from __future__ import annotations

import pytest
import torch

from sekv.errors import BudgetError
from sekv.policies.base import compress
from sekv.policies.registry import build_policy
from sekv.prefill import prefill

SPECS = ("full", "keydiff", "nestedkv", "quest", "sentencekv[span=16]", "sekv[routing=mean,tail=8]")


def ids(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, (batch, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_rows_stay_bounded_and_positions_true(tiny_backbone, spec):
    policy = build_policy(spec.replace("]", ",max_rows=200]") if "[" in spec else f"{spec}[max_rows=200]")
    context, question = ids(150), ids(40, seed=1)
    cache = compress(prefill(tiny_backbone, context, window=policy.window), policy, 0.5)
    prompt = torch.cat([context, question], dim=1)
    output = tiny_backbone.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=160,
        min_new_tokens=160,
        do_sample=False,
    )
    assert output.shape[1] == 350 and cache.get_seq_length() == 349
    for store in cache.stores:
        assert store.forgotten >= 96
        assert store.forgotten + store.tail_length == 199
        assert store.tail_length < store.max_tail == 200 - (150 if spec == "full" else 75)


@torch.no_grad()
def test_what_is_left_answers_as_if_the_rest_had_never_been(tiny_backbone):
    """After forgetting, attention equals that of a full cache whose forgotten tokens are masked."""
    store = compress(prefill(tiny_backbone, ids(60)), build_policy("full[max_rows=100]"), 1.0).stores[0]
    g = torch.Generator().manual_seed(0)
    keys, values, queries = torch.randn(3, 1, 2, 90, 16, generator=g)
    context = store.exact.key[:, :, :60].clone(), store.exact.value[:, :, :60].clone()
    for t in range(90):
        store.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        query = queries[:, :, t : t + 1].repeat_interleave(2, dim=1)
        found = store.attend(query, 0.25, None)
        seen = slice(store.forgotten, t + 1)
        key, value = (torch.cat([c, x[:, :, seen]], dim=2) for c, x in zip(context, (keys, values), strict=True))
        assert key.shape[2] <= 100
        weights = (query @ key.mT.repeat_interleave(2, dim=1) * 0.25).softmax(-1)
        torch.testing.assert_close(found, weights @ value.repeat_interleave(2, dim=1))
        store.settle()
    assert store.forgotten > 0 and store.fork().forgotten == 0


def test_no_room_is_refused(tiny_backbone):
    with pytest.raises(BudgetError, match="beside the 75 rows of the context; give at least 107"):
        compress(prefill(tiny_backbone, ids(150)), build_policy("keydiff[max_rows=100]"), 0.5)
