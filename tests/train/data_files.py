"""Corpora on disk for the tests of the data modules: jsonl, packed in every way, and parquet."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import zstandard
from pyarrow import parquet


def make_texts(count: int, seed: int = 0, size: tuple[int, int] = (120, 400)) -> list[str]:
    """Documents of random length in bytes, each beginning with its own number."""
    generator = random.Random(seed)
    return [f"<{i:04}> " + "lorem ipsum " * (generator.randint(*size) // 12) for i in range(count)]


def write(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    """Writes documents in the format of the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({column: texts, "id": list(range(len(texts)))}), path, row_group_size=7)
        return path
    content = "".join(json.dumps({column: text, "meta": {}}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":  # in two frames, as parallel packers write
        half = content.index(b"\n", len(content) // 2) + 1
        content = b"".join(map(zstandard.ZstdCompressor().compress, (content[:half], content[half:])))
    path.write_bytes(content)
    return path
