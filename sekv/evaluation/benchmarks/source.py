"""Rows of a published data set: from local files in the published schema, or through `datasets` from the Hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sekv.errors import DataError

Row = dict[str, Any]


def local_rows(folder: Path, names: Sequence[str], task: str) -> list[Row]:
    """The rows of the first of `names` that the folder has, as .jsonl, .json or .parquet.

    Args:
        folder: a folder, or one file itself.
        names: file names without their endings.
        task: for the error.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    files = [folder] if folder.is_file() else [folder / f"{name}{end}" for name in names for end in _READERS]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        wanted = " or ".join(f"{name}.jsonl" for name in names)
        raise DataError(f"{task}: no {wanted} (or .json, .parquet) in '{folder}'; copy the published file there")
    try:
        rows = _READERS[path.suffix](path)
    except KeyError:
        raise DataError(f"{task}: '{path}' is none of {', '.join(_READERS)}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{task}: '{path}' cannot be read: {error}") from None
    if not rows:
        raise DataError(f"{task}: '{path}' has no rows")
    return rows


def hub_rows(repository: str, config: str | None, split: str, task: str) -> list[Row]:
    """The rows of a data set on the Hub, or of its copy in the Hub's cache.

    Raises:
        DataError: `datasets` is not installed, or the data set cannot be had.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise DataError(f"{task} needs the package 'datasets'; run: pip install 'sekv[eval]'") from None
    try:
        return [dict(row) for row in load_dataset(repository, config, split=split)]
    except Exception as error:  # builders, HTTP clients and file formats each raise their own kind
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{task}: '{repository}' cannot be had from the Hub ({type(error).__name__}: {reason}); "
            f"give the published files: {task}[data=FOLDER]"
        ) from None


def _read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _read_json(path: Path) -> list[Row]:
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, list) else list(loaded.values())


def _read_parquet(path: Path) -> list[Row]:
    from datasets import Dataset

    return [dict(row) for row in Dataset.from_parquet(str(path))]


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
