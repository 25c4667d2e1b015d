"""Amounts of memory, and bandwidths, as people write them."""

from __future__ import annotations

import re

from sekv.errors import DataError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Reads `80GiB`, `80GB`, `80G` (decimal), or bytes.

    Raises:
        DataError: it is none of them.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None or not float(match[1]):
        raise DataError(f"'{text}' is no amount of memory; give a number with a unit, such as 80GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_bandwidth(text: str) -> int:
    """Reads `25GB/s`, or bytes per second.

    Raises:
        DataError: it is neither.
    """
    amount = text.strip().lower().removesuffix("/s")
    try:
        return parse_size(amount)
    except DataError:
        raise DataError(f"'{text}' is no bandwidth; give bytes per second with a unit, such as 25GB/s") from None
