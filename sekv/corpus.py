"""Text that is always there: the documentation and the source files of the Python that runs this program.

No download, no licence question: English from `pydoc_data.topics`, code from the standard library. Both depend on the
Python version, so results on them are comparable within one version only.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from sekv.errors import DataError

DOCUMENT_CHARS = 6_000  # English is cut into documents of about this many characters, some 1,500 tokens
_HELD_OUT_ONE_IN = 10
_REPEAT_CHARS = 60  # shorter paragraphs (headings, prompts) may occur in several topics without being a repeat
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
_MIN_FILE_CHARS = 2_000


def builtin_english() -> list[str]:
    """Python's documentation topics as documents of about `DOCUMENT_CHARS` characters, in a fixed order.

    Many topics are sections of longer ones (`while` of `compound`): those are left out, so no paragraph occurs in two
    documents and a held-out document is never seen in another. Consecutive documents continue one another: join them to
    fill a longer sequence.
    """
    documents, current, size = [], [], 0
    for paragraph in _unique_paragraphs():
        current.append(paragraph)
        size += len(paragraph) + 2
        if size >= DOCUMENT_CHARS:
            documents.append("\n\n".join(current))
            current, size = [], 0
    if current:
        documents.append("\n\n".join(current))
    return documents


def _unique_paragraphs() -> Iterator[str]:
    seen: set[str] = set()
    for text in sorted(set(topics.values()), key=lambda text: (-len(text), text)):
        paragraphs = [part.rstrip() for part in re.split(r"\n\s*\n", text.strip("\n")) if part.strip()]
        # Sections are re-indented where they are quoted, so compare words only.
        keys = [" ".join(part.split()) for part in paragraphs]
        long = [key for key in keys if len(key) > _REPEAT_CHARS]
        if long and 2 * sum(len(key) for key in long if key in seen) > sum(map(len, long)):
            continue
        for part, key in zip(paragraphs, keys, strict=True):
            if key not in seen:
                yield part
            if len(key) > _REPEAT_CHARS:
                seen.add(key)


def builtin_code() -> list[str]:
    """Source files of the standard library (tests, codec tables and tiny files left out), the longest first.

    Raises:
        DataError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= _MIN_FILE_CHARS:
                files.append((-len(text), relative.as_posix(), text))
    if not files:
        raise DataError(
            f"no Python sources in {root}: the built-in code corpus needs a Python installed with its sources"
        )
    return [text for _, _, text in sorted(files)]


def is_held_out(text: str) -> bool:
    """True for the tenth of all documents, chosen by a hash of the text, that training never reads.

    Haystacks and validation use these only.
    """
    digest = hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def held_out_english() -> list[str]:
    """The held-out documents of `builtin_english`, in order: what haystacks and perplexity are made of.

    Raises:
        DataError: by the luck of the hash, this Python version has none.
    """
    documents = [document for document in builtin_english() if is_held_out(document)]
    if not documents:
        raise DataError(
            "the documentation of this Python version has no held-out text; use another, or give a text file"
        )
    return documents
