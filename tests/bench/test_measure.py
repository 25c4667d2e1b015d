"""Measurements: every policy gets its figures, bytes are those of the stores, time is only ever compared in turns."""

from __future__ import annotations

import pytest
import torch

from sekv.bench import measure, timing
from sekv.bench.measure import WARM_STEPS, measure_decode, measure_end_to_end, measure_memory, measure_prefill
from sekv.bench.workload import Workload, open_adapter, open_policies
from sekv.budget import Budget
from sekv.errors import DataError, PolicyError
from sekv.generation import read_context
from sekv.policies.base import compress

SPECS = ["sekv[fill=true]", "nestedkv", "snapkv"]


@pytest.fixture(scope="module")
def work(make_tiny_backbone):
    torch.manual_seed(0)
    backbone = make_tiny_backbone("llama")
    return Workload(backbone, open_policies(SPECS, open_adapter("untrained", backbone)), Budget.parse(0.2))


def by_policy(figures, what):
    return {figure.policy: figure for figure in figures if figure.what == what}


def test_prefill_is_reading_and_building(work, monkeypatch):
    seconds = iter(range(1, 1000))
    monkeypatch.setattr(timing, "timed", lambda call, device: (call(), float(next(seconds))))
    figures = measure_prefill(work, 500, repeats=2)
    assert by_policy(figures, "prefill").keys() == {"full", *SPECS}
    assert by_policy(figures, "build").keys() == set(SPECS)
    assert by_policy(figures, "score").keys() == {"nestedkv", "snapkv"}
    # Eight calls in turns (three ways of reading, three memories, two scores), then backwards: the first one takes 1
    # and 16 seconds, the second 2 and 15.
    reading = by_policy(figures, "prefill")
    assert (reading["full"].median_seconds, reading["full"].ratio_to_full) == (8.5, 1.0)
    build = by_policy(figures, "build")["sekv[fill=true]"]
    assert (build.median_seconds, build.ratio_to_full) == (8.5, (3 / 1 + 14 / 16) / 2)
    # nestedkv needs nothing of a prefill: it shares the plain one.
    assert reading["nestedkv"].ratio_to_full == ((1 + 4) / 1 + (16 + 13) / 16) / 2
    assert reading["snapkv"].ratio_to_full == ((6 + 7) / 1 + (11 + 10) / 16) / 2
    assert all(figure.samples == 2 for figure in figures)


def test_decode_counts_what_the_stores_count(work):
    figures = by_policy(measure_decode(work, 500, repeats=2, steps=6), "decode")
    assert list(figures) == ["full", *SPECS]
    context = read_context(work.backbone, work.ids(500), list(work.policies.values()))
    for spec, figure in figures.items():
        memory = compress(context, work.policies[spec], work.budget)
        assert (figure.resident_bytes, figure.host_bytes) == (memory.resident_bytes, memory.host_bytes)
        assert figure.samples == 12
        assert figure.median_seconds > 0
        assert (figure.moved_bytes_per_token > 0) == (spec == "sekv[fill=true]")
    assert figures["full"].rows == 500
    assert figures["full"].ratio_to_full == 1.0
    assert 0 <= figures["sekv[fill=true]"].hit_rate <= 1
    assert figures["nestedkv"].hit_rate is None


def test_what_is_moved_is_counted_behind_the_first_steps(work):
    steps, ids = 5, work.ids(500 + WARM_STEPS + 5)
    figure = by_policy(measure_memory(work, 500, steps), "memory")["sekv[fill=true]"]
    cache = work.build(work.read(ids[:500]), "sekv[fill=true]")
    moved = []
    for token in ids[500:]:
        work.step(cache, token)
        moved.append(cache.moved_bytes)
    assert figure.moved_bytes_per_token == (moved[-1] - moved[WARM_STEPS - 1]) / steps


def test_memory_is_compared_with_the_full_cache(work):
    figures = by_policy(measure_memory(work, 500, 2), "memory")
    assert figures["full"].resident_bytes == 2 * 2 * 2 * 16 * 500 * 4  # K and V, layers, KV heads, dim, tokens, float32
    assert figures["full"].ratio_to_full == 1.0
    assert figures["snapkv"].ratio_to_full == figures["snapkv"].resident_bytes / figures["full"].resident_bytes < 0.25
    assert all(figure.median_seconds is None and figure.peak_bytes is None for figure in figures.values())


def test_end_to_end_adds_up_reading_building_and_steps(work, monkeypatch):
    monkeypatch.setattr(measure, "timed", lambda call, device: (call(), 1.0))
    figures = by_policy(measure_end_to_end(work, 500, repeats=2, new_tokens=4), "end_to_end")
    assert {figure.median_seconds for figure in figures.values()} == {1 + 1 + 4}
    assert {figure.new_tokens for figure in figures.values()} == {4}
    assert figures["snapkv"].ratio_to_full == 1.0


def test_steps_decode_what_generate_decodes(work):
    """The step is the one of `generate`: the same next token, at the token's true position."""
    ids = work.ids(501)
    cache = work.build(work.read(ids[:500]), "nestedkv")
    output = work.backbone.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 501), cache=cache.fork(), max_new_tokens=1, do_sample=False
    )
    assert int(work.step(cache.fork(), ids[500])) == int(output[0, -1])


def test_a_scorer_that_reads_again_is_measured_every_time(make_tiny_backbone, monkeypatch):
    """KVzip keeps what it found with the prefill; a second measurement must not find it there."""
    backbone = make_tiny_backbone("llama")
    work = Workload(backbone, open_policies(["kvzip"], None), Budget.parse(0.3))
    context = work.read(work.ids(200))
    work.build(context, "kvzip")
    work.score(context, work.scorer("kvzip"))
    assert context.observed == {}


def test_text_begins_again_where_it_ends(work, monkeypatch):
    once = work.ids(300)
    short = Workload(work.backbone, work.policies, work.budget)
    short.__dict__["_text"] = "abc"
    assert short.ids(7) == [*short.ids(3)] * 2 + short.ids(1)
    assert work.ids(200) == once[:200]


def test_without_a_tokenizer_text_is_its_bytes(make_tiny_backbone):
    backbone = make_tiny_backbone("llama", vocab_size=100)
    backbone.tokenizer = None
    work = Workload(backbone, open_policies([], None), Budget.parse(0.2))
    assert work.ids(50) == [byte % 100 for byte in work._text.encode()[:50]]


def test_a_length_beyond_the_positions_is_refused(work):
    work.check([4000], 96)
    with pytest.raises(DataError, match=r"4000 tokens and 97 decoded ones exceed the 4096 positions .* up to 3999"):
        work.check([500, 4000], 97)
    with pytest.raises(DataError, match="at least 2"):
        work.check([1], 0)


def test_a_policy_named_twice_is_refused():
    with pytest.raises(PolicyError, match="'snapkv' is named twice"):
        open_policies(["snapkv", "keydiff", "snapkv"], None)
    assert list(open_policies(["snapkv", "full"], None)) == ["full", "snapkv"]
