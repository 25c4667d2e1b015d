"""Compares both sides and writes the table; fails on a difference that no note explains.

Usage: python benchmarks/parity/compare.py FOLDER [TABLE.md]
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from cases import CASES, CONTEXT, KEPT, LOGIT_TOLERANCE, TOLERANCE, Case
from safetensors.torch import load_file
from torch import Tensor


def compare(case: Case, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[list[str], bool]:
    """Cells of a row (scores, kept rows, logits), and whether everything agrees."""
    agrees, cells = True, []
    if case.scored is None:
        cells.append("not comparable")
    else:
        part = slice(case.scored[0], CONTEXT - case.scored[1])
        mine, other = (side[f"{case.name}|scores"][..., part] for side in (ours, theirs))
        difference = float((mine - other).abs().max() / other.abs().max())
        cells.append(f"{difference:.1e}")
        agrees &= difference <= TOLERANCE
    mine, other = (side[f"{case.name}|kept"] for side in (ours, theirs))
    missed = int((other & ~mine).sum())
    cells.append("the same" if torch.equal(mine, other) else f"{missed} of {int(other.sum())} differ")
    agrees &= torch.equal(mine, other)
    mine, other = (side[f"{case.name}|logits"] for side in (ours, theirs))
    difference = float((mine - other).abs().max())
    cells.append(f"{difference:.1e}" + ("" if mine.argmax() == other.argmax() else ", another token"))
    return cells, agrees and difference <= LOGIT_TOLERANCE


def main(folder: Path, table: Path | None) -> int:
    """Prints or writes the table; the number of unexplained rows."""
    inputs = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    theirs_at = f"kvpress {versions['kvpress']} on transformers {versions['transformers']}"
    lines, notes, unexplained = [], [], 0
    for number, label in enumerate(inputs["models"]):
        ours, theirs = (load_file(folder / f"{side}-{number}.safetensors") for side in ("ours", "theirs"))
        for case in CASES:
            cells, agrees = compare(case, ours, theirs)
            mark = "" if agrees else "explained" if case.note else "**unexplained**"
            unexplained += mark == "**unexplained**"
            if mark == "explained" and case not in notes:
                notes.append(case)
            lines.append(
                "| " + " | ".join([label, case.name, f"`{case.spec}`", f"`{case.press}`", *cells, mark]) + " |"
            )
    text = "\n".join(
        [
            f"{theirs_at}, ours on transformers {version('transformers')}; torch {versions['torch']}, float32. "
            f"{CONTEXT} tokens, {KEPT} rows per layer and head.",
            "",
            "| model | method | ours | theirs | scores, largest difference | kept rows | logits, difference | |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            *(f"- {case.name}: {case.note}" for case in notes),
        ]
    )
    if table is None:
        print(text)
    else:
        page = table.read_text(encoding="utf-8")
        begin, end = "<!-- table -->", "<!-- end of table -->"
        head, rest = page.split(begin)
        table.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")
    return unexplained


if __name__ == "__main__":
    sys.exit(min(1, main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)))
