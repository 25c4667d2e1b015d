"""Generated samples against a published one, whose texts are quoted here up to the haystack."""

# ruff: noqa: E501  published sentences, in one piece each

from __future__ import annotations

import re

import pytest

from sekv.evaluation.tasks import parse_tasks

NUMBER, KEY = r"\d{7}", r"[\w .-]+-[\w .-]+"
NOISE = r"The grass is green\. The sky is blue\. The sun is yellow\. Here we go\. There and back again\."
# Of RULER at 4,096 tokens: context, question, answer prefix, answers. `~` is the haystack.
PUBLISHED = {
    "niah_single_1": (
        rf"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you about "
        rf"the number afterwards\.\n({NOISE}\n)*One of the special magic numbers for {KEY} is: {NUMBER}\.(\n{NOISE})*",
        rf"What is the special magic number for {KEY} mentioned in the provided text\?",
        rf"The special magic number for {KEY} mentioned in the provided text is",
        [NUMBER],
    ),
    "niah_multikey_2": (
        rf"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you about "
        rf"the number afterwards\.(\nOne of the special magic numbers for {KEY} is: {NUMBER}\.)+",
        rf"What is the special magic number for {KEY} mentioned in the provided text\?",
        rf"The special magic number for {KEY} mentioned in the provided text is",
        [NUMBER],
    ),
    "niah_multiquery": (
        r"Some special magic numbers are hidden within the following text\. Make sure to memorize it\. I will quiz you "
        r"about the numbers afterwards\.\n[^\n]+",
        rf"What are all the special magic numbers for {KEY}, {KEY}, {KEY}, and {KEY} mentioned in the provided text\?",
        rf"The special magic numbers for {KEY}, {KEY}, {KEY}, and {KEY} mentioned in the provided text are",
        [NUMBER] * 4,
    ),
    "niah_multivalue": (
        r"Some special magic numbers are hidden within the following text\. Make sure to memorize it\. I will quiz you "
        r"about the numbers afterwards\.\n[^\n]+",
        rf"What are all the special magic numbers for {KEY} mentioned in the provided text\?",
        rf"The special magic numbers for {KEY} mentioned in the provided text are",
        [NUMBER] * 4,
    ),
    "vt": (
        rf"Memorize and track the chain\(s\) of variable assignment hidden in the following text\. ({NOISE}\n |VAR [A-Z]+ = "
        rf"\d+ |VAR [A-Z]+ = VAR [A-Z]+  )+Question: Find all variables that are assigned the value \d+ in the text "
        rf"Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assgined the value "
        rf"\d+, they are:  [A-Z]+ [A-Z]+ [A-Z]+ [A-Z]+ [A-Z]+\n\n\n\nMemorize and track the chain\(s\) of variable "
        rf"assignment hidden in the following text\.\n\n({NOISE}\n |VAR [A-Z]+ = \d+ |VAR [A-Z]+ = VAR [A-Z]+  )+{NOISE}\n",
        r"Question: Find all variables that are assigned the value \d+ in the text above\.",
        r"Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assgined the "
        r"value \d+, they are:",
        [r"[A-Z]{5}"] * 5,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_generated_sample_reads_as_the_published_ones(name: str, tokenizer) -> None:
    context, question, prefix, answers = PUBLISHED[name]
    (task,) = parse_tasks([f"ruler:{name}:8192"])
    for sample in task.samples(tokenizer, 8192, 3, 0):
        assert re.fullmatch(context, sample.context)
        assert re.fullmatch(question, sample.question)
        assert re.fullmatch(prefix, sample.answer_prefix)
        for pattern, answer in zip(answers, sample.answers, strict=True):
            assert re.fullmatch(pattern, answer)
