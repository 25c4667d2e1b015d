"""Statistics over all queries, gathered in blocks while a context is read, against what a plain pass gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import sekv.attention
from sekv.backbone import Backbone
from sekv.errors import PolicyError
from sekv.observation import AttentionSum, QueryMoments
from sekv.prefill import prefill

SUM, MOMENTS = AttentionSum(), QueryMoments(4)


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain_attention(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Attention [H, n, n] of each layer, by transformers."""
    model.set_attn_implementation("eager")
    return [a[0] for a in model(tokens, output_attentions=True).attentions]


@torch.no_grad()
def plain_queries(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Queries before RoPE [H, n, d] of each layer."""
    seen: list[Tensor] = []
    handles = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output))
        for layer in model.model.layers
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return [q[0].unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1) for q in seen]


@pytest.mark.parametrize("block_bytes", [1, 2**20])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_attention_sums_equal_the_full_attention(make_tiny_model, monkeypatch, block_bytes, chunk_size):
    monkeypatch.setattr(sekv.attention, "_BLOCK_BYTES", block_bytes)  # one query at a time, and all together
    model, tokens = make_tiny_model("qwen3"), ids(23)
    expected = plain_attention(model, tokens)
    made = prefill(Backbone.from_model(model), tokens, chunk_size=chunk_size, observers=[SUM])
    for layer, attention in enumerate(expected):
        want = attention.sum(dim=1).unflatten(0, (2, 2)).mean(dim=1)
        torch.testing.assert_close(made.observed[SUM][layer][0], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_query_moments_equal_the_queries_before_rope(make_tiny_model, chunk_size):
    model, tokens = make_tiny_model("llama"), ids(23)
    expected = plain_queries(model, tokens)
    made = prefill(Backbone.from_model(model), tokens, chunk_size=chunk_size, observers=[MOMENTS])
    for layer, query in enumerate(expected):
        found, counted = made.observed[MOMENTS][layer], query[:, 4:]
        torch.testing.assert_close(found.mean[0], counted.mean(dim=1), atol=1e-5, rtol=1e-5)
        centred = counted - counted.mean(dim=1, keepdim=True)
        torch.testing.assert_close(found.covariance[0], centred.mT @ centred / 19, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_observed(tiny_backbone, side):
    lengths, n = [30, 12, 3], 30
    tokens, mask = torch.zeros(3, n, dtype=torch.long), torch.zeros(3, n, dtype=torch.long)
    for b, length in enumerate(lengths):
        place = slice(n - length, n) if side == "left" else slice(0, length)
        tokens[b, place], mask[b, place] = ids(length, seed=b)[0], 1
    made = prefill(tiny_backbone, tokens, mask, observers=[SUM, MOMENTS])
    for b, length in enumerate(lengths):
        alone = prefill(tiny_backbone, ids(length, seed=b), observers=[SUM, MOMENTS])
        for layer in (0, 1):
            total = made.observed[SUM][layer][b]
            torch.testing.assert_close(total[:, n - length :], alone.observed[SUM][layer][0], atol=1e-4, rtol=1e-4)
            assert not total[:, : n - length].any()
            for name in ("mean", "covariance"):
                found, want = (getattr(state.observed[MOMENTS][layer], name) for state in (made, alone))
                torch.testing.assert_close(found[b], want[0], atol=1e-4, rtol=1e-4)
    assert not made.observed[MOMENTS][0].mean[2].any()  # three tokens, four are skipped


def test_offload_changes_nothing_and_a_part_has_no_statistics(tiny_backbone):
    plain = prefill(tiny_backbone, ids(20), observers=[SUM])
    made = prefill(tiny_backbone, ids(20), observers=[SUM], offload=True, chunk_size=6)
    torch.testing.assert_close(made.observed[SUM][1], plain.observed[SUM][1], atol=1e-5, rtol=1e-5)
    assert plain.narrow(10).observed == {}


def test_moments_need_rope_that_can_be_undone(make_tiny_backbone):
    backbone = make_tiny_backbone()
    backbone.__dict__["rotates_halves"] = False
    with pytest.raises(PolicyError, match="'tiny-llama' does not rotate queries in the half-split layout"):
        prefill(backbone, ids(8), observers=[MOMENTS])
