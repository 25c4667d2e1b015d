"""What a task gives: samples. Their metric is named, so that a sample is plain data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from sekv.prompt import Prompt

MAX_NEW_TOKENS = 64  # answers of up to this many tokens unless a sample says otherwise


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        task: name of the task in results.
        index: number within the task.
        context: the text that is compressed.
        question: what is asked about it.
        answer_prefix: the beginning of the answer.
        answers: the expected answers.
        max_new_tokens: most tokens of the answer.
        depth: where the needle lies in percent, or None.
        metric: name of the score, see `sekv.evaluation.metrics`; `perplexity` scores the question's tokens instead.
        prompt: token ids where the task makes them itself; None leaves that to the backbone's chat template.
        chat: apply the chat template.
        separator: between the context and the question.
        classes: all labels, for classification.
        max_length: most tokens of the prompt, which loses its middle to keep to it; None for as many as fit.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int = MAX_NEW_TOKENS
    depth: float | None = None
    metric: str = "match_all"
    prompt: Prompt | None = None
    chat: bool = True
    separator: str = "\n"
    classes: tuple[str, ...] = ()
    max_length: int | None = None


class Task(ABC):
    """One entry of `--tasks`: a source of samples under one name or several.

    Attributes:
        names: of the tasks in results.
        seeded: samples depend on the seed; those that do not are asked once, whatever the number of seeds.
    """

    names: tuple[str, ...]
    seeded: bool = False

    @abstractmethod
    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """The samples, at most `limit` of each name.

        Raises:
            DataError: the task does not fit the backbone.
        """
