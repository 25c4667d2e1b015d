"""Predicted bytes against the tensors of real steps."""

from __future__ import annotations

import pytest
import torch

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.bench.live_bytes import LiveBytes
from sekv.budget import Budget
from sekv.expected_cut import expected_cut
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import prefill
from train.footprint import (
    READING,
    TRAINING,
    StepSize,
    adapter_bytes,
    moment_bytes,
    step_parts,
    weight_bytes,
)
from train.losses import LossConfig, total
from train.objective import MiningConfig, evaluate_batch, read_document


def documents(backbone, batch, tokens):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, backbone.geometry.vocab_size, (batch, tokens), generator=generator)


def parts_by_name(backbone, adapter, size):
    return {part.name: part.bytes for part in step_parts(backbone, adapter, size)}


def test_live_bytes_counts_a_storage_once_until_it_is_freed():
    with LiveBytes() as tracked:
        a = torch.zeros(1000)
        b = a.view(10, 100)
        assert tracked.live == 4000
        c = b + 1
        assert tracked.live == 8000
        del a, b
        assert tracked.live == 4000
        del c
    assert (tracked.live, tracked.peak) == (0, 8000)


@pytest.mark.parametrize(
    ("tokens", "window", "share", "batch", "options", "settings", "checkpoint"),
    [
        (1024, 64, 0.2, 1, {}, {}, False),
        (2048, 64, 0.1, 1, {}, {}, False),
        (1024, 64, 0.2, 2, {"num_hidden_layers": 4}, {}, False),
        (1024, 64, 0.2, 1, {"num_hidden_layers": 6}, {}, True),
        (1024, 64, 0.2, 1, {"num_key_value_heads": 1, "head_dim": 32}, {"max_rank": 16}, False),
        (1024, 64, 0.2, 1, {}, {"share_group": False, "summary_share": 1.0, "rope": "post"}, False),
        (1024, 64, 0.2, 1, {}, {"index": "summary"}, False),
        (1024, 64, 0.2, 1, {}, {"index": "summary", "summary_share": 1.0}, False),
    ],
)
def test_a_step_needs_what_is_predicted(
    make_tiny_backbone, tokens, window, share, batch, options, settings, checkpoint
):
    """Within 20% beside weights and optimiser, and rather too much than too little."""
    backbone = make_tiny_backbone("llama", **options)
    adapter = SeKVAdapter.create(backbone, SeKVConfig(**{"routing_dim": 8, "max_rank": 8, **settings}))
    budget, ids = Budget(share=share), documents(backbone, batch, tokens)
    with LiveBytes() as tracked:
        outcome = evaluate_batch(
            backbone,
            adapter,
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            window=window,
            budget=budget,
            mining=MiningConfig(),
            config=LossConfig(),
            checkpoint=checkpoint,
        )
        total(outcome.losses, LossConfig(), anneal=1.0).mean().backward()
    size = StepSize(batch, tokens, window, min(MiningConfig().queries, window), budget, 4, checkpoint)
    fixed = weight_bytes(backbone, 4) + adapter_bytes(adapter)
    predicted = moment_bytes(step_parts(backbone, adapter, size), TRAINING) - fixed
    assert 0.95 <= predicted / tracked.peak <= 1.2


def test_reading_a_document_needs_what_is_predicted(make_tiny_backbone):
    """A vocabulary so large that surprisal counts, in one chunk."""
    backbone = make_tiny_backbone("llama", vocab_size=4000, num_hidden_layers=4)
    adapter = SeKVAdapter.create(backbone, SeKVConfig(routing_dim=8))
    ids = documents(backbone, 1, 1024)
    with LiveBytes() as tracked:
        read_document(backbone, ids, torch.ones_like(ids, dtype=torch.bool), 64)
    parts = step_parts(backbone, adapter, StepSize(1, 1024, 64, 64, Budget(share=0.2), 4))
    predicted = moment_bytes(parts, READING) - weight_bytes(backbone, 4) - adapter_bytes(adapter)
    assert 0.9 <= predicted / tracked.peak <= 1.3


def test_what_is_fixed_is_exact(make_tiny_backbone):
    backbone = make_tiny_backbone("qwen2", tie_word_embeddings=True)
    adapter = SeKVAdapter.create(backbone, SeKVConfig(routing_dim=8))
    tensors = {t.untyped_storage()._cdata: t.nbytes for t in [*backbone.model.parameters(), *backbone.model.buffers()]}
    assert weight_bytes(backbone, 4) == sum(tensors.values())

    optimizer = torch.optim.AdamW(adapter.parameters())
    sum(p.sum() for p in adapter.parameters()).backward()
    optimizer.step()
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = [*adapter.parameters(), *(p.grad for p in adapter.parameters()), *moments]
    assert adapter_bytes(adapter) == sum(t.nbytes for t in held)


def test_a_documents_keys_values_and_queries_are_exact(make_tiny_backbone):
    backbone = make_tiny_backbone("llama", num_hidden_layers=3)
    adapter = SeKVAdapter.create(backbone, SeKVConfig(routing_dim=8))
    document = prefill(backbone, documents(backbone, 2, 300), window=32)
    held = sum(t.nbytes for part in (document.keys, document.values, document.queries) for t in part)
    parts = parts_by_name(backbone, adapter, StepSize(2, 300, 32, 32, Budget(share=0.5), 4))
    assert parts["the document's keys, values and window queries"] == held


def test_the_index_counts_with_the_memory(make_tiny_backbone):
    """Keys of the spans' tokens and their projections, in every layer; or one norm per head and span."""
    backbone = make_tiny_backbone("llama", num_hidden_layers=3)
    size = StepSize(2, 1000, 32, 32, Budget(share=0.2), 2)
    adapters = [SeKVAdapter.create(backbone, SeKVConfig(routing_dim=8, index=i)) for i in ("tokens", "summary")]
    name = "memory: summaries, exact and raw rows, index"
    tokens, summary = (parts_by_name(backbone, adapter, size)[name] for adapter in adapters)
    cut = expected_cut(adapters[0].config, size.budget, size.context)
    assert tokens - summary == 3 * 2 * 4 * (2 * cut.span_tokens * (16 + 8) - 4 * cut.spans)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"anchors": False},
        {"segmentation": "fixed"},
        {"max_span": 16},
        {"summary_share": 1.0},
        {"summary_share": 1.0, "anchors": False},
    ],
)
def test_a_context_is_cut_as_expected(tiny_backbone, settings):
    config = SeKVConfig(routing_dim=8, **settings)
    adapter = SeKVAdapter.create(tiny_backbone, config)
    budget, ids = Budget(share=0.2), documents(tiny_backbone, 1, 1500)
    cut = SeKVPolicy(adapter=adapter).prepare(prefill(tiny_backbone, ids), budget).segmentation
    expected = expected_cut(config, budget, 1500)
    spans, exact = int((cut.span_length > 0).sum()), int(cut.exact_mask.sum())
    assert 0.9 <= expected.spans / spans <= 1.35  # rather too many than too few
    assert expected.exact == pytest.approx(exact, rel=0.45)  # spans too short to keep are not foreseen
    assert expected.longest >= int(cut.span_length.max())
    assert expected.exact + expected.span_tokens == 1500


def test_a_context_that_fits_has_no_spans_to_speak_of():
    assert expected_cut(SeKVConfig(), Budget(rows=500), 400).exact == 400


def test_memory_grows_linearly_with_the_document(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))

    def bytes_of(tokens):
        parts = step_parts(tiny_backbone, adapter, StepSize(1, tokens, 128, 64, Budget(share=0.1), 2))
        return moment_bytes(parts, TRAINING)

    first, second, third = (bytes_of(n + 128) for n in (8192, 16384, 32768))
    assert third - second == pytest.approx(2 * (second - first), rel=0.02)


def test_layers_dealt_to_processes_are_held_in_part(make_tiny_backbone):
    backbone = make_tiny_backbone("llama", num_hidden_layers=4)
    one = sum(p.numel() for p in backbone.model.get_decoder().layers[0].parameters())
    assert weight_bytes(backbone, 4) - weight_bytes(backbone, 4, shards=2) == 4 * (4 * one - (2 * one + one))
