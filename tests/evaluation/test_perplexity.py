from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sekv.errors import DataError
from sekv.evaluation.perplexity import CONTINUATION, continuation_surprisal
from sekv.evaluation.runner import evaluate
from sekv.evaluation.tasks import parse_tasks
from sekv.policies.base import FullPolicy, compress
from sekv.policies.registry import build_policy
from sekv.prefill import prefill


def samples(tokenizer, spec: str = "ppl:1024", limit: int | None = None):
    (task,) = parse_tasks([spec])
    return task.samples(tokenizer, 4096, limit, 0)


def test_windows_have_the_length_and_distinct_continuations(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(i) for i in range(1500)))
    spec = f"ppl:1024[text={path}]"
    made = samples(tokenizer, spec)
    assert len(made) == path.stat().st_size // 1024
    for sample in made:
        assert len(sample.prompt.ids) == 1024
        assert len(sample.prompt.question_ids) == CONTINUATION + 1
        assert sample.context + sample.answers[0] in path.read_text()
    many = samples(tokenizer, spec, 1000)
    assert len(made) < len(many) < 1000
    assert len({sample.answers for sample in many}) == len(many)
    assert len(samples(tokenizer)) > 5  # the built-in text


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_full_cache_gives_the_surprisal_of_one_pass(make_tiny_backbone, family: str) -> None:
    backbone = make_tiny_backbone(family)
    ids = torch.randint(3, 259, (1, 400), generator=torch.Generator().manual_seed(0))
    cache = compress(prefill(backbone, ids[:, :200]), FullPolicy(), 1.0)
    nats, account = continuation_surprisal(backbone, cache, ids[0, 200:].tolist())
    logits = backbone.model(ids).logits[0, 200:-1]
    expected = torch.nn.functional.cross_entropy(logits.float(), ids[0, 201:])
    assert nats == pytest.approx(float(expected), abs=1e-4)
    assert account.rows == pytest.approx(200.0)


def test_a_continuation_in_pieces_is_that_token_by_token(tiny_backbone) -> None:
    ids = torch.randint(3, 259, (1, 330), generator=torch.Generator().manual_seed(1))
    read = prefill(tiny_backbone, ids[:, :200])
    cache = compress(read, build_policy("sekv[routing=mean,max_span=16]"), 0.5)
    nats, account = continuation_surprisal(tiny_backbone, cache, ids[0, 200:].tolist())
    fork, total = cache.fork(), 0.0
    for here, there in zip(ids[0, 200:-1], ids[0, 201:], strict=True):
        states = tiny_backbone.hidden_states(here[None, None], cache=fork)
        total -= float(tiny_backbone.logits(states)[0, 0].log_softmax(-1)[there])
    assert nats == pytest.approx(total / 129, abs=1e-4)
    assert account.rows == pytest.approx(fork.mean_rows)


def test_the_ratio_is_one_for_the_full_cache_and_above_it_for_less(tiny_backbone, tmp_path: Path) -> None:
    results = evaluate(tiny_backbone, ["keydiff", "full"], ["ppl:1024"], [1.0, 0.05], tmp_path / "out", limit=2)
    by_key = {(r.policy, r.budget): r for r in results}
    for key in (("full", 1.0), ("full", 0.05), ("keydiff", 1.0)):
        assert by_key[key].ppl_ratio == pytest.approx(1.0)
        assert by_key[key].score == pytest.approx(100.0)
    small = by_key["keydiff", 0.05]
    assert small.ppl_ratio == pytest.approx(small.perplexity / by_key["full", 1.0].perplexity)
    assert small.ppl_ratio != pytest.approx(1.0, abs=1e-4)
    for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["score"] == pytest.approx(100 / record["ppl_ratio"])
        assert record["output"] == "" and math.isfinite(record["nll"])


def test_mistakes_are_named(tiny_backbone, tokenizer, tmp_path: Path) -> None:
    for spec, message in (
        ("ppl:100", "at least 321 tokens"),
        ("ppl", "write it as ppl:4096"),
        ("ppl:1024[txt=x]", "no option 'txt'; its options: text"),
        ("ppl:1024[text=gone]", "text file 'gone' cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            parse_tasks([spec])
    short = tmp_path / "short.txt"
    short.write_text("word " * 100)
    with pytest.raises(DataError, match="has only 500 tokens"):
        samples(tokenizer, f"ppl:1024[text={short}]")
    with pytest.raises(DataError, match="reads at most 4096"):
        samples(tokenizer, "ppl:5000")
    with pytest.raises(DataError, match="leave out --query-aware"):
        evaluate(tiny_backbone, ["full"], ["ppl:1024"], [1.0], tmp_path / "out", query_aware=True)
