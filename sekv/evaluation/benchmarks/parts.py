"""What a benchmark makes of one published row."""

from __future__ import annotations

from typing import Any, NamedTuple

Row = dict[str, Any]


class Parts(NamedTuple):
    """The texts of one question; `before + context` is compressed, `after` is asked.

    Attributes:
        context: everything up to the end of the context.
        after: everything behind it, as the published prompt goes on.
        answers: alternatives, as the metric takes them.
        classes: all labels, for classification.
        group: suffix of the task's name, such as the length class of LongBench-E.
    """

    context: str
    after: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    group: str = ""


def cut(template: str, **values: str) -> tuple[str, str]:
    """Fills a published template; the text up to the end of its context, and the rest."""
    before, after = template.split("{context}")
    context = values.pop("context")
    for key, value in values.items():
        before, after = before.replace(f"{{{key}}}", value), after.replace(f"{{{key}}}", value)
    return before + context, after
