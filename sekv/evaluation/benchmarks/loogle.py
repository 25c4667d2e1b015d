"""LooGLE (arXiv 2311.04939): published prompts and answer lengths, ROUGE-L recall or matched clozes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from sekv.evaluation.benchmarks.parts import Parts, Row, cut

REPOSITORY = "bigainlco/LooGLE"
_QA = "Please answer the question based on the long texts below. \n{context}\nQuestion: {input}\nAnswer: "
# template, answer length, metric
KINDS = {
    "shortdep_qa": (_QA, 300, "rouge_l_recall"),
    "longdep_qa": (_QA, 500, "rouge_l_recall"),
    "longdep_summarization": (
        "Please generate a summary of the below paper. \n{context}\n Summarization: ",
        500,
        "rouge_l_recall",
    ),
    "shortdep_cloze": (
        "Please fill in the clozes based on the given long texts below. Each of the placeholder '<mask-n>' in the "
        "question could be an entity of Person, Location or Organiocation. The same masks represent the same entity. "
        "Output a json format answer, for example: {'<mask-0>': 'Bob', '<mask-1>': 'Gorrosion Magazine',"
        "'<mask-2>': 'Bethel Horizon'}\n{context}\n Question: {input} What are the masked entities? \nAnswer:",
        50,
        "cloze",
    ),
}


def all_parts(name: str, row: Row) -> Iterator[Parts]:
    """Every question about one document of the published schema: input (or context), qa_pairs, output.

    Later releases hold one question a row instead: context, question, answer.
    """
    template = KINDS[name][0]
    text = row.get("input") or row["context"]
    if "question" in row:
        pairs = [(row["question"], row["answer"])]
    elif row.get("qa_pairs") in (None, "none", ""):
        pairs = [("", row["output"])]
    else:
        listed = row["qa_pairs"]
        listed = ast.literal_eval(listed) if isinstance(listed, str) else listed
        pairs = [(pair["Q"], pair["A"]) for pair in listed]
    for question, answer in pairs:
        context, after = cut(template, context=text, input=question)
        told = json.dumps(answer, ensure_ascii=False) if isinstance(answer, dict) else str(answer)
        yield Parts(context, after, (told,))
