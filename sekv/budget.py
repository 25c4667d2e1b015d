"""The budget: how many rows a query may attend to, per layer and KV head (method section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sekv.errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """Rows of the compressed context that a query may attend to, averaged over a layer's KV heads.

    Sinks, anchors, short spans, tail, summaries and zoomed rows all count; the question and the generated tokens do
    not.

    Attributes:
        share: fraction of the context's tokens in (0, 1], or None when `rows` is given.
        rows: absolute number of rows (at least 2), or None when `share` is given.
    """

    share: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.rows is None):
            raise BudgetError("a budget is either a share of the context or a number of rows, not both and not neither")
        if self.share is not None and not (math.isfinite(self.share) and 0.0 < self.share <= 1.0):
            raise BudgetError(f"budget share {self.share} is outside (0, 1]; 0.10 keeps a tenth of the context")
        if self.rows is not None and self.rows < 2:
            raise BudgetError(f"budget of {self.rows} rows is too small; give at least 2 rows, or a share such as 0.10")

    @classmethod
    def parse(cls, value: Budget | str | float | int) -> Budget:
        """Reads `0.1`, `1.0` and `10%` as shares of the context, and whole numbers above 1 as rows.

        Raises:
            BudgetError: the text is not a number, or the number is out of range.
        """
        if isinstance(value, Budget):
            return value
        text = str(value).strip()
        try:
            number = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
        except ValueError:
            raise BudgetError(f"budget '{value}' is not a number; give a share (0.10, 10%) or rows (409)") from None
        if number <= 1.0 or text.endswith("%"):
            return cls(share=number)
        if not number.is_integer():
            raise BudgetError(f"budget '{value}' is neither a share (at most 1.0) nor a whole number of rows")
        return cls(rows=int(number))

    def rows_for(self, n_tokens: int) -> int:
        """Rows allowed for a context of `n_tokens` tokens: at least 1, at most `n_tokens` (0 for an empty context)."""
        # The tiny term keeps 0.1 * 4090 at 409 although 0.1 is not a binary fraction.
        wanted = self.rows if self.rows is not None else math.floor((self.share or 0.0) * n_tokens + 1e-6)
        return min(n_tokens, max(1, wanted))

    def compression_ratio(self, n_tokens: int) -> float:
        """Share of rows removed, 1 - budget, for a context of `n_tokens` tokens."""
        return 1.0 - self.rows_for(n_tokens) / n_tokens if n_tokens else 0.0

    def __str__(self) -> str:
        return f"{self.share:g}" if self.share is not None else str(self.rows)
