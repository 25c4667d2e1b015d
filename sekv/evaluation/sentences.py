"""Sentences of running English, well enough for putting a fact between two of them."""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, the spaces between them left out."""
    return SENTENCE_END.split(text.strip())
