"""The warm start: it ranks spans like the teacher on what it saw, keeps the gate, and sets usable thresholds."""

from __future__ import annotations

import pytest
import torch

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.budget import Budget
from sekv.routing import group_max, mean_margin, routing_logits, select_spans, summary_norm
from train.errors import ConfigError
from train.losses import LossConfig
from train.objective import MiningConfig
from train.warmstart import WarmStartConfig, fit_routers, read_examples

MINING = MiningConfig(queries=24, distance=64, layer_stride=1)


@pytest.fixture(scope="module")
def documents(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16))
    ids = torch.randint(3, 259, (3, 360), generator=torch.Generator().manual_seed(0))
    return [
        read_examples(tiny_backbone, adapter, row[None], window=40, budget=Budget(share=0.4), mining=MINING)
        for row in ids
    ]


def covered(adapter, documents, how):
    share = []
    for examples in documents:
        for layer, example in zip(adapter.layers, examples, strict=True):
            wanted = example.span_mass.reshape(1, 2, 2, *example.span_mass.shape[2:]).sum(2)
            if how == "mean":
                margin = mean_margin(example.query, example.summary_key, example.length, 0.25)
            else:
                router = adapter.router(layer)
                norm = summary_norm(router, example.summary_key)
                logits = routing_logits(router, example.query, example.summary_key, norm, example.length)
                margin = group_max(torch.sigmoid(logits), 2)
            chosen = select_spans(margin, example.length[:, None, None], example.zoom_rows[:, None, None])
            share.append(float((wanted * chosen).sum() / wanted.sum()))
    return sum(share) / len(share)


def test_examples_hold_the_teachers_mass(documents):
    for examples in documents:
        for example in examples:
            assert example.query.shape == (1, 4, 24, 16)
            assert example.span_mass.shape == (1, 4, 24, example.length.shape[1])
            assert bool((example.span_mass.sum(-1) < 1).all()) and float(example.span_mass.sum()) > 0


@torch.no_grad()
def test_fitted_routers_beat_the_untrained_inner_product_on_what_they_saw(tiny_backbone, documents):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16))
    gate = {name: value.clone() for name, value in adapter.gate.state_dict().items()}
    losses = []
    fit_routers(adapter, documents, WarmStartConfig(steps=150), LossConfig(), lambda _, loss: losses.append(loss))
    assert losses[-1] < 0.95 * losses[0]
    assert covered(adapter, documents, "learned") > covered(adapter, documents, "mean")
    assert all(torch.equal(value, gate[name]) for name, value in adapter.gate.state_dict().items())
    assert all(p.grad is None for p in adapter.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["head", "global"])
def test_thresholds_let_about_the_budget_through(tiny_backbone, documents, kind):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16, threshold=kind))
    fit_routers(adapter, documents, WarmStartConfig(steps=60), LossConfig())
    used = allowed = 0
    for examples in documents:
        for layer, example in zip(adapter.layers, examples, strict=True):
            router = adapter.router(layer)
            norm = summary_norm(router, example.summary_key)
            logits = routing_logits(router, example.query, example.summary_key, norm, example.length)
            margin = group_max(torch.sigmoid(logits) - router.threshold[:, None, None], 2)
            chosen = select_spans(
                margin, example.length[:, None, None], example.zoom_rows[:, None, None], eligible=margin >= 0
            )
            used += int((chosen * (example.length - 1)[:, None, None]).sum())
            allowed += int(example.zoom_rows) * margin.shape[1] * margin.shape[2]
    assert 0.5 * allowed < used <= allowed


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="got -1, 400 and 0.003"):
        WarmStartConfig(documents=-1)
