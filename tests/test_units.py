"""Amounts as people write them."""

from __future__ import annotations

import pytest

from sekv.errors import DataError
from sekv.units import parse_size

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80gb", 80 * 10**9), ("1.5 T", 15 * 10**11), ("4096", 4096), ("24G", 24 * 10**9)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["much", "0", "3 parsecs", "-1GB", ""])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(DataError, match="no amount of memory"):
        parse_size(text)
