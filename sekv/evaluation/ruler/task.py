"""`ruler:NAME:LENGTH`: the thirteen tasks with their published parameters, for any tokenizer and length."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from sekv.evaluation.fit import largest_fit
from sekv.evaluation.ruler.niah import Niah
from sekv.evaluation.ruler.qa import DocumentQA
from sekv.evaluation.ruler.recipe import Draft, Recipe
from sekv.evaluation.ruler.tracking import VariableTracking
from sekv.evaluation.ruler.words import CommonWords, FrequentWords
from sekv.evaluation.sample import Sample, Task
from sekv.prompt import split_prompt

PUBLISHED_SAMPLES = 500  # of each task, when no limit is given
MIN_LENGTH = 256
_TOLERANCE = 100  # accepted shortfall: one token in so many
_REDRAWS = 16  # of a sample whose units are too coarse for its length

# Published parameters of each task; essays and data files are filled in by its options.
_RECIPES: dict[str, Callable[[int, Mapping[str, str]], Recipe]] = {
    "niah_single_1": lambda length, options: Niah("noise"),
    "niah_single_2": lambda length, options: Niah("essay", essay=_essay(options)),
    "niah_single_3": lambda length, options: Niah("essay", value="uuids", essay=_essay(options)),
    "niah_multikey_1": lambda length, options: Niah("essay", keys=4, essay=_essay(options)),
    "niah_multikey_2": lambda length, options: Niah("needle"),
    "niah_multikey_3": lambda length, options: Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": lambda length, options: Niah("essay", values=4, essay=_essay(options)),
    "niah_multiquery": lambda length, options: Niah("essay", queries=4, essay=_essay(options)),
    "vt": lambda length, options: VariableTracking(),
    "cwe": lambda length, options: CommonWords.of_length(length),
    "fwe": lambda length, options: FrequentWords.of_length(length),
    "qa_1": lambda length, options: DocumentQA.squad(Path(options["data"])),
    "qa_2": lambda length, options: DocumentQA.hotpotqa(Path(options["data"])),
}
RULER_TASKS = tuple(_RECIPES)
_ESSAY_TASKS = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"}
_DATA_TASKS = {"qa_1": "SQuAD (dev-v2.0.json)", "qa_2": "HotpotQA (hotpot_dev_distractor_v1.json)"}


class RulerTask(Task):
    """One of the thirteen tasks; a sample with its answer fills 99 to 100 percent of `length` tokens, as published.

    Args:
        name: one of `RULER_TASKS`.
        length: tokens of the prompt, chat template included, and of the room for the answer.
        options: `haystack` is a text file for the essay tasks, `data` the file of a question-answering task.

    Raises:
        DataError: the name, the length or an option is unknown, or a file is missing or malformed.
    """

    seeded = True

    def __init__(self, name: str, length: int, options: Mapping[str, str]) -> None:
        if name not in _RECIPES:
            raise DataError(f"unknown RULER task '{name}'; known: {', '.join(RULER_TASKS)}")
        self.names = (f"ruler:{name}:{length}",)
        self.length = length
        if length < MIN_LENGTH:
            raise DataError(f"task '{self.names[0]}' needs a length of at least {MIN_LENGTH} tokens")
        allowed = {"haystack"} if name in _ESSAY_TASKS else {"data"} if name in _DATA_TASKS else set()
        if unknown := sorted(options.keys() - allowed):
            listed = ", ".join(sorted(allowed)) or "none"
            raise DataError(f"task '{self.names[0]}' has no option '{unknown[0]}'; its options: {listed}")
        if name in _DATA_TASKS and "data" not in options:
            raise DataError(f"{self.names[0]} needs the file of {_DATA_TASKS[name]}: {self.names[0]}[data=FILE]")
        self.recipe = _RECIPES[name](length, options)

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """`limit` samples, or as many as RULER has."""
        if self.length > max_positions:
            raise DataError(f"{self.names[0]} does not fit the backbone: it reads at most {max_positions} tokens")
        n = limit or PUBLISHED_SAMPLES
        if self.recipe.questions is not None:
            n = min(n, self.recipe.questions)
        return [self._sample(tokenizer, index, seed) for index in range(n)]

    def _sample(self, tokenizer: PreTrainedTokenizerBase, index: int, seed: int) -> Sample:
        """The best of a few draws: units as coarse as a document may miss the length by more than a percent."""
        recipe, best, shortfall = self.recipe, None, self.length
        for attempt in range(_REDRAWS):
            name = f"{self.names[0]}-{seed}-{index}-{attempt}"
            drawn, missing = self._fitted(tokenizer, index, name)
            if best is None or missing < shortfall:
                best, shortfall = drawn, missing
            if shortfall <= self.length // _TOLERANCE:
                break
        assert best is not None
        return Sample(
            task=self.names[0],
            index=index,
            context=best.context,
            question=best.question,
            answer_prefix=best.answer_prefix,
            answers=best.answers,
            max_new_tokens=recipe.max_new_tokens,
            depth=best.depth,
            metric=recipe.metric,
        )

    def _fitted(self, tokenizer: PreTrainedTokenizerBase, index: int, name: str) -> tuple[Draft, int]:
        """The largest draft that fits, and how many tokens it is short of the length."""
        recipe = self.recipe
        room = self.length - recipe.max_new_tokens
        fitting: dict[int, tuple[Draft, int]] = {}

        def tokens(units: int) -> int:
            made = recipe.draft(units, index, random.Random(name))
            n = len(split_prompt(tokenizer, made.context, made.question, made.answer_prefix).ids)
            if n <= room:
                fitting[units] = made, room - n
            return n

        guess = 4 * self.length // recipe.unit_characters
        slack = self.length // _TOLERANCE
        units = largest_fit(tokens, room, self.names[0], least=recipe.least, guess=guess, slack=slack)
        return fitting[units]


def _essay(options: Mapping[str, str]) -> str | None:
    if "haystack" not in options:
        return None
    path = Path(options["haystack"])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"haystack file '{path}' cannot be read: {error}") from None
    if not text.strip():
        raise DataError(f"haystack file '{path}' is empty; give a text to hide the needles in")
    return text
