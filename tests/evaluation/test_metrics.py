from __future__ import annotations

import pytest

from sekv.evaluation.metrics import match_all, match_any


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (" 3678638.", ["3678638"], 100.0),
        ("It is 367 8638", ["3678638"], 0.0),
        ("The answer: FRANCE", ["france"], 100.0),
        ("vgcao and ZJQUQ", ["FITJT", "VGCAO", "ZJQUQ", "TYFAD"], 50.0),
        ("one two", ["one", "two", "three"], 200.0 / 3),
        ("", ["x"], 0.0),
        ("France", ["France", "France"], 100.0),
    ],
)
def test_match_all_golden_values(output: str, answers: list[str], score: float) -> None:
    assert match_all(output, answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [("in the 10th century", ["10th", "the 11th"], 100.0), ("FRANCE", ["france"], 100.0), ("", ["x", "y"], 0.0)],
)
def test_match_any_golden_values(output: str, answers: list[str], score: float) -> None:
    assert match_any(output, answers) == score
