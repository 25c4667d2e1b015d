"""Shared summary rows: what is left of them after a zoom, against means made from scratch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sekv.segmentation import SegmentationConfig, segment
from sekv.stores.base import ExactRows
from sekv.stores.summaries import Summaries
from tests.policies.specs import left_padding, randn

BIAS = torch.tensor([0.5, -1.0, 0.0, 2.0])  # of 4 query heads on 2 KV heads


def make(
    share: float, dtype: torch.dtype = torch.float32, bias: float | Tensor = BIAS, offload: bool = False
) -> Summaries:
    mask = left_padding([400, 260])
    surprisal = randn(2, 400).exp() * mask
    cut = segment(surprisal, mask, torch.tensor([160, 120]), SegmentationConfig(max_span=16, summary_share=share))
    n_spans = cut.span_length.shape[1]
    key, value = (randn(2, 2, n_spans, 8, seed=s).to(dtype) for s in (1, 2))
    return Summaries(key, value, cut, bias, offload=offload)


def choices(summaries: Summaries, count: int, seed: int = 0) -> np.ndarray:
    """Random choices [B * K, count, S] that leave out a whole row now and then."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((4, count, summaries.key.shape[2])) < 0.4
    chosen |= (summaries._host_row == 1)[:, None]
    return chosen & (summaries._host_length > 0)[:, None]


def without(summaries, chosen, left):
    """The rows written between three rows before and two behind them, which stay as they are."""
    n, dtype = summaries.n_rows, summaries.key.dtype
    rows = ExactRows(
        *(torch.full((2, 2, 5 + n, x.shape[3]), 7.0, dtype=dtype) for x in (summaries.key, summaries.value))
    )
    summaries.write_without(chosen[:, 0], left[:, 0], rows, 3)
    for x in (rows.key, rows.value):
        assert bool((x[:, :, :3] == 7.0).all()) and bool((x[:, :, 3 + n :] == 7.0).all())
    return rows.key[:, :, 3 : 3 + n], rows.value[:, :, 3 : 3 + n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zoom", [False, True])
def test_rows_are_means_of_what_is_left(dtype, zoom):
    summaries = make(0.1, dtype)
    assert summaries.merged and summaries.n_rows == 16
    chosen = choices(summaries, 1) & zoom
    left = summaries.tokens_left(chosen)
    found, bias = without(summaries, chosen, left), summaries.logit_bias(left)
    if not zoom:
        for one, other in zip(found, summaries.rows(), strict=True):
            torch.testing.assert_close(one, other)
    row, length = summaries._host_row, summaries._host_length
    for group in range(4):
        b, k = divmod(group, 2)
        for r in range(summaries.n_rows):
            members = [
                s for s in range(row.shape[1]) if length[group, s] and row[group, s] == r and not chosen[group, 0, s]
            ]
            tokens = sum(int(length[group, s]) for s in members)
            assert left[group, 0, r] == tokens
            for g in range(2):
                expected = math.log(tokens) + float(BIAS[2 * k + g]) if tokens else -math.inf
                assert float(bias[group, g, r]) == pytest.approx(expected, rel=1e-5)
            for x, rows in zip((summaries.key, summaries.value), found, strict=True):
                assert rows.dtype == dtype and bool(rows[b, k, r].isfinite().all())
                if tokens:
                    mean = sum(int(length[group, s]) * x[b, k, s].float() for s in members) / tokens
                    torch.testing.assert_close(rows[b, k, r], mean.to(dtype), atol=1e-5, rtol=1e-2)
    if zoom:
        assert bool((left[:, 0, 1] == 0).all())


def test_own_rows_are_the_summaries_themselves():
    summaries = make(1.0)
    assert not summaries.merged and summaries.n_rows == summaries.key.shape[2]
    real = torch.from_numpy(summaries._host_length > 0).view(2, 2, -1)
    torch.testing.assert_close(summaries.rows()[0][real], summaries.key[real])
    chosen = choices(summaries, 2)  # a choice per query head
    bias = summaries.logit_bias(summaries.tokens_left(chosen))
    assert bias.shape == chosen.shape
    visible = (summaries._host_length > 0)[:, None] & ~chosen
    assert (np.isfinite(bias) == visible).all()
    expected = (
        np.log(np.maximum(summaries._host_length, 1))[:, None] + BIAS.numpy().reshape(2, 2)[[0, 1, 0, 1]][..., None]
    )
    np.testing.assert_allclose(bias[visible], expected[visible], rtol=1e-5)


def test_one_bias_serves_all_heads():
    one, many = make(0.1, bias=-1.0), make(0.1, bias=torch.full((4,), -1.0))
    chosen = choices(one, 1)
    single, each = one.logit_bias(one.tokens_left(chosen)), many.logit_bias(many.tokens_left(chosen))
    assert single.shape[1] == 1 and each.shape[1] == 2
    np.testing.assert_array_equal(np.broadcast_to(single, each.shape), each)


@pytest.mark.parametrize("offload", [False, True])
def test_bytes_are_those_of_the_live_tensors(offload):
    summaries = make(0.1, offload=offload)
    held = {id(x) for x in vars(summaries).values() if isinstance(x, Tensor)}
    held |= {id(x) for x in summaries._sums}
    counted = {id(x) for x in summaries.tensors()}
    small = {id(summaries._bias), id(summaries._length), id(summaries._row)}  # one number per head; the plan's tables
    on_host = {id(x) for x in summaries.host_tensors()} & held
    assert held - small == counted | on_host and not counted & on_host
    assert on_host == ({id(summaries.key), id(summaries.value)} if offload else set())


def test_offloaded_summaries_answer_alike_and_cross_for_what_is_chosen():
    here, there = make(0.1), make(0.1, offload=True)
    chosen = choices(here, 1)
    left = here.tokens_left(chosen)
    answers = [without(here, chosen, left), without(there, chosen, left), here._rows_without(chosen[:, 0], left[:, 0])]
    for one, other, in_torch in zip(*answers, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, in_torch)
    assert here.crossing_bytes(chosen[:, :, None]) == 0
    assert there.crossing_bytes(chosen[:, :, None]) == chosen.sum() * 2 * there.key.shape[3] * 4
    several = np.repeat(chosen[:, :, None], 3, axis=2)
    assert there.crossing_bytes(several) == there.key.nbytes + there.value.nbytes
    assert not make(1.0, offload=True).offloaded  # rows of their own are looked at by every step
