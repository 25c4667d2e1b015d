"""The needle task, generated offline for any tokenizer and length: one fact in a long text, at a sweep of depths.

The haystack is English that training never reads (`sekv.corpus`); the needle's wording is this project's own.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from sekv.corpus import held_out_english
from sekv.evaluation.fit import largest_fit
from sekv.evaluation.sentences import SENTENCE_END
from sekv.prompt import split_prompt

MIN_LENGTH = 256
_INTRO = (
    "Read the text below. One sentence in it gives the number of a locker; you will be asked for that number later.\n\n"
)
_COLOURS = (
    "amber",
    "bronze",
    "cobalt",
    "crimson",
    "ebony",
    "indigo",
    "ivory",
    "jade",
    "maroon",
    "olive",
    "scarlet",
    "teal",
)
_PLACES = (
    "bakery",
    "chapel",
    "cinema",
    "gallery",
    "garage",
    "harbour",
    "library",
    "museum",
    "orchard",
    "stadium",
    "theatre",
)


class Needle(NamedTuple):
    """One generated sample.

    Attributes:
        context: haystack with the needle in it.
        question: asks for the number.
        answer_prefix: the beginning of the answer.
        answer: the number, seven digits.
        depth: where in the haystack the needle lies, in percent.
    """

    context: str
    question: str
    answer_prefix: str
    answer: str
    depth: float


def make_needle(tokenizer: PreTrainedTokenizerBase, length: int, depth: float, seed: str) -> Needle:
    """A sample whose whole prompt, template and answer prefix included, has 99 to 100% of `length` tokens.

    Args:
        tokenizer: counts the tokens.
        length: tokens of the prompt, at least `MIN_LENGTH`.
        depth: 0 puts the needle first, 100 last; it goes to the nearest end of a sentence.
        seed: fixes the haystack, the locker and its number.

    Raises:
        DataError: the length cannot be met with this tokenizer.
    """
    rng = random.Random(seed)
    locker = f"{rng.choice(_COLOURS)} locker at the {rng.choice(_PLACES)}"
    number = str(rng.randrange(1_000_000, 10_000_000))
    needle = f"The number of the {locker} is {number}."
    question = f"What is the number of the {locker} in the text above?"
    prefix = f"The number of the {locker} is"
    haystack = _Haystack(rng)

    def context(n_chars: int) -> str:
        return _INTRO + _insert(haystack.text(n_chars), needle, depth)

    def tokens(n_chars: int) -> int:
        return len(split_prompt(tokenizer, context(n_chars), question, prefix).ids)

    n_chars = largest_fit(tokens, length, f"niah:{length}", guess=4 * length)
    return Needle(context(n_chars), question, prefix, number, depth)


class _Haystack:
    """Held-out documents in a random order, over and over."""

    def __init__(self, rng: random.Random) -> None:
        documents = held_out_english()
        rng.shuffle(documents)
        self._round = "\n\n".join(documents) + "\n\n"

    def text(self, n_chars: int) -> str:
        """The first `n_chars` characters."""
        return (self._round * (n_chars // len(self._round) + 1))[:n_chars]


def _insert(text: str, needle: str, depth: float) -> str:
    """Puts the needle between two sentences, as near to `depth` percent of the text as there is a place."""
    places = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    wanted = len(text) * depth / 100.0
    place = min(places, key=lambda at: abs(at - wanted))
    before, after = text[:place], text[place:]
    space = "" if not before or before[-1].isspace() else " "
    return f"{before}{space}{needle} {after}" if after else f"{before}{space}{needle}"
