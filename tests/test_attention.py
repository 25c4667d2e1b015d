"""Mixed-resolution attention against a plain loop, its gates, and its extremes."""

from __future__ import annotations

import math

import pytest
import torch

from sekv.attention import RowSet, mixed_attention, packed_attention

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
