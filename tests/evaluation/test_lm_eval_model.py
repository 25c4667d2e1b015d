from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import wonderwords
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from sekv.errors import DataError
from sekv.evaluation.lm_eval_model import SeKVLM

CONTEXT = "Ann keeps bees. Bob keeps a goat. " * 12 + "So it is."


def requests(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def plain_log_p(backbone, context: str, continuation: str) -> tuple[float, bool]:
    ids = torch.tensor([backbone.tokenizer(context + continuation).input_ids])
    n = len(continuation)
    log_p = backbone.model(ids).logits[0, -n - 1 : -1].float().log_softmax(-1)
    target = ids[0, -n:]
    return float(log_p.gather(1, target[:, None]).sum()), bool((log_p.argmax(-1) == target).all())


def test_it_is_registered() -> None:
    assert get_model("sekv") is SeKVLM


def test_the_whole_budget_scores_as_the_plain_model_and_a_hundredth_does_not(tiny_backbone) -> None:
    pairs = [(CONTEXT, " bees"), (CONTEXT, " goats"), ("x", "y"), (CONTEXT + "!", " no")]
    whole = SeKVLM(tiny_backbone, "keydiff", 1.0).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (log_p, greedy), pair in zip(whole, pairs, strict=True):
        expected = plain_log_p(tiny_backbone, *pair)
        assert (log_p, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    small = SeKVLM(tiny_backbone, "keydiff[sinks=1,tail=2]", 0.01)
    changed = small.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert abs(changed[0][0] - whole[0][0]) > 1e-2


def test_options_of_one_context_share_its_memory(tiny_backbone, monkeypatch) -> None:
    import sekv.evaluation.lm_eval_model as module

    reads = []
    real = module.read_contexts
    monkeypatch.setattr(module, "read_contexts", lambda *args: reads.append(args) or real(*args))
    model = SeKVLM(tiny_backbone, "keydiff", 0.5)
    pairs = [(CONTEXT, " a"), (CONTEXT, " b"), (CONTEXT, " c")]
    model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert len(reads) == 1


def test_generation_is_that_of_generate_and_stops(tiny_backbone) -> None:
    model = SeKVLM(tiny_backbone, "keydiff", 1.0)
    arguments = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    (text,) = model.generate_until(requests("generate_until", (CONTEXT, arguments)))
    ids = torch.tensor([tiny_backbone.tokenizer(CONTEXT).input_ids])
    output = tiny_backbone.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    assert text == tiny_backbone.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    stop = text[3]
    (short,) = model.generate_until(requests("generate_until", (CONTEXT, arguments | {"until": [stop]})))
    assert short == text.split(stop)[0]


PAIRS = [
    (CONTEXT, " bees"),
    (CONTEXT[:140], " goats, and"),
    (CONTEXT, " no"),
    (CONTEXT[:300], "?"),
    ("x", "y"),
    (CONTEXT[:77], " a longer continuation than the others have"),
]


@pytest.mark.parametrize("policy", ["full", "keydiff", "snapkv", "nestedkv", "sekv[routing=mean,tail=8]"])
@pytest.mark.parametrize("batch_size", [2, "3"])
def test_a_batch_of_unequal_contexts_scores_as_one_at_a_time(tiny_backbone, policy, batch_size) -> None:
    one, several = (SeKVLM(tiny_backbone, policy, 0.75, batch_size=size) for size in (1, batch_size))
    expected, found = (
        model.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True) for model in (one, several)
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [log_p for log_p, _ in found] == pytest.approx([log_p for log_p, _ in expected], abs=1e-3)
    arguments = {"until": ["e", "\x00"], "max_gen_toks": 9}
    asked = [(context, arguments) for context, _ in PAIRS if len(context) > 1] + [(CONTEXT, {"max_gen_toks": 3})]
    texts = [model.generate_until(requests("generate_until", *asked)) for model in (one, several)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


def test_contexts_are_read_in_batches_and_a_batch_of_no_number_is_refused(tiny_backbone, monkeypatch) -> None:
    import sekv.evaluation.lm_eval_model as module

    reads = []
    real = module.read_contexts
    monkeypatch.setattr(module, "read_contexts", lambda *args: reads.append(len(args[1])) or real(*args))
    model = SeKVLM(tiny_backbone, "keydiff", 0.5, batch_size=2)
    model.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    assert reads == [2, 2]  # four contexts of two tokens or more
    with pytest.raises(DataError, match="batch_size=auto is no number of contexts"):
        SeKVLM(tiny_backbone, batch_size="auto")


@pytest.mark.parametrize("name", ["keydiff", "streaming_llm", "snapkv"])
def test_a_hundredth_of_the_rows_changes_scores_and_texts(tiny_backbone, name) -> None:
    """The continuation attends the compressed memory, in batches too."""
    policy = f"{name}[sinks=1,tail=2]"
    asked = [(context, {"until": [], "max_gen_toks": 8}) for context, _ in PAIRS[:4]]
    pairs = requests("loglikelihood", *PAIRS[:4])
    whole, small = (SeKVLM(tiny_backbone, policy, budget, batch_size=2) for budget in (1.0, 0.01))
    scores = [[log_p for log_p, _ in model.loglikelihood(pairs, disable_tqdm=True)] for model in (whole, small)]
    assert all(abs(one - other) > 1e-2 for one, other in zip(*scores, strict=True))
    texts = [model.generate_until(requests("generate_until", *asked)) for model in (whole, small)]
    assert texts[0] != texts[1]


def test_what_has_no_context_is_refused(tiny_backbone) -> None:
    with pytest.raises(NotImplementedError, match="ppl:LENGTH"):
        SeKVLM(tiny_backbone).loglikelihood_rolling([])


@pytest.mark.usefixtures("no_network")
def test_lm_evals_own_ruler_needle_runs_offline(make_tiny_backbone, tmp_path, monkeypatch) -> None:
    nltk = pytest.importorskip("nltk")
    # lm-eval sorts every pair of words when it is imported: six million strings, of which a few will do.
    few = SimpleNamespace(_categories={kind: ["amber", "brisk", "cedar"] for kind in ("nouns", "adjectives", "verbs")})
    monkeypatch.setattr(wonderwords, "RandomWord", lambda: few)
    # Its noise haystack needs no sentences, so the model that finds them need not be there.
    monkeypatch.setattr(nltk.data, "find", lambda name: name)
    backbone = make_tiny_backbone("llama")
    backbone.tokenizer.save_pretrained(tmp_path)
    results = simple_evaluate(
        model=SeKVLM(backbone, "streaming_llm", 0.1),
        tasks=["niah_single_1"],
        limit=1,
        metadata={"tokenizer": str(tmp_path), "max_seq_lengths": [2048]},
        bootstrap_iters=0,
    )
    assert results is not None
    assert 0.0 <= results["results"]["niah_single_1"]["2048,none"] <= 1.0
