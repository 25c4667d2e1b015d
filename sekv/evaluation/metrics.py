"""Scores of an output against the expected answers, 0 to 100, by name.

The formulas are those of the benchmarks that use them; ROUGE, word segmentation and edit similarity come from the
libraries that the benchmarks (or their successors) use.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sekv.errors import DataError

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
_CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001, E501
_SEPARATORS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))


def match_all(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the answers found in the output: RULER's `string_match_all`, upper and lower case alike."""
    text = output.lower()
    return 100.0 * sum(answer.lower() in text for answer in answers) / len(answers)


def match_any(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """100 when any of the answers is found in the output: RULER's `string_match_part`, for alternative answers."""
    text = output.lower()
    return 100.0 * any(answer.lower() in text for answer in answers)


def classification(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench: one over the number of class names found on the first line, when the right one is among them."""
    line = first_line(output)
    scores = []
    for answer in answers:
        # A class name inside the right one (`country` in `country code`) was not meant.
        found = [name for name in classes if name in line and not (name in answer and name != answer)]
        scores.append(100.0 / len(found) if answer in found else 0.0)
    return max(scores)


def first_integer(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench: the first run of digits is the answer."""
    return 100.0 * (re.findall(r"[0-9]+", output)[:1] in [[answer] for answer in answers])


def last_integer(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench code_run: the last word is the answer."""
    words = re.sub(r"[\n.`'\":]", " ", output).split()
    return 100.0 * (words[-1:] in [[answer] for answer in answers])


def first_number(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench math_find: the first number equals the answer."""
    found = re.search(r"\d+\.\d+|\d+", output)
    return 100.0 * (found is not None and any(float(found[0]) == float(answer) for answer in answers))


def number_run(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench math_calc: share of the answers given in order before the first mistake."""
    numbers = [int(number) for number in re.findall(r"[0-9]+", output)]
    right = 0
    for given, wanted in zip(numbers, map(int, answers), strict=False):
        if given != wanted:
            break
        right += 1
    return 100.0 * right / len(answers)


def word(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench: an answer is a word of the output, upper and lower case alike."""
    words = output.translate(_SEPARATORS).upper().split()
    return 100.0 * any(answer.upper() in words for answer in answers)


def choice(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """InfiniteBench: the output begins with the letter, or says it after `answer is` and the like, or alone first."""
    text = output.strip()
    if text[:1] and text[0] in "ABCD":
        return 100.0 * (text[0] in answers)
    flat = " ".join(re.sub(r"[\n\"'.,?!{}]", " ", text).split())
    said = re.search(r"(?:answer is:|answer:|answer is|option is) (\w)", flat)
    first = said[1] if said else next((one for one in flat.split() if one in set("ABCD")), "")
    return 100.0 * (first in answers)


def gsm8k(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The number behind the first `####`, or else the last one, before the output begins another question."""
    text = output.split("Question:")[0]
    marked = re.search(r"####\s*(-?[0-9.,]+)", text)
    numbers = re.findall(r"-?[0-9][0-9.,]*", text)
    given = (marked[1] if marked else numbers[-1] if numbers else "").replace(",", "").rstrip(".")
    return 100.0 * (given in answers)


def mmlu_pro(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The letter after `answer is`, after `Answer:`, or the last letter that stands alone."""
    text = output.split("Question:")[0]
    patterns = (r"answer is \(?([A-J])\)?", r"[aA]nswer:\s*([A-J])", r".*\b([A-J])\b")
    found = (re.search(pattern, text, re.DOTALL) for pattern in patterns)
    return 100.0 * (next((match[1] for match in found if match), "") in answers)


def cloze(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LooGLE: share of the masks that are filled as expected; an output that is no dictionary fills none."""
    expected = _dictionary(answers[0])
    given = _dictionary(output)
    return 100.0 * sum(given.get(mask) == name for mask, name in expected.items()) / max(1, len(expected))


def _dictionary(text: str) -> dict[Any, Any]:
    for read in (json.loads, ast.literal_eval):
        try:
            made = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(made, dict):
            return made
    return {}


def first_line(output: str) -> str:
    """What LongBench scores of few-shot tasks: a model goes on with examples of its own."""
    return output.lstrip("\n").split("\n")[0]


def _numbers_share(output: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", output)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _count(output: str, answer: str) -> float:
    """LongBench: share of the numbers in the output that are right."""
    return _numbers_share(output, answer)


def _retrieval(output: str, answer: str) -> float:
    """LongBench: likewise for the paragraph's number."""
    return _numbers_share(output, re.findall(r"\d+", answer)[0])


def _f1(output: Sequence[str], answer: Sequence[str]) -> float:
    same = sum((Counter(output) & Counter(answer)).values())
    return 2 * same / (len(output) + len(answer)) if same else 0.0


def normalise(text: str) -> list[str]:
    """SQuAD's words: lower case, without punctuation and articles."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _normalise_zh(text: str) -> str:
    return "".join(text.lower().translate(str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)).split())


def _qa_f1(output: str, answer: str) -> float:
    return _f1(normalise(output), normalise(answer))


def _qa_f1_zh(output: str, answer: str) -> float:
    mine, theirs = ([w for w in map(_normalise_zh, _segment(text)) if w] for text in (output, answer))
    return _f1(mine, theirs)


def _qa_f1_characters(output: str, answer: str) -> float:
    return _f1(_normalise_zh(output), _normalise_zh(answer))


def _segment(text: str) -> list[str]:
    return list(_library("jieba").cut(text, cut_all=False))


def _rouge_l(output: str, answer: str, part: str = "f") -> float:
    try:
        return float(_rouge().get_scores([output], [answer])[0]["rouge-l"][part])
    except ValueError:  # an empty text, as the library has it
        return 0.0


def _rouge_l_zh(output: str, answer: str) -> float:
    return _rouge_l(" ".join(_segment(output)), " ".join(_segment(answer)))


def _rouge_lsum(output: str, answer: str) -> float:
    return float(_rouge_scorer().score(answer, output)["rougeLsum"].fmeasure)


def _code(output: str, answer: str) -> float:
    """LongBench: edit similarity of the first line that is neither a comment nor a fence."""
    lines = output.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    return round(_library("rapidfuzz.fuzz").ratio(line, answer)) / 100


@lru_cache(maxsize=1)
def _rouge() -> Any:
    return _library("rouge").Rouge()


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    return _library("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0].replace("_", "-")
        raise DataError(f"this metric needs the package '{package}'; run: pip install 'sekv[eval]'") from None


def _best(one: Callable[[str, str], float], line_only: bool = False) -> Metric:
    """The best score over alternative answers, each from 0 to 1."""

    def metric(output: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
        text = first_line(output) if line_only else output
        return 100.0 * max(one(text, answer) for answer in answers)

    return metric


METRICS: dict[str, Metric] = {
    "match_all": match_all,
    "match_any": match_any,
    "classification": classification,
    "count": _best(_count),
    "retrieval": _best(_retrieval),
    "qa_f1": _best(_qa_f1),
    "qa_f1_line": _best(_qa_f1, line_only=True),
    "qa_f1_zh": _best(_qa_f1_zh),
    "qa_f1_characters": _best(_qa_f1_characters),
    "rouge_l": _best(_rouge_l),
    "rouge_l_line": _best(_rouge_l, line_only=True),
    "rouge_l_recall": _best(lambda output, answer: _rouge_l(output, answer, "r")),
    "rouge_l_zh": _best(_rouge_l_zh),
    "rouge_lsum": _best(_rouge_lsum),
    "code": _best(_code),
    "first_integer": first_integer,
    "last_integer": last_integer,
    "first_number": first_number,
    "number_run": number_run,
    "word": word,
    "choice": choice,
    "cloze": cloze,
    "gsm8k": gsm8k,
    "mmlu_pro": mmlu_pro,
}
