"""The eight needle tasks of RULER: keys, values and queries in noise, in an essay, or among other needles."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from sekv.corpus import held_out_english
from sekv.evaluation.ruler.recipe import NOISE, Draft, Recipe, word_lists
from sekv.evaluation.sentences import split_sentences

Kind = Literal["words", "numbers", "uuids"]
_DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent; where an essay's needles may lie


@dataclass(frozen=True)
class Niah(Recipe):
    """A needle task. The published default of each field is one needle with a word as its key and a number as value.

    Attributes:
        haystack: `noise` repeats one paragraph, `essay` is running text, `needle` is more needles.
        key: what a needle is called by.
        value: what it hides.
        keys: needles with different keys.
        values: needles for each key.
        queries: keys that are asked for.
        essay: the text of an essay haystack; held-out English by default.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    essay: str | None = None

    max_new_tokens: ClassVar[int] = 128
    least: ClassVar[int] = 8  # as many sentences as there are needles at the very least

    @property
    def unit_characters(self) -> int:  # type: ignore[override]
        """A word, or a line."""
        return 6 if self.haystack == "essay" else 70

    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """Needles in `units` words of an essay, or `units` lines of noise or of needles."""
        make = _Unique(rng)
        keys = [make(self.key) for _ in range(max(self.keys, self.queries))]
        values = {key: [make(self.value) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        asked = rng.sample(keys, self.queries)
        rng.shuffle(needles)
        if self.haystack == "essay":
            body, depth = _in_essay(self.essay or " ".join(held_out_english()), units, needles, rng)
        else:
            lines = [self._needle(make(self.key), make(self.value)) for _ in range(units)]
            body, depth = _in_lines(lines if self.haystack == "needle" else [NOISE] * units, needles, rng)
        plural = self.queries * self.values > 1
        what = self.value if plural else self.value[:-1]
        hidden = f"Some special magic {what} are" if plural else f"A special magic {what} is"
        intro = f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you about the {what}"
        query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
        ask = f"What are all the special magic {what}" if plural else f"What is the special magic {what}"
        verb = "are" if plural else "is"
        return Draft(
            context=f"{intro} afterwards.\n{body}",
            question=f"{ask} for {query} mentioned in the provided text?",
            answer_prefix=f"The special magic {what} for {query} mentioned in the provided text {verb}",
            answers=tuple(value for key in asked for value in values[key]),
            depth=depth if len(needles) == 1 else None,
        )

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."


class _Unique:
    """Random keys and values, none of them twice: a question has one answer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def __call__(self, kind: Kind) -> str:
        while (made := self._draw(kind)) in self._used:
            pass
        self._used.add(made)
        return made

    def _draw(self, kind: Kind) -> str:
        if kind == "numbers":
            return str(self._rng.randrange(1_000_000, 10_000_000))
        if kind == "uuids":
            return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        nouns, adjectives, _ = word_lists()
        return f"{self._rng.choice(adjectives)}-{self._rng.choice(nouns)}"


def _in_essay(essay: str, words: int, needles: Sequence[str], rng: random.Random) -> tuple[str, float]:
    """The essay's first words (over and over when it is short), needles between its sentences at random depths."""
    all_words = essay.split()
    text = " ".join((all_words * (words // len(all_words) + 1))[:words])
    sentences = split_sentences(text)
    depths = sorted(rng.sample(_DEPTHS, len(needles)))
    places = [0, *(len(sentences) * depth // 100 for depth in depths), len(sentences)]
    parts = [" ".join(sentences[start:end]) for start, end in pairwise(places)]
    with_needles = [part for pair in zip(parts, needles, strict=False) for part in pair] + parts[-1:]
    return " ".join(with_needles), float(depths[0])


def _in_lines(lines: list[str], needles: Sequence[str], rng: random.Random) -> tuple[str, float]:
    """Needles on lines of their own, at random."""
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    depth = 100.0 * places[0] / len(lines)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines), depth
