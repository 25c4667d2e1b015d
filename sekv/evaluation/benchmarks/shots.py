"""GSM8K with 50 worked examples, and MMLU-Pro with its five: the examples are the context that is compressed."""

from __future__ import annotations

from collections.abc import Sequence

from sekv.evaluation.benchmarks.parts import Parts, Row

GSM8K, GSM8K_SHOTS, GSM8K_TOKENS = "openai/gsm8k", 50, 256
MMLU_PRO, MMLU_PRO_SHOTS, MMLU_PRO_TOKENS = "TIGER-Lab/MMLU-Pro", 5, 2048
_LETTERS = "ABCDEFGHIJKLMNOP"


def gsm8k_parts(row: Row, train: Sequence[Row]) -> Parts:
    """A test question after the first examples of the training set.

    The answer is the number behind `####`.
    """
    shots = "\n\n".join(f"Question: {one['question']}\nAnswer: {one['answer']}" for one in train[:GSM8K_SHOTS])
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return Parts(shots, f"\n\nQuestion: {row['question']}\nAnswer:", (answer,))


def mmlu_pro_parts(row: Row, validation: Sequence[Row]) -> Parts:
    """A question after the worked examples of its own category."""
    category = row["category"]
    intro = (
        f"The following are multiple choice questions (with answers) about {category}. Think step by step and then "
        'finish your answer with "the answer is (X)" where X is the correct letter choice.'
    )
    shots = [one for one in validation if one["category"] == category][:MMLU_PRO_SHOTS]
    worked = [f"{_question(one)}{one['cot_content'].removeprefix('A: ')}" for one in shots]
    return Parts("\n\n".join([intro, *worked]), f"\n\n{_question(row)}Let's think step by step.", (row["answer"],))


def _question(row: Row) -> str:
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(_LETTERS, row["options"], strict=False))
    return f"Question:\n{row['question']}\nOptions:\n{options}\nAnswer: "
