"""InfiniteBench (arXiv 2402.13718): the published prompts for open models, answer lengths and metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

from sekv.evaluation.benchmarks.parts import Parts, Row, cut

REPOSITORY = "xinrongzhang2022/InfiniteBench"
_OPTIONS = "A. {A}\nB. {B}\nC. {C}\nD. {D}"


class Kind(NamedTuple):
    """One task: its prompt, its answer length, and its metric."""

    template: str
    max_new_tokens: int
    metric: str


KINDS = {
    "passkey": Kind(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n\n{context}\n\n{input}\n\nThe pass key is",
        6,
        "first_integer",
    ),
    "number_string": Kind(
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the "
        "important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is",
        12,
        "first_integer",
    ),
    "kv_retrieval": Kind(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
        "word",
    ),
    "longbook_sum_eng": Kind("Summarize the book below.\n\n{context}\n\nSummary:", 1200, "rouge_lsum"),
    "longbook_choice_eng": Kind(
        f"Read the book and answer the question.\n\n{{context}}\n\nQuestion: {{input}}\n{_OPTIONS}\n\n"
        "The letter of the correct answer is",
        40,
        "choice",
    ),
    "longbook_qa_eng": Kind(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\n"
        "Answer:",
        40,
        "qa_f1",
    ),
    "longbook_qa_chn": Kind("阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：", 40, "qa_f1_characters"),  # noqa: RUF001
    "math_find": Kind("{input}\n\n{context}\n\n{input}", 3, "first_number"),
    "math_calc": Kind(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
        30_000,
        "number_run",
    ),
    "code_run": Kind(
        "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the exact "
        "value of {call}. The value of {call} is",
        5,
        "last_integer",
    ),
    "code_debug": Kind(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        f"crash.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\nThe correct option is:",
        5,
        "choice",
    ),
    "longdialogue_qa_eng": Kind(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you should try to guess who that character is.\n\n{context}\n\nThe name that has been replaced with $$MASK$$ "
        "is likely",
        40,
        "word",
    ),
}


def parts(name: str, row: Row) -> Parts:
    """The texts of one row of the published schema: context, input, answer (a list), options (a list or nothing)."""
    options = list(row.get("options") or [])
    values = dict(zip("ABCD", map(str, options), strict=False))
    if name == "code_run":  # the input asks for the value of NAME(NUMBER)
        call = row["input"].removeprefix("Please give me the exact number of the return value of ").split(". ")[0]
        values |= {"call": call, "func": call.split("(")[0]}
    context, after = cut(KINDS[name].template, context=row["context"], input=row["input"], **values)
    return Parts(context, after, _answers(name, row["answer"], options))


def _answers(name: str, answer: Any, options: list[Any]) -> tuple[str, ...]:
    answers = [str(one) for one in (answer if isinstance(answer, (list, tuple)) else [answer])]
    if KINDS[name].metric == "choice":  # the letter first, whatever the file gives
        by_text = ["ABCD"[options.index(one)] for one in answers if one in options]
        return tuple(by_text or [one for one in answers if one in "ABCD"])
    return tuple(answers)
