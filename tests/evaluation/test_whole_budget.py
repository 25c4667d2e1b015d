"""At a budget of the whole context every policy answers every kind of task as plain `generate()` on the plain prompt.

The prompt of that plain call is made here by hand: the chat template once over the sample's text, or none of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.evaluation.asking import Asking, Contexts, Question
from sekv.evaluation.runner import Evaluation
from sekv.generation import answer
from sekv.policies.base import Policy
from sekv.policies.registry import available_policies, build_policy

WHOLE = Budget(share=1.0)
NEW_TOKENS = 4
TEXT = "Ann keeps bees. Bob keeps a goat. "
WRAPPING = {"hubkv": "hubkv:snapkv"}
BRIDGE = "kvpress"  # needs a package of its own; tests/policies/test_kvpress_bridge.py
POLICIES = [WRAPPING.get(name, name) for name in available_policies() if name != BRIDGE]
WITHOUT_TEMPLATE = ("gsm8k", "mmlu_pro", "longbench:trec")
ROWS: dict[str, list[dict[str, Any]]] = {
    "hotpotqa": [{"context": TEXT * 6, "input": "Who?", "answers": ["Ann"], "all_classes": None, "length": 50}],
    "trec": [{"context": TEXT * 6, "input": "Who?", "answers": ["a"], "all_classes": ["a", "b"], "length": 50}],
    "passkey": [{"id": 0, "context": TEXT * 6, "input": "Which?", "answer": "7", "options": []}],
    "shortdep_qa": [{"context": TEXT * 6, "question": "Where?", "answer": "here"}],
    "train": [{"question": f"How many are {i}?", "answer": f"As many. #### {i}"} for i in range(6)],
    "test": [
        {
            "question": "How many?",
            "answer": "A",
            "options": ["1", "2"],
            "category": "maths",
            "cot_content": "A: one",
        }
    ],
    "validation": [
        {"question": "How few?", "answer": "B", "options": ["1", "2"], "category": "maths", "cot_content": "A: two"}
    ],
}
LINE = {"task": "f", "context": TEXT * 6, "question": "Who?", "answer_prefix": "It is", "answers": ["Ann"]}
TASKS = {
    "niah": "niah:400",
    "needle": "ruler:niah_single_1:2048",
    "many needles": "ruler:niah_multikey_2:1200",
    "several values": "ruler:niah_multivalue:1200",
    "tracking": "ruler:vt:3000",
    "words": "ruler:cwe:4000",
    "codes": "ruler:fwe:1200",
    "file": "{data}/questions.jsonl",
    "longbench": "longbench:hotpotqa[data={data}]",
    "longbench:trec": "longbench:trec[data={data}]",
    "infinitebench": "infinitebench:passkey[data={data}]",
    "loogle": "loogle:shortdep_qa[data={data}]",
    "gsm8k": "gsm8k[data={data}]",
    "mmlu_pro": "mmlu_pro[data={data}]",
    "perplexity": "ppl:600",
}


class Case(NamedTuple):
    """A sample, what asks it, and what the plain model says."""

    question: Question
    asking: Asking
    plain: list[int] | float


@pytest.fixture(scope="module")
def policies(tiny_backbone) -> dict[str, Policy]:
    adapter = SeKVAdapter.create(tiny_backbone)
    return {spec: build_policy(spec, adapter=adapter) for spec in POLICIES}


@pytest.fixture(scope="module")
def cases(tiny_backbone, policies, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Made when first asked for: every policy shares the context of a task."""
    data = tmp_path_factory.mktemp("data")
    for name, rows in {**ROWS, "questions": [LINE]}.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Cases(dict[str, Case]):
        def __missing__(self, kind: str) -> Case:
            case = self[kind] = make(tiny_backbone, policies, TASKS[kind].format(data=data), data)
            return case

    return Cases()


@torch.no_grad()
def make(backbone: Backbone, policies: dict[str, Policy], spec: str, folder: Path) -> Case:
    evaluation = Evaluation.plan(["full"], [spec], [1.0], folder / "out", limit=1)
    (question,) = evaluation.prepare(backbone)
    asking = Asking(
        question, False, Contexts(backbone, list(policies.values()), None).open(question.prompt.context_ids)
    )
    ids = torch.tensor([plain_prompt(backbone, question)])
    if question.sample.metric == "perplexity":
        return Case(question, asking, plain_surprisal(backbone, ids, len(question.prompt.question_ids)))
    output = backbone.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=min(NEW_TOKENS, question.sample.max_new_tokens),
        pad_token_id=0,
    )
    return Case(question, asking, output[0, ids.shape[1] :].tolist())


def plain_prompt(backbone: Backbone, question: Question) -> list[int]:
    """Token ids of the whole prompt, without this package's splitting of it."""
    sample, tokenizer = question.sample, backbone.tokenizer
    assert tokenizer is not None
    if sample.metric == "perplexity":
        return question.prompt.ids
    text = f"{sample.context}{sample.separator}{sample.question}"
    if sample.chat:
        message = [{"role": "user", "content": text}]
        shown = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        return tokenizer(shown + sample.answer_prefix, add_special_tokens=False).input_ids
    ending = f"\n{sample.answer_prefix}" if sample.answer_prefix else ""
    return tokenizer(text + ending).input_ids


def plain_surprisal(backbone: Backbone, ids: Tensor, n: int) -> float:
    log_p = backbone.model(ids).logits[0, -n:-1].float().log_softmax(-1)
    return float(-log_p.gather(1, ids[0, -n + 1 :, None]).mean())


@pytest.mark.parametrize("kind", TASKS)
def test_the_chat_template_is_applied_exactly_once(tiny_backbone, cases, kind: str) -> None:
    question = cases[kind].question
    assert question.prompt.ids == plain_prompt(tiny_backbone, question)
    text = tiny_backbone.tokenizer.decode(question.prompt.ids)
    templates = 0 if kind in WITHOUT_TEMPLATE or kind == "perplexity" else 1
    assert text.count("[user] ") == text.count("[assistant] ") == templates
    assert text.count("<bos>") == (1 if templates else text.startswith("<bos>"))


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("kind", TASKS)
def test_the_whole_budget_is_plain_generation(tiny_backbone, cases, policies, kind: str, spec: str) -> None:
    question, asking, plain = cases[kind]
    policy = policies[spec]
    memory = asking.context.memory(policy, WHOLE)
    if question.sample.metric == "perplexity":
        record, _ = asking.record(question.key(spec, WHOLE), policy, memory)
        assert record.nll == pytest.approx(plain, abs=1e-4)
        assert record.ppl_ratio == pytest.approx(1.0, abs=1e-4)
        return
    new_tokens = min(NEW_TOKENS, question.sample.max_new_tokens)
    found = answer(tiny_backbone, memory.cache, asking.context.ids, question.prompt.question_ids, new_tokens)
    assert found.ids == plain


def test_every_registered_policy_is_here_but_the_bridge() -> None:
    assert {spec.partition(":")[0] for spec in POLICIES} | {BRIDGE} == set(available_policies())
