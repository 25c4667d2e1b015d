"""What the thirteen tasks of RULER (arXiv 2404.06654) share: a draft of any size, fitted to a number of tokens."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar, NamedTuple

from sekv.errors import DataError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Draft(NamedTuple):
    """One sample's texts.

    Attributes:
        context: everything before the question, the task's instruction included.
        question: as published, on a line of its own.
        answer_prefix: the beginning of the answer.
        answers: what the answer should contain.
        depth: where a single needle lies in percent, or None.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float | None = None


class Recipe(ABC):
    """How the samples of one task are made.

    Attributes:
        max_new_tokens: the published room for the answer; it counts towards the length of a sample.
        metric: the published score.
        unit_characters: about how long one unit of haystack is.
        least: units below which no sample can be made.
        questions: how many different samples there can be; None for any number.
    """

    max_new_tokens: ClassVar[int]
    metric: ClassVar[str] = "match_all"
    unit_characters: ClassVar[int]
    least: ClassVar[int] = 1
    questions: int | None = None

    @abstractmethod
    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """A sample with `units` units of haystack.

        Args:
            units: words, sentences, needles or documents, as the task has them.
            index: number of the sample.
            rng: fixes everything else.
        """


@lru_cache(maxsize=1)
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """The nouns, adjectives and verbs of `wonderwords`, from which the published tasks draw.

    Raises:
        DataError: the package is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ModuleNotFoundError:
        raise DataError("this task needs the package 'wonderwords'; run: pip install 'sekv[eval]'") from None
    words = RandomWord()
    nouns, adjectives, verbs = (words.filter(include_categories=[kind]) for kind in ("noun", "adjective", "verb"))
    return nouns, adjectives, verbs
