from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import wonderwords
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

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
    real = module.read_context
    monkeypatch.setattr(module, "read_context", lambda *args: reads.append(args) or real(*args))
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
