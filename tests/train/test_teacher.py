"""The teacher's rows against eager attention and plain loops."""

from __future__ import annotations

import pytest
import torch

from sekv.cache import ATTENTION_NAME
from sekv.prefill import prefill
from train import teacher


@pytest.fixture(scope="module")
def padded_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 259, (2, 40), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids, mask


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rows_equal_eager_attention(family, padded_batch, make_tiny_backbone):
    ids, mask = padded_batch
    window = 12
    backbone = make_tiny_backbone(family)
    model = backbone.model
    model.set_attn_implementation("eager")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        eager = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    model.set_attn_implementation(ATTENTION_NAME)
    document = prefill(backbone, ids, mask, surprisal=False, window=window)
    index = torch.arange(40 - window, 40).expand(2, -1)
    for layer in range(2):
        rows = teacher.attention_rows(
            document.queries[layer], document.keys[layer], index, document.mask, backbone.geometry.head_dim**-0.5
        )
        assert (rows - eager[layer][:, :, -window:]).abs().max() < 1e-5


def test_rows_of_selected_queries_are_the_rows_of_all(tiny_backbone, padded_batch):
    document = prefill(tiny_backbone, *padded_batch, surprisal=False, window=10)
    every = torch.arange(30, 40).expand(2, -1)
    rows = teacher.attention_rows(document.queries[0], document.keys[0], every, document.mask, 0.25)
    pick = torch.tensor([[1, 7], [0, 9]])
    query = torch.stack([document.queries[0][b][:, pick[b]] for b in range(2)])
    some = teacher.attention_rows(query, document.keys[0], 30 + pick, document.mask, 0.25)
    for b in range(2):
        torch.testing.assert_close(some[b], rows[b][:, pick[b]])


def test_far_share_golden_value():
    # One real document of 6 tokens behind 2 of padding; uniform attention of the last token.
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]).bool()
    attention = mask.float()[:, None, None] / 6
    share = teacher.far_share(attention, torch.tensor([[7]]), mask, distance=torch.tensor([2]), sinks=1)
    # Far tokens are those at index <= 5, without the sink at index 2: indices 3, 4, 5.
    torch.testing.assert_close(share, torch.tensor([[0.5]]))


def test_mining_takes_the_queries_that_look_far_back():
    # Keys along one axis at the far tokens, along another at the near ones; only queries 1 and 3 ask for the far ones.
    far, near = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    key = torch.stack([far] * 12 + [near] * 12)[None, None]
    query = torch.stack([near, far, near, far, near])[None, None] * 20
    mask = torch.ones(1, 24, dtype=torch.bool)
    mined = teacher.mine([query], [key], mask, 1.0, count=2, distance=6, sinks=0)
    assert mined.tolist() == [[1, 3]]


def test_mining_counts_no_more_than_the_window_and_shortens_the_distance_in_short_documents():
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 10, 8)
    mask = torch.ones(1, 10, dtype=torch.bool)
    mined = teacher.mine([query], [key], mask, 1.0, count=99, distance=512, sinks=0)
    assert mined.tolist() == [[0, 1, 2, 3]]
    index = torch.arange(6, 10)[None]
    attention = teacher.attention_rows(query, key, index, mask, 1.0)
    assert (teacher.far_share(attention, index, mask, torch.tensor([3]), 0) > 0).all()  # half of 6 context tokens


def test_row_of_token_golden_value():
    # 9 context tokens: padding, exact, span of 3, exact, exact, span of 2.
    row = teacher.row_of_token(
        exact_index=torch.tensor([[1, 5, 6, 0]]),
        exact_mask=torch.tensor([[True, True, True, False]]),
        span_start=torch.tensor([[2, 7, 0]]),
        span_length=torch.tensor([[3, 2, 0]]),
        span_mask=torch.tensor([[True, True, False]]),
        n_context=9,
    )
    assert row.tolist() == [[7, 0, 4, 4, 4, 1, 2, 5, 5]]


def test_row_of_token_without_spans_or_exact_rows():
    none = torch.zeros(1, 0, dtype=torch.long)
    all_exact = teacher.row_of_token(torch.arange(3)[None], torch.ones(1, 3).bool(), none, none, none.bool(), 3)
    assert all_exact.tolist() == [[0, 1, 2]]
    one_span = teacher.row_of_token(
        none, none.bool(), torch.tensor([[0]]), torch.tensor([[3]]), torch.tensor([[True]]), 3
    )
    assert one_span.tolist() == [[0, 0, 0]]


def test_row_mass_equals_a_loop_and_loses_nothing():
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 4, 12, generator=generator)
    attention[1, :, :, :2] = 0  # padding
    attention = attention / attention.sum(-1, keepdim=True)
    row = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3], [4, 4, 0, 1, 1, 2, 2, 3]])
    mass = teacher.row_mass(attention, row, n_rows=4)
    for b in range(2):
        for r in range(4):
            expected = attention[b, :, :, :8][..., row[b] == r].sum(-1)
            torch.testing.assert_close(mass[b, :, :, r], expected)
    torch.testing.assert_close(mass[..., 4], attention[..., 8:].sum(-1))
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 3, 4))
