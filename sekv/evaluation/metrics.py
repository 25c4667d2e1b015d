"""Scores of an output against the expected answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def match_all(output: str, answers: Sequence[str]) -> float:
    """Share of the answers found in the output, 0 to 100: RULER's `string_match_all`, upper and lower case alike."""
    text = output.lower()
    return 100.0 * sum(answer.lower() in text for answer in answers) / len(answers)


def match_any(output: str, answers: Sequence[str]) -> float:
    """100 when any of the answers is found in the output: RULER's `string_match_part`, for alternative answers."""
    text = output.lower()
    return 100.0 * any(answer.lower() in text for answer in answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"match_all": match_all, "match_any": match_any}
