"""H2O, observed attention and TOVA against the full attention of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sekv.backbone import Backbone
from sekv.errors import PolicyError
from sekv.policies.h2o import H2OPolicy
from sekv.policies.observed import ObservedAttentionPolicy
from sekv.policies.tova import TOVAPolicy
from sekv.prefill import Prefill, prefill
from tests.policies.specs import plain_prefill, randn


@pytest.fixture(scope="module")
def read(make_tiny_model) -> tuple[Prefill, list[Tensor]]:
    """A context of 40 tokens, and its attention [H, n, n] per layer."""
    model = make_tiny_model("llama")
    tokens = torch.randint(3, 259, (1, 40), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = [a[0] for a in model(tokens, output_attentions=True).attentions]
    return prefill(Backbone.from_model(model), tokens, window=1, observers=H2OPolicy().observers), attentions


def test_scores_equal_the_loop(read):
    state, attentions = read
    for layer, attention in enumerate(attentions):
        for k in range(2):
            group = attention[2 * k : 2 * k + 2].mean(dim=0)  # [n, n]
            for i in range(40):
                received = [float(group[j, i]) for j in range(i, 40)]
                h2o, observed = (p.score(state, layer)[0, k, i] for p in (H2OPolicy(), ObservedAttentionPolicy()))
                assert float(h2o) == pytest.approx(sum(received), abs=1e-5)
                assert float(observed) == pytest.approx(sum(received) / len(received), abs=1e-5)
        last = attention[:, -1].mean(dim=0)
        torch.testing.assert_close(TOVAPolicy().score(state, layer)[0], last.expand(2, -1), atol=1e-6, rtol=1e-5)


def test_h2o_spends_half_on_recent_tokens_and_half_on_heavy_hitters(read):
    state, _ = read
    keep = H2OPolicy(sinks=0, tail=0).keep(state, 0, torch.tensor([12]))[0]
    score = H2OPolicy().score(state, 0)[0]
    for k in range(2):
        heavy = score[k, :34].topk(6).indices
        assert sorted(keep[k].nonzero().flatten().tolist()) == sorted([*heavy.tolist(), *range(34, 40)])
    keep = H2OPolicy(sinks=0, tail=4, recent_share=0.0).keep(state, 0, torch.tensor([12]))[0]
    assert keep[:, -4:].all()


def test_tova_keeps_the_last_token_and_the_same_in_all_heads(read):
    state, _ = read
    keep = TOVAPolicy(sinks=0, tail=0).keep(state, 1, torch.tensor([5]))[0]
    assert keep[:, -1].all()
    assert torch.equal(keep[0], keep[1])


@pytest.mark.parametrize("policy", [H2OPolicy(), ObservedAttentionPolicy()])
def test_a_prefill_without_the_statistic_is_refused(policy):
    with pytest.raises(PolicyError, match=rf"{policy.name} needs what the prefill observes; .*observers"):
        policy.score(plain_prefill(randn(1, 2, 10, 4)), 0)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_recent_share_out_of_range(share):
    with pytest.raises(PolicyError, match="recent_share must be from 0 to 1"):
        H2OPolicy(recent_share=share)
