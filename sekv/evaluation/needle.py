"""The needle task, generated offline for any tokenizer and length: one fact in a long text, at a sweep of depths.

The haystack is English that training never reads (`sekv.corpus`); the needle's wording is this project's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from sekv.corpus import builtin_english, is_held_out
from sekv.errors import DataError
from sekv.prompt import split_prompt

MIN_LENGTH = 256
_TOLERANCE = 200  # accepted shortfall: one token in so many
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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


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

    return Needle(context(_largest_fit(tokens, length)), question, prefix, number, depth)


class _Haystack:
    """Held-out documents in a random order, over and over."""

    def __init__(self, rng: random.Random) -> None:
        documents = [document for document in builtin_english() if is_held_out(document)]
        if not documents:  # one version in some hundred, by the luck of the hash
            raise DataError(
                "the documentation of this Python version has no held-out text; use another, or a JSONL task"
            )
        rng.shuffle(documents)
        self._round = "\n\n".join(documents) + "\n\n"

    def text(self, n_chars: int) -> str:
        """The first `n_chars` characters."""
        return (self._round * (n_chars // len(self._round) + 1))[:n_chars]


def _insert(text: str, needle: str, depth: float) -> str:
    """Puts the needle between two sentences, as near to `depth` percent of the text as there is a place."""
    places = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    wanted = len(text) * depth / 100.0
    place = min(places, key=lambda at: abs(at - wanted))
    before, after = text[:place], text[place:]
    space = "" if not before or before[-1].isspace() else " "
    return f"{before}{space}{needle} {after}" if after else f"{before}{space}{needle}"


def _largest_fit(tokens: Callable[[int], int], length: int) -> int:
    """Characters of haystack for which `tokens` is at most `length` and short of it by less than half a percent.

    False position inside a bracket: a handful of probes, because tokens grow almost linearly with characters.
    """
    low, low_tokens = 0, tokens(0)
    if low_tokens > length:
        raise DataError(f"niah:{length} is too short: the question alone takes {low_tokens} tokens with this tokenizer")
    high = 4 * length
    while (high_tokens := tokens(high)) <= length:
        low, low_tokens, high = high, high_tokens, 2 * high
    while length - low_tokens > length // _TOLERANCE and high - low > 1:
        guess = low + round((high - low) * (length - low_tokens) / (high_tokens - low_tokens))
        # Aim a little low: a probe below the target ends the search, one above only narrows it.
        guess = min(max(guess - length // (2 * _TOLERANCE), low + 1), high - 1)
        n = tokens(guess)
        if n <= length:
            low, low_tokens = guess, n
        else:
            high, high_tokens = guess, n
    return low
