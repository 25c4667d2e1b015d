"""Question answering among distracting documents (RULER `qa_1`, `qa_2`), from local files as they were published."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sekv.errors import DataError
from sekv.evaluation.ruler.recipe import Draft, Recipe

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


class Item(NamedTuple):
    """A question, its answers, and the documents that belong to it: needed ones, and near ones that distract."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class DocumentQA(Recipe):
    """Questions of a data set among its own documents.

    Attributes:
        items: in the order of the file.
        documents: all of the file, each once.
    """

    items: tuple[Item, ...]
    documents: tuple[str, ...]

    max_new_tokens: ClassVar[int] = 32
    metric: ClassVar[str] = "match_any"
    unit_characters: ClassVar[int] = 700

    @property
    def questions(self) -> int:  # type: ignore[override]
        """Questions in the file."""
        return len(self.items)

    def draft(self, units: int, index: int, rng: random.Random) -> Draft:
        """Question `index` among `units` documents, or its needed ones where that is fewer."""
        item = self.items[index]
        near = rng.sample(item.near, len(item.near))
        mine = {*item.needed, *item.near}
        others = [i for i in range(len(self.documents)) if i not in mine]
        pool = [*item.needed, *near, *rng.sample(others, len(others))]
        n = max(units, len(item.needed))
        chosen = (pool * (n // len(pool) + 1))[:n]
        rng.shuffle(chosen)
        body = "\n\n".join(f"Document {i}:\n{self.documents[which]}" for i, which in enumerate(chosen, 1))
        return Draft(
            context=f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{body}\n\n{_INSTRUCTION}\n",
            question=f"Question: {item.question}",
            answer_prefix="Answer:",
            answers=item.answers,
        )

    @classmethod
    def squad(cls, path: Path) -> DocumentQA:
        """SQuAD 1.1 or 2.0: answerable questions; other paragraphs of the article are near.

        Raises:
            DataError: the file cannot be read or is not SQuAD's JSON.
        """
        return cls._read(path, _parse_squad, "SQuAD")

    @classmethod
    def hotpotqa(cls, path: Path) -> DocumentQA:
        """HotpotQA in the distractor setting: all ten paragraphs of a question are needed.

        Raises:
            DataError: the file cannot be read or is not HotpotQA's JSON.
        """
        return cls._read(path, _parse_hotpotqa, "HotpotQA")

    @classmethod
    def _read(cls, path: Path, parse: Any, kind: str) -> DocumentQA:
        try:
            items, documents = parse(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(f"{kind} file '{path}' cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"'{path}' is not {kind}'s JSON as published ({type(error).__name__}: {error})") from None
        if not items:
            raise DataError(f"{kind} file '{path}' has no question with an answer")
        return cls(tuple(items), tuple(documents))


def _parse_squad(data: Any) -> tuple[list[Item], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: i for i, text in enumerate(documents)}
    items = []
    for article in articles:
        in_article = dict.fromkeys(number[paragraph["context"]] for paragraph in article)
        for paragraph in article:
            here = number[paragraph["context"]]
            near = tuple(i for i in in_article if i != here)
            items += [
                Item(qa["question"], tuple(answer["text"] for answer in qa["answers"]), (here,), near)
                for qa in paragraph["qas"]
                if not qa.get("is_impossible", False) and qa["answers"]
            ]
    return items, documents


def _parse_hotpotqa(data: Any) -> tuple[list[Item], list[str]]:
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in data]
    documents = sorted({text for group in texts for text in group})
    number = {text: i for i, text in enumerate(documents)}
    items = [
        Item(entry["question"], (entry["answer"],), tuple(dict.fromkeys(number[text] for text in group)), ())
        for entry, group in zip(data, texts, strict=True)
    ]
    return items, documents
