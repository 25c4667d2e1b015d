from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sekv.budget import Budget
from sekv.errors import BudgetError


@pytest.mark.parametrize(
    ("value", "share", "rows"),
    [
        ("0.1", 0.1, None),
        ("10%", 0.1, None),
        ("0.5%", 0.005, None),
        ("100%", 1.0, None),
        ("1", 1.0, None),
        ("1.0", 1.0, None),
        (0.25, 0.25, None),
        (1, 1.0, None),
        ("409", None, 409),
        (" 2 ", None, 2),
        (409.0, None, 409),
    ],
)
def test_parse(value: str | float, share: float | None, rows: int | None) -> None:
    budget = Budget.parse(value)
    assert budget.share == (pytest.approx(share) if share is not None else None)
    assert budget.rows == rows
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a tenth", "is not a number"),
        ("", "is not a number"),
        ("%", "is not a number"),
        ("0", "outside"),
        ("-0.1", "outside"),
        ("101%", "outside"),
        ("nan", "neither a share"),
        ("inf", "neither a share"),
        ("1.5", "neither a share"),
        ("-3", "outside"),
    ],
)
def test_parse_refuses(value: str, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget.parse(value)


@pytest.mark.parametrize(
    ("share", "rows", "message"), [(None, None, "not neither"), (0.1, 10, "not both"), (None, 1, "at least 2 rows")]
)
def test_share_and_rows_exclude_each_other(share: float | None, rows: int | None, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget(share=share, rows=rows)


@given(st.integers(1, 999), st.integers(1, 200_000))
def test_rows_of_a_share_are_exact(permille: int, n_tokens: int) -> None:
    want = max(1, int(Fraction(permille, 1000) * n_tokens))
    assert Budget(share=permille / 1000).rows_for(n_tokens) == want


@given(st.integers(2, 1000), st.integers(1, 2000))
def test_rows_never_exceed_the_context(rows: int, n_tokens: int) -> None:
    assert Budget(rows=rows).rows_for(n_tokens) == min(rows, n_tokens)


@pytest.mark.parametrize("n_tokens", [1, 2, 3])
def test_tiny_contexts_keep_a_row(n_tokens: int) -> None:
    assert Budget(share=0.01).rows_for(n_tokens) == 1


def test_compression_ratio_is_the_share_removed() -> None:
    assert Budget(share=0.1).compression_ratio(1000) == pytest.approx(0.9)
    assert Budget(rows=250).compression_ratio(1000) == pytest.approx(0.75)
    assert Budget(share=1.0).compression_ratio(7) == 0.0
    assert Budget(share=0.5).compression_ratio(0) == 0.0


def test_text_form_reads_back() -> None:
    for budget in (Budget(share=0.05), Budget(rows=409)):
        assert Budget.parse(str(budget)) == budget
