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
from train.warmstart import WarmStartConfig, example_logits, fit_routers, read_example

MINING = MiningConfig(queries=24, distance=64, layer_stride=1)


@pytest.fixture(scope="module")
def examples(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16))
    ids = torch.randint(3, 259, (3, 360), generator=torch.Generator().manual_seed(0))
    return [
        read_example(tiny_backbone, adapter, row[None], window=40, budget=Budget(share=0.4), mining=MINING)
        for row in ids
    ]


def margins(adapter, example):
    alpha = torch.sigmoid(example_logits(adapter, example))
    return group_max(alpha - adapter.joint_router().threshold[:, None, None], example.summary_key.shape[1])


def covered(examples, margin_of):
    share = []
    for example in examples:
        wanted = example.span_mass.unflatten(1, (4, 2)).sum(2)
        chosen = select_spans(margin_of(example), example.length[:, None, None], example.zoom_rows[:, None, None])
        share.append(float((wanted * chosen).sum() / wanted.sum()))
    return sum(share) / len(share)


def test_examples_hold_the_teachers_mass(examples):
    for example in examples:
        assert example.query.shape == (1, 8, 24, 16) and example.summary_key.shape[1] == 4
        assert example.span_mass.shape == (1, 8, 24, example.length.shape[1])
        assert bool((example.span_mass.sum(-1) < 1).all()) and float(example.span_mass.sum()) > 0


def test_joint_logits_are_the_layers_logits(tiny_backbone, examples):
    adapter, example = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16)), examples[0]
    both = example_logits(adapter, example)
    for i, layer in enumerate(adapter.layers):
        router, key = adapter.router(layer), example.summary_key[:, 2 * i : 2 * i + 2]
        query = example.query[:, 4 * i : 4 * i + 4]
        alone = routing_logits(router, query, key, summary_norm(router, key), example.length)
        torch.testing.assert_close(both[:, 4 * i : 4 * i + 4], alone)


@torch.no_grad()
def test_fitted_routers_beat_the_untrained_inner_product_on_what_they_saw(tiny_backbone, examples):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=16, max_span=16))
    gate = {name: value.clone() for name, value in adapter.gate.state_dict().items()}
    history = []
    fit_routers(adapter, examples, WarmStartConfig(steps=400), LossConfig(), lambda _, loss: history.append(loss))
    assert history[-1] < 0.95 * history[0]
    untrained = covered(examples, lambda e: mean_margin(e.query, e.summary_key, e.length, 0.25))
    assert covered(examples, lambda e: margins(adapter, e)) > untrained
    assert all(torch.equal(value, gate[name]) for name, value in adapter.gate.state_dict().items())
    assert all(p.grad is None for p in adapter.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["head", "global"])
def test_thresholds_let_about_the_budget_through(tiny_backbone, examples, kind):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, max_span=16, threshold=kind))
    fit_routers(adapter, examples, WarmStartConfig(steps=60), LossConfig())
    used = allowed = 0
    for example in examples:
        margin = margins(adapter, example)
        rows, length = example.zoom_rows[:, None, None], example.length[:, None, None]
        chosen = select_spans(margin, length, rows, eligible=margin >= 0)
        used += int((chosen * (length - 1)).sum())
        allowed += int(example.zoom_rows) * margin.shape[1] * margin.shape[2]
    assert 0.5 * allowed < used <= allowed


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match=r"got -1, 400 and 0\.003"):
        WarmStartConfig(documents=-1)
