"""Mixed-resolution attention against a plain loop, its gates, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from sekv.attention import Merge, RowSet, log_sum, mixed_attention, packed_attention

B, K, G, Q, D = 2, 2, 3, 4, 8


def sets(seed: int = 0) -> tuple[torch.Tensor, list[RowSet]]:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    visible = torch.rand(B, K, G, Q, 5, generator=g) < 0.6
    visible[..., 0] = True
    return randn(B, K * G, Q, D), [
        RowSet(randn(B, K, 5, D), randn(B, K, 5, D), visible=visible),
        RowSet(randn(B, K, 3, D), randn(B, K, 3, D), bias=randn(B, 1, 1, 1, 3)),
        RowSet(randn(B, K, 6, D), randn(B, K, 6, D), gate=(torch.rand(B, K, 1, Q, 6, generator=g) < 0.5).float()),
    ]


def reference(query: torch.Tensor, row_sets: list[RowSet], scaling: float) -> torch.Tensor:
    output = torch.zeros_like(query)
    for b in range(B):
        for h in range(K * G):
            for q in range(Q):
                weights, values = [], []
                for rows in row_sets:
                    for r in range(rows.key.shape[2]):
                        k, g = h // G, h % G
                        logit = float(query[b, h, q] @ rows.key[b, k, r]) * scaling
                        full = (B, K, G, Q, rows.key.shape[2])
                        if rows.bias is not None:
                            logit += float(rows.bias.expand(full)[b, k, g, q, r])
                        if rows.visible is not None and not rows.visible.expand(full)[b, k, g, q, r]:
                            continue
                        gate = 1.0 if rows.gate is None else float(rows.gate.expand(full)[b, k, g, q, r])
                        weights.append(math.exp(logit) * gate)
                        values.append(rows.value[b, k, r])
                mass = torch.tensor(weights) / sum(weights)
                output[b, h, q] = mass @ torch.stack(values)
    return output


def test_equals_the_loop():
    query, row_sets = sets()
    output, masses = mixed_attention(query, row_sets, 0.3)
    torch.testing.assert_close(output, reference(query, row_sets, 0.3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(m.sum(-1) for m in masses), torch.ones(B, K, G, Q))


def test_gate_of_a_hard_decision_equals_hiding():
    query, row_sets = sets()
    gated = row_sets[2]
    hidden = RowSet(gated.key, gated.value, visible=gated.gate.bool())
    torch.testing.assert_close(
        mixed_attention(query, row_sets, 0.3)[0], mixed_attention(query, [*row_sets[:2], hidden], 0.3)[0]
    )


def test_gradient_reaches_a_closed_gate():
    query, row_sets = sets()
    gate = torch.zeros(B, K, 1, Q, 6, requires_grad=True)
    output, _ = mixed_attention(query, [row_sets[0], RowSet(row_sets[2].key, row_sets[2].value, gate=gate)], 0.3)
    output.square().sum().backward()
    assert gate.grad is not None and float(gate.grad.abs().min()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 60.0])
def test_extreme_queries_stay_finite(dtype, scale):
    query, row_sets = sets()
    cast = [RowSet(r.key.to(dtype), r.value.to(dtype), r.bias, r.visible, r.gate) for r in row_sets]
    output, _ = mixed_attention((query * scale).to(dtype), cast, 0.3)
    assert output.dtype == dtype and bool(output.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_logits(dtype):
    """Logits beyond the range of float16, and differences that bfloat16 would round away."""
    query, row_sets = sets()
    cast = [RowSet((r.key * 200).to(dtype), r.value.to(dtype), r.bias, r.visible, r.gate) for r in row_sets]
    wide = [RowSet(r.key.float(), r.value.float(), r.bias, r.visible, r.gate) for r in cast]
    half = (query * 200).to(dtype)
    output, _ = mixed_attention(half, cast, 0.3)
    torch.testing.assert_close(output, mixed_attention(half.float(), wide, 0.3)[0].to(dtype))


def test_a_query_that_sees_nothing_gets_zeros():
    query, row_sets = sets()
    nothing = torch.zeros(B, 1, 1, Q, 5, dtype=torch.bool)
    output, _ = mixed_attention(query, [RowSet(row_sets[0].key, row_sets[0].value, visible=nothing)], 0.3)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3])
def test_packed_attention_is_mixed_attention(dtype, heads):
    g = torch.Generator().manual_seed(0)
    query, key, value = (
        (torch.randn(2, n, rows, 16, generator=g) * 3).to(dtype) for n, rows in ((6, 1), (2, 50), (2, 50))
    )
    bias = torch.randn(2, 2, heads, 50, generator=g)
    bias[..., ::3] = -torch.inf
    expected, _ = mixed_attention(query, [RowSet(key, value, bias=bias[:, :, :, None])], 0.3)
    found = packed_attention(query, key, value, bias, 0.3)
    assert found.dtype == dtype
    # Half precision: both round the same float32 result, a tie may fall either way.
    close = {} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 1e-2}
    torch.testing.assert_close(found, expected, **close)


def make_merge(seed: int = 0) -> tuple[Merge, torch.Tensor]:
    """Six rows of 1 to 6 tokens in three merged ones, of which queries leave some out, and logits of the six."""
    g = torch.Generator().manual_seed(seed)
    row = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
    weight = torch.arange(1.0, 7.0) * (torch.rand(B, K, 1, Q, 6, generator=g) < 0.6)
    weight[0, 0, 0, 0, :2] = 0.0  # a merged row of which nothing is left
    return Merge(row, 3, weight), torch.randn(B, K, G, Q, 6, generator=g)


def test_merged_logits_and_masses_equal_loops():
    merge, logits = make_merge()
    found = merge.logits(logits)
    mass = torch.rand(B, K, G, Q, 3)
    spread = merge.spread(mass, logits)
    for b in range(B):
        for k in range(K):
            for q in range(Q):
                for m in range(3):
                    members = [r for r in range(6) if merge.row[b, r] == m]
                    weights = [float(merge.weight[b, k, 0, q, r]) for r in members]
                    tokens = sum(weights)
                    for g in range(G):
                        if tokens == 0:
                            assert float(found[b, k, g, q, m]) == -math.inf
                            assert not spread[b, k, g, q, members].any()
                            continue
                        mean = sum(w * float(logits[b, k, g, q, r]) for w, r in zip(weights, members, strict=True))
                        assert float(found[b, k, g, q, m]) == pytest.approx(mean / tokens + math.log(tokens), abs=1e-5)
                        for w, r in zip(weights, members, strict=True):
                            part = float(mass[b, k, g, q, m]) * w / tokens
                            assert float(spread[b, k, g, q, r]) == pytest.approx(part, abs=1e-6)


def test_a_merged_row_is_the_mean_of_its_rows():
    query, row_sets = sets()
    merge, _ = make_merge()
    key, value, bias = row_sets[2].key, row_sets[2].value, torch.randn(1, K, G, 1, 1)
    found, masses = mixed_attention(query, [row_sets[0], RowSet(key, value, bias=bias, merge=merge)], 0.3)
    torch.testing.assert_close(sum(m.sum(-1) for m in masses), torch.ones(B, K, G, Q))
    for b in range(B):
        for q in range(Q):
            means = torch.zeros(2, 1, K, 3, D)
            tokens = torch.zeros(K, 3)
            for k in range(K):
                for r in range(6):
                    w, m = merge.weight[b, k, 0, q, r], merge.row[b, r]
                    tokens[k, m] += w
                    means[0, 0, k, m] += w * key[b, k, r]
                    means[1, 0, k, m] += w * value[b, k, r]
            means = means / tokens.clamp_min(1)[..., None]
            explicit = RowSet(means[0], means[1], bias=tokens.log()[None, :, None, None] + bias)
            exact = row_sets[0]
            seen = exact.visible[b : b + 1, :, :, q : q + 1]
            first = RowSet(exact.key[b : b + 1], exact.value[b : b + 1], visible=seen)
            expected, _ = mixed_attention(query[b : b + 1, :, q : q + 1], [first, explicit], 0.3)
            torch.testing.assert_close(found[b : b + 1, :, q : q + 1], expected, atol=1e-5, rtol=1e-4)


def test_gradients_are_finite_where_nothing_is_left_of_a_merged_row():
    query, row_sets = sets()
    merge, _ = make_merge()
    inputs = [x.clone().requires_grad_() for x in (query, merge.weight, row_sets[2].key, torch.zeros(1, K, G, 1, 1))]
    merged = RowSet(inputs[2], row_sets[2].value, bias=inputs[3], merge=Merge(merge.row, 3, inputs[1]))
    output, masses = mixed_attention(inputs[0], [row_sets[0], merged], 0.3)
    (output.square().sum() + (masses[1] * torch.randn(6)).sum()).backward()
    for x in inputs:
        assert x.grad is not None and bool(x.grad.isfinite().all()) and bool(x.grad.any())


def test_log_sum_is_the_denominator():
    query, row_sets = sets()
    found = log_sum(query, row_sets[:2], 0.3)
    keys = torch.cat([rows.key for rows in row_sets[:2]], dim=2).repeat_interleave(G, dim=1)
    logits = query @ keys.mT * 0.3
    logits[..., :5] = logits[..., :5].masked_fill(~row_sets[0].visible.flatten(1, 2), -math.inf)
    logits[..., 5:] += row_sets[1].bias.view(B, 1, 1, 3)
    torch.testing.assert_close(found, logits.exp().sum(-1).log())
