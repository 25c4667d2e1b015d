"""Variable tracking (RULER `vt`): a chain of assignments in noise, after one worked example."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from sekv.evaluation.ruler.recipe import NOISE, Draft, Recipe

_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text."
_EXAMPLE_LINES = 10


@dataclass(frozen=True)
class VariableTracking(Recipe):
    """One chain by default; further ones distract.

    Attributes:
        chains: chains in the text; the first is asked for.
        hops: assignments after the first of each chain.
    """

    chains: int = 1
    hops: int = 4

    max_new_tokens: ClassVar[int] = 30
    unit_characters: ClassVar[int] = len(NOISE)
    least: ClassVar[int] = 5

    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """Chains over `units` lines of noise."""
        example, example_value, example_names = self._text(_EXAMPLE_LINES, 3, rng)
        body, value, names = self._text(units, 5, rng)
        ask = "Question: Find all variables that are assigned the value"
        # The published example really lacks the end of its question, and every prefix has "assgined".
        worked = (
            f"{_INSTRUCTION} {example} {ask} {example_value} in the text {self._prefix(example_value)}  "
            f"{' '.join(example_names)}"
        )
        return Draft(
            context=f"{worked}\n\n\n\n{_INSTRUCTION}\n\n{body}",
            question=f"{ask} {value} in the text above.",
            answer_prefix=self._prefix(value),
            answers=names,
        )

    def _prefix(self, value: str) -> str:
        return (
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{self.hops + 1} variables are assgined the value {value}, they are:"
        )

    def _text(self, lines: int, letters: int, rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
        """Noise with the chains in it, the value of the first chain, and its variables."""
        count = self.chains * (self.hops + 1)
        names: list[str] = []
        while len(names) < count:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        values = [str(value) for value in rng.sample(range(10_000, 99_999), self.chains)]
        parts = [f"{NOISE}\n"] * lines
        for chain, value in enumerate(values):
            mine = names[chain * (self.hops + 1) :][: self.hops + 1]
            steps = [f"VAR {mine[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(mine))]
            places = sorted(rng.sample(range(len(parts)), len(steps)))
            for shift, (place, step) in enumerate(zip(places, steps, strict=True)):
                parts.insert(place + shift, step)
        return " ".join(parts), values[0], tuple(names[: self.hops + 1])
