"""Aggregation tasks of RULER: the most common words of a list (`cwe`), the most frequent of a coded text (`fwe`)."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from sekv.evaluation.ruler.recipe import Draft, Recipe, word_lists

_ZETA_2 = math.pi**2 / 6  # normalises the zeta distribution with alpha = 2


@dataclass(frozen=True)
class CommonWords(Recipe):
    """Ten words are often in a numbered list, all others seldom; after one worked example.

    Attributes:
        common: words that are often there.
        often: times each common word is there.
        seldom: times each other word is there.
        example: as (words, often, seldom), the worked example.
    """

    common: int = 10
    often: int = 30
    seldom: int = 3
    example: tuple[int, int, int] = (40, 10, 3)

    max_new_tokens: ClassVar[int] = 120
    unit_characters: ClassVar[int] = 36  # a seldom word, `seldom` times
    least: ClassVar[int] = 20

    @classmethod
    def of_length(cls, length: int) -> CommonWords:
        """The published parameters: shorter lists below 4,096 tokens."""
        return cls() if length >= 4096 else cls(often=6, seldom=1, example=(20, 3, 1))

    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """A list of `units` different words."""
        example, example_common = self._list(*self.example, rng)
        body, common = self._list(units, self.often, self.seldom, rng)
        intro = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often."
        )
        question = f"Question: What are the {self.common} most common words in the above list?"
        prefix = f"Answer: The top {self.common} words that appear most often in the list are:"
        worked = f"{intro}\n{example}\n{question} {prefix} {_numbered(example_common)}"
        return Draft(f"{worked}\n{intro}\n{body}", question, prefix, tuple(common))

    def _list(self, words: int, often: int, seldom: int, rng: random.Random) -> tuple[str, list[str]]:
        chosen = _sample_words(words, rng)
        common, others = chosen[: self.common], chosen[self.common :]
        entries = common * often + others * seldom
        rng.shuffle(entries)
        return _numbered(entries), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _sample_words(n: int, rng: random.Random) -> list[str]:
    """Different words; a list longer than the dictionary goes on with pairs, as the keys of needles are."""
    nouns, adjectives, verbs = word_lists()
    words = sorted({*nouns, *adjectives, *verbs})
    if n <= len(words):
        return rng.sample(words, n)
    pairs = (f"{rng.choice(adjectives)}-{rng.choice(nouns)}" for _ in count())
    seen = dict.fromkeys(rng.sample(words, len(words)))
    while len(seen) < n:
        seen[next(pairs)] = None
    return list(seen)


@dataclass(frozen=True)
class FrequentWords(Recipe):
    """Coded words drawn from a zeta distribution with alpha = 2, whose most frequent one is written as dots.

    Attributes:
        vocabulary: different coded words.
        letters: of a coded word.
    """

    vocabulary: int
    letters: int = 6

    max_new_tokens: ClassVar[int] = 50
    unit_characters: ClassVar[int] = 7
    least: ClassVar[int] = 32

    @classmethod
    def of_length(cls, length: int) -> FrequentWords:
        """The published vocabulary: one word for every 50 tokens."""
        return cls(max(8, (length - cls.max_new_tokens) // 50))

    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """A text of about `units` coded words."""
        seen: dict[str, None] = {}
        while len(seen) < self.vocabulary:
            seen["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        words = ["...", *list(seen)[1:]]
        text = [word for k, word in enumerate(words, 1) for _ in range(int(units / (k * k * _ZETA_2)))]
        rng.shuffle(text)
        intro = (
            "Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words."
        )
        question = (
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?"
        )
        prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
        return Draft(f"{intro} {' '.join(text)}", question, prefix, tuple(words[1:4]))
