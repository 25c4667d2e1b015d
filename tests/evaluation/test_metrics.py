from __future__ import annotations

import pytest

from sekv.errors import DataError
from sekv.evaluation import metrics
from sekv.evaluation.metrics import METRICS

CLASSES = ("country", "country code", "city")
GOLDEN = [
    ("match_all", " 3678638.", ["3678638"], 100.0),
    ("match_all", "It is 367 8638", ["3678638"], 0.0),
    ("match_all", "The answer: FRANCE", ["france"], 100.0),
    ("match_all", "vgcao and ZJQUQ", ["FITJT", "VGCAO", "ZJQUQ", "TYFAD"], 50.0),
    ("match_all", "one two", ["one", "two", "three"], 200 / 3),
    ("match_all", "", ["x"], 0.0),
    ("match_all", "France", ["France", "France"], 100.0),
    ("match_any", "in the 10th century", ["10th", "the 11th"], 100.0),
    ("match_any", "", ["x", "y"], 0.0),
    ("classification", "country code it is\ncity", ["country code"], 100.0),
    ("classification", "city, country", ["city"], 50.0),
    ("classification", "none", ["city"], 0.0),
    ("count", "3 or 4", ["4"], 50.0),
    ("count", "none", ["4"], 0.0),
    ("retrieval", "Paragraph 12", ["Paragraph 12"], 100.0),
    ("retrieval", "段落3, 段落5", ["段落3"], 50.0),
    ("qa_f1", "The cat sat.", ["a cat sat down", "dog"], 80.0),
    ("qa_f1", "", ["cat"], 0.0),
    ("qa_f1_line", "\ncat\nQuestion: dog", ["cat"], 100.0),
    ("qa_f1_zh", "你好，世界", ["你好世界"], 100.0),  # noqa: RUF001
    ("qa_f1_characters", "你好。", ["你好吗"], 80.0),
    ("rouge_l", "the cat sat", ["the cat sat on"], 600 / 7),
    ("rouge_l", "", ["the cat"], 0.0),
    ("rouge_l_line", "the cat\nsat on", ["the cat"], 100.0),
    ("rouge_l_recall", "the cat sat", ["the cat sat on"], 75.0),
    ("rouge_l_zh", "你好世界", ["你好世界"], 100.0),
    ("rouge_lsum", "The cat sat!", ["the cat sat on"], 600 / 7),
    ("code", "\n# set it\nx = 1\ny = 5", ["x = 2"], 80.0),
    ("first_integer", "The key is 71432, not 5.", ["71432"], 100.0),
    ("first_integer", "5 or 71432", ["71432"], 0.0),
    ("first_integer", "none", ["71432"], 0.0),
    ("last_integer", " It is `-17`.", ["-17"], 100.0),
    ("last_integer", "", ["3"], 0.0),
    ("first_number", "about 2.50 or 3", ["2.5"], 100.0),
    ("first_number", "none", ["3"], 0.0),
    ("number_run", "[1, 4, 9, 8]", ["1", "4", "8", "8"], 50.0),
    ("word", 'It was "Ann".', ["ANN"], 100.0),
    ("word", "Anna", ["ANN"], 0.0),
    ("choice", "B. because", ["B"], 100.0),
    ("choice", "I think the answer is: C", ["C"], 100.0),
    ("choice", "perhaps D", ["D"], 100.0),
    ("choice", "", ["A"], 0.0),
    ("gsm8k", "3 + 4 = 7\n#### 7", ["7"], 100.0),
    ("gsm8k", "It makes 1,234.", ["1234"], 100.0),
    ("gsm8k", "#### 5\n\nQuestion: and?\n#### 9", ["9"], 0.0),
    ("gsm8k", "nothing", ["9"], 0.0),
    ("mmlu_pro", "C is wrong, so the answer is (B).", ["B"], 100.0),
    ("mmlu_pro", "Answer: J", ["J"], 100.0),
    ("mmlu_pro", "perhaps A or D", ["D"], 100.0),
    ("mmlu_pro", "none", ["D"], 0.0),
    ("cloze", "{'<mask-0>': 'Bob', '<mask-1>': 'Rome'}", ['{"<mask-0>": "Bob", "<mask-1>": "Paris"}'], 50.0),
    ("cloze", "Bob", ['{"<mask-0>": "Bob"}'], 0.0),
]


@pytest.mark.parametrize(("name", "output", "answers", "score"), GOLDEN)
def test_golden_values(name: str, output: str, answers: list[str], score: float) -> None:
    assert METRICS[name](output, answers, CLASSES) == pytest.approx(score, abs=1e-4)


def test_every_metric_has_a_golden_value() -> None:
    assert {name for name, *_ in GOLDEN} == METRICS.keys()


def test_a_missing_library_is_named(monkeypatch) -> None:
    with pytest.raises(DataError, match=r"needs the package 'no-such'; run: pip install 'sekv\[eval\]'"):
        metrics._library("no_such.part")
