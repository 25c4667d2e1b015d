"""The warm start: it ranks spans like the teacher on what it saw, keeps the gate, and sets usable thresholds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.budget import Budget
from sekv.corpus import builtin_english
from sekv.routing import group_max, group_sum, mean_margin, routing_logits, select_spans, summary_norm
from sekv.span_index import TokenIndex
from train.errors import ConfigError
from train.examples import RouterExample, read_example
from train.losses import LossConfig
from train.objective import MiningConfig
from train.retrieval import retrieval_sequence
from train.warmstart import WarmStartConfig, fit_routers

MINING = MiningConfig(queries=24, distance=64, layer_stride=1)
LABELS = {"tokens": LossConfig(), "summary": LossConfig(labels="mass")}


def make_adapter(backbone, index: str = "tokens", **settings) -> SeKVAdapter:
    return SeKVAdapter.create(backbone, SeKVConfig(**{"routing_dim": 8, "max_span": 16, "index": index, **settings}))


def read(backbone, adapter: SeKVAdapter, ids: list[int], window: int) -> RouterExample:
    budget = Budget(share=0.4)
    return read_example(backbone, adapter, torch.tensor([ids]), window=window, budget=budget, mining=MINING)


@pytest.fixture(scope="module")
def examples(tiny_backbone):
    """By index: three documents of random tokens."""
    ids = torch.randint(3, 259, (3, 360), generator=torch.Generator().manual_seed(0)).tolist()
    return {
        index: [read(tiny_backbone, make_adapter(tiny_backbone, index), row, 40) for row in ids]
        for index in ("tokens", "summary")
    }


def order(adapter: SeKVAdapter, example: RouterExample) -> Tensor:
    return group_sum(torch.sigmoid(example.logits(adapter)[1]), example.key.shape[1])


def taken(example: RouterExample, margin: Tensor, eligible: Tensor | None = None) -> Tensor:
    return select_spans(margin, example.cost[:, None, None], example.zoom_rows[:, None, None], eligible)


def wanted(example: RouterExample) -> Tensor:
    return group_sum(example.span_mass, example.key.shape[1])


def covered(examples, order_of) -> float:
    """Share of the teacher's mass on spans that lies in the spans taken."""
    share = [float((wanted(e) * taken(e, order_of(e))).sum() / wanted(e).sum()) for e in examples]
    return sum(share) / len(share)


@pytest.mark.parametrize("index", ["tokens", "summary"])
def test_examples_hold_the_teachers_mass(examples, index):
    for example in examples[index]:
        spans = example.length.shape[1]
        assert example.query.shape == (1, 8, 24, 16) and example.key.shape[1] == 4
        assert example.key.shape[2] == (int(example.length.sum()) if index == "tokens" else spans)
        assert example.span_mass.shape == (1, 8, 24, spans) and example.rest.shape == (1, 8, 24)
        assert bool((example.span_mass.sum(-1) < 1).all()) and float(example.span_mass.sum()) > 0
        some = example.at(torch.tensor([3, 7]))
        assert torch.equal(some.span_mass, example.span_mass[:, :, [3, 7]])
        assert torch.equal(some.rest, example.rest[:, :, [3, 7]])


def test_joint_logits_are_the_layers_logits(tiny_backbone, examples):
    for index in ("tokens", "summary"):
        adapter, example = make_adapter(tiny_backbone, index), examples[index][0]
        share, both = example.logits(adapter)
        assert (share is None) == (index == "summary")
        for i, layer in enumerate(adapter.layers):
            router, key = adapter.router(layer), example.key[:, 2 * i : 2 * i + 2]
            heads = slice(4 * i, 4 * i + 4)
            query = example.query[:, heads]
            if index == "summary":
                alone = routing_logits(router, query, key, summary_norm(router, key), example.length)
            else:
                found = TokenIndex.of(router, key)
                rest = example.rest[:, heads]
                alone = found.log_shares(router, query, example.span, example.length, rest, example.scaling)
                alone = alone + router.bias[:, None, None]
            torch.testing.assert_close(both[:, heads], alone)


@torch.no_grad()
def test_with_as_many_directions_as_dimensions_the_start_is_the_inner_product(tiny_backbone, examples):
    """Then the shares are the teacher's own, on documents that it did not see too."""
    adapter = make_adapter(tiny_backbone, routing_dim=16)
    fit_routers(adapter, examples["tokens"][:2], WarmStartConfig(steps=0), LossConfig())
    router, unseen = adapter.joint_router(), examples["tokens"][2]
    query = (unseen.query @ router.projection.mT).unflatten(1, (4, 2))
    key = unseen.key.float() @ router.key_projection.mT
    expected = unseen.query.unflatten(1, (4, 2)) @ unseen.key.float()[:, :, None].mT
    torch.testing.assert_close(query @ key[:, :, None].mT, expected, atol=0.05, rtol=0.01)
    share, _ = unseen.logits(adapter)
    torch.testing.assert_close(share.exp(), unseen.span_mass, atol=0.01, rtol=0.05)


@torch.no_grad()
def test_statistics_alone_beat_random_projections(tiny_backbone, examples):
    adapter = make_adapter(tiny_backbone, routing_dim=4)
    untrained = covered(examples["tokens"], lambda e: order(adapter, e))
    fit_routers(adapter, examples["tokens"], WarmStartConfig(steps=0), LossConfig())
    assert covered(examples["tokens"], lambda e: order(adapter, e)) > untrained + 0.05


@torch.no_grad()
@pytest.mark.parametrize("index", ["tokens", "summary"])
def test_fitted_routers_beat_the_untrained_inner_product_on_what_they_saw(tiny_backbone, examples, index):
    adapter = make_adapter(tiny_backbone, index, routing_dim=16 if index == "summary" else 8)
    gate = {name: value.clone() for name, value in adapter.gate.state_dict().items()}
    history = []
    steps = WarmStartConfig(steps=400 if index == "summary" else 100)
    fit_routers(adapter, examples[index], steps, LABELS[index], lambda _, loss: history.append(loss))
    assert sum(history[-3:]) < 0.95 * sum(history[:3])
    untrained = covered(examples["summary"], lambda e: mean_margin(e.query, e.key, e.length, 0.25))
    assert covered(examples[index], lambda e: order(adapter, e)) > untrained
    assert all(torch.equal(value, gate[name]) for name, value in adapter.gate.state_dict().items())
    assert all(p.grad is None for p in adapter.parameters())


@torch.no_grad()
def test_a_second_fit_is_the_first(tiny_backbone, examples):
    """Nothing of an earlier fit is left."""
    adapter, config = make_adapter(tiny_backbone), WarmStartConfig(steps=3)
    results = []
    for _ in range(2):
        fit_routers(adapter, examples["tokens"], config, LossConfig())
        results.append({name: value.clone() for name, value in adapter.state_dict().items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@torch.no_grad()
@pytest.mark.parametrize(("labels", "learns"), [("share", False), ("mass", True), ("cover", True)])
def test_the_bias_learns_where_the_loss_looks_at_alpha(tiny_backbone, examples, labels, learns):
    start, adapter = make_adapter(tiny_backbone), make_adapter(tiny_backbone)
    fit_routers(start, examples["tokens"], WarmStartConfig(steps=0), LossConfig(labels=labels))
    fit_routers(adapter, examples["tokens"], WarmStartConfig(steps=3), LossConfig(labels=labels))
    assert torch.equal(start.bias, adapter.bias) != learns


@torch.no_grad()
@pytest.mark.parametrize("index", ["tokens", "summary"])
@pytest.mark.parametrize("kind", ["head", "global"])
def test_thresholds_let_about_the_budget_through(tiny_backbone, examples, kind, index):
    adapter = make_adapter(tiny_backbone, index, threshold=kind)
    fit_routers(adapter, examples[index], WarmStartConfig(steps=60), LABELS[index])
    used = allowed = 0
    for example in examples[index]:
        alpha = torch.sigmoid(example.logits(adapter)[1])
        margin = group_max(alpha - adapter.joint_router().threshold[:, None, None], example.key.shape[1])
        chosen = taken(example, order(adapter, example), margin >= 0)
        used += int((chosen * example.cost).sum())
        allowed += int(example.zoom_rows) * margin.shape[1] * margin.shape[2]
    assert 0.5 * allowed < used <= allowed


@torch.no_grad()
@pytest.mark.parametrize("index", ["tokens", "summary"])
def test_layers_that_look_at_spans_more_get_more_rows(tiny_backbone, examples, index):
    """The last row that fits holds as much attention in one layer as in the other, counted one by one."""
    faint = [
        replace(e, span_mass=e.span_mass * torch.tensor([1.0, 0.6]).repeat_interleave(4)[None, :, None, None])
        for e in examples[index]
    ]
    adapter = make_adapter(tiny_backbone, index)
    fit_routers(adapter, faint, WarmStartConfig(steps=0, layer_rows=1.0), LABELS[index])
    level = min(
        float(x)
        for x in torch.linspace(0, 0.2, 20001)[1:]
        if sum(float(used_above(e, float(x)).mean()) for e in faint) <= sum(float(e.zoom_rows) for e in faint)
    )
    rows = torch.stack([used_above(e, level) for e in faint]).mean(0)
    assert rows[0] > rows[1]
    torch.testing.assert_close(adapter.row_factor, rows / rows.mean(), rtol=0.02, atol=0.02)
    half = make_adapter(tiny_backbone, index)
    fit_routers(half, faint, WarmStartConfig(steps=0, layer_rows=0.5), LABELS[index])
    torch.testing.assert_close(half.row_factor, (1 + adapter.row_factor) / 2)
    fit_routers(half, faint, WarmStartConfig(steps=0, layer_rows=0.0), LABELS[index])
    assert half.row_factor.tolist() == [1.0, 1.0]


def used_above(example: RouterExample, level: float) -> Tensor:
    """Rows of the spans that hold more attention per row than `level`, by layer, of two with two KV heads each [2]."""
    per_row = wanted(example)[0] / example.length[0]
    return ((per_row > level) * example.length[0]).sum(-1).float().mean(-1).view(2, 2).mean(1)


@torch.no_grad()
def test_retrieval_documents_teach_to_find_the_right_span(tiny_backbone):
    """The span that a group of heads attends to most is taken more often, in documents that were not fitted to."""
    rng, text = random.Random(0), builtin_english()[0]
    adapter = make_adapter(tiny_backbone, routing_dim=4)
    documents = []
    for i in range(4):
        ids = tiny_backbone.tokenizer(text[900 * i : 900 * i + 500]).input_ids
        documents.append(retrieval_sequence(tiny_backbone.tokenizer, ids, rng, 200, 4096))
    fitted = [read(tiny_backbone, adapter, *document) for document in documents]

    def recall(example: RouterExample) -> float:
        best = wanted(example).argmax(dim=-1, keepdim=True)
        return float(taken(example, order(adapter, example)).gather(-1, best).float().mean())

    before = recall(fitted[3])
    fit_routers(adapter, fitted[:3], WarmStartConfig(steps=60), LossConfig())
    assert recall(fitted[3]) > before + 0.1


def test_the_index_holds_the_tokens_keys(tiny_backbone, examples):
    """In the order of the spans' tokens."""
    example = examples["tokens"][0]
    counts = torch.bincount(example.span[0], minlength=example.length.shape[1])
    assert torch.equal(counts, example.length[0])
    assert example.key.dtype == torch.float16
    assert bool(example.key.isfinite().all())


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_beyond_one_is_refused(share):
    with pytest.raises(ConfigError, match=r"layer_rows is a share in \[0, 1\], got"):
        WarmStartConfig(layer_rows=share)


@pytest.mark.parametrize("name", ["documents", "retrieval", "steps"])
def test_bad_settings_are_refused(name):
    with pytest.raises(ConfigError, match=r"warm start needs documents, retrieval and steps >= 0.* got .*-1"):
        WarmStartConfig(**{name: -1})
    with pytest.raises(ConfigError, match="queries >= 1"):
        WarmStartConfig(queries=0)
    assert WarmStartConfig(documents=0, steps=0).steps == 0
