from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import sekv.prefill
from sekv.backbone import Backbone
from sekv.errors import DataError
from sekv.prefill import Prefill, left_padded, positions_of, prefill

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def ids(n: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, (batch, n), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows [1, n_i] as one batch with its mask, padded with token 0."""
    width = max(row.shape[1] for row in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = row.shape[1]
        where = slice(width - n, width) if side == "left" else slice(0, n)
        tokens[i, where], mask[i, where] = row[0], 1
    return tokens, mask


def assert_same(got: Prefill, want: Prefill, rows: slice = slice(None), tokens: slice = slice(None)) -> None:
    """All of `want` equals the given part of `got`."""
    for layer in want.backbone.geometry.compressible:
        for one, other in zip(got.key_value(layer), want.key_value(layer), strict=True):
            torch.testing.assert_close(one[rows, :, tokens], other, atol=1e-4, rtol=1e-4)
        queries, expected = got.queries[layer], want.queries[layer]
        assert (queries is None) == (expected is None)
        if queries is not None and expected is not None:
            torch.testing.assert_close(queries[rows, :, -expected.shape[2] :], expected, atol=1e-4, rtol=1e-4)
    assert got.surprisal is not None
    assert want.surprisal is not None
    torch.testing.assert_close(got.surprisal[rows, tokens], want.surprisal, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.input_ids[rows, tokens], want.input_ids)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_equals_a_plain_forward(family: str, make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, tokens = make_tiny_model(family), ids(37)
    plain: Any = model(tokens, use_cache=True, output_hidden_states=True)
    made = prefill(Backbone.from_model(model), tokens, window=5)
    for layer in (0, 1):
        key, value = made.key_value(layer)
        torch.testing.assert_close(key, plain.cache.layers[layer].keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value, plain.cache.layers[layer].values, atol=1e-5, rtol=1e-5)
    log_p = plain.logits.float().log_softmax(dim=-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert made.surprisal is not None
    assert made.surprisal[0, 0] == 0
    torch.testing.assert_close(made.surprisal[:, 1:], -log_p, atol=1e-4, rtol=1e-4)
    assert made.hidden is not None
    torch.testing.assert_close(made.hidden, plain.hidden_states[-1][:, -5:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_queries_are_the_last_rotated_ones(tiny_backbone: Backbone) -> None:
    made = prefill(tiny_backbone, ids(20), window=6)
    query, (key, value) = made.queries[0], made.key_value(0)
    assert query is not None
    assert query.shape == (1, 4, 6, 16)
    # The recorded queries, keys and values reproduce the layer's attention output.
    seen: list[Tensor] = []
    projection = tiny_backbone.model.get_submodule("model.layers.0.self_attn.o_proj")
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tiny_backbone.hidden_states(ids(20))
    handle.remove()
    mask = torch.ones(6, 20).tril(14).bool()
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(want.transpose(1, 2).flatten(2), seen[0][:, -6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 23, 24])
@pytest.mark.parametrize("batch", [1, 2])
def test_chunks_change_nothing(chunk_size: int, batch: int, tiny_backbone: Backbone) -> None:
    tokens = ids(23, batch)
    whole = prefill(tiny_backbone, tokens, window=9)
    chunked = prefill(tiny_backbone, tokens, window=9, chunk_size=chunk_size)
    assert_same(chunked, whole)
    assert whole.hidden is not None
    assert chunked.hidden is not None
    torch.testing.assert_close(chunked.hidden, whole.hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_offload_changes_nothing(chunk_size: int | None, tiny_backbone: Backbone) -> None:
    tokens = ids(23, 2)
    offloaded = prefill(tiny_backbone, tokens, window=4, chunk_size=chunk_size, offload=True)
    assert_same(offloaded, prefill(tiny_backbone, tokens, window=4))
    assert {t.device.type for t in (*offloaded.keys, *offloaded.values) if t is not None} == {"cpu"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_equals_single_rows(
    side: str, chunk_size: int | None, family: str, make_tiny_backbone: Callable[..., Backbone]
) -> None:
    backbone = make_tiny_backbone(family)
    rows = [ids(64, seed=1), ids(40, seed=2), ids(1, seed=3)]
    made = prefill(backbone, *padded(rows, side), window=5, chunk_size=chunk_size)
    assert made.lengths.tolist() == [64, 40, 1]
    for i, row in enumerate(rows):
        n = row.shape[1]
        assert_same(made, prefill(backbone, row, window=min(5, n)), slice(i, i + 1), slice(64 - n, 64))
        assert made.mask[i].tolist() == [False] * (64 - n) + [True] * n
        assert made.positions[i, 64 - n :].tolist() == list(range(n))
        assert made.surprisal is not None
        assert not made.surprisal[i, : 64 - n].any()


@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_short_and_odd_lengths(n: int, tiny_backbone: Backbone) -> None:
    made = prefill(tiny_backbone, ids(n), window=4)
    assert made.n_tokens == n
    assert made.key_value(1)[0].shape == (1, 2, n, 16)
    assert made.queries[0] is not None
    assert made.queries[0].shape[2] == min(n, 4)
    assert made.surprisal is not None
    assert made.surprisal.isfinite().all()


@pytest.mark.parametrize("n", [2, 40])
def test_lm_head_sees_bounded_chunks(n: int, tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ids(n, 2)
    whole = prefill(tiny_backbone, tokens)
    sizes: list[int] = []
    head = tiny_backbone.logits

    def recorded(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        sizes.append(logits.numel() * 4)
        return logits

    limit = 7 * 2 * 259 * 4  # seven tokens of two rows
    monkeypatch.setattr(tiny_backbone, "logits", recorded)
    monkeypatch.setattr(sekv.prefill, "LOGIT_BYTES", limit)
    chunked = prefill(tiny_backbone, tokens)
    assert max(sizes) <= limit
    assert sum(sizes) == (n - 1) * 2 * 259 * 4  # every token but the first, once
    assert_same(chunked, whole)


def test_lm_head_stays_off_when_surprisal_is_not_wanted(
    tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_backbone, "logits", None)
    assert prefill(tiny_backbone, ids(9), surprisal=False).surprisal is None


def test_narrow_is_the_prefill_of_the_prefix(tiny_backbone: Backbone) -> None:
    whole = prefill(tiny_backbone, ids(30), window=4)
    assert_same(whole.narrow(11), prefill(tiny_backbone, ids(30)[:, :11]))
    assert whole.narrow(11).hidden is None


def test_empty_context(tiny_backbone: Backbone) -> None:
    with pytest.raises(DataError, match="the context is empty"):
        prefill(tiny_backbone, torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(DataError, match="the context of batch row 1 is empty"):
        prefill(tiny_backbone, ids(4, 2), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))


def test_too_long_context(make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(max_position_embeddings=16)
    with pytest.raises(DataError, match="17 tokens are more than the 16"):
        prefill(backbone, ids(17))


def test_padding_does_not_count_as_length(make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(max_position_embeddings=16)
    tokens, mask = padded([ids(16), ids(4)], "right")
    wide = torch.nn.functional.pad(tokens, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    assert prefill(backbone, *wide).lengths.tolist() == [16, 4]


def test_layers_of_another_kind_keep_their_own_cache(make_tiny_backbone: Callable[..., Backbone]) -> None:
    kinds = ["sliding_attention", "full_attention"]
    made = prefill(make_tiny_backbone("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=8), ids(20))
    assert made.keys[0] is None
    assert list(made.native) == [0]
    with pytest.raises(ValueError, match="layer 0 of tiny-qwen2 cannot be compressed"):
        made.key_value(0)


def test_left_padded_keeps_token_order() -> None:
    tokens, mask = left_padded(
        torch.tensor([[5, 6, 0, 0], [0, 7, 8, 9]]), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]]).bool()
    )
    assert tokens.tolist() == [[0, 0, 5, 6], [0, 7, 8, 9]]
    assert mask.long().tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert positions_of(mask).tolist() == [[0, 0, 0, 1], [0, 0, 1, 2]]
