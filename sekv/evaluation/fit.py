"""How much haystack makes a prompt of a wanted length."""

from __future__ import annotations

from collections.abc import Callable

from sekv.errors import DataError


def largest_fit(
    tokens: Callable[[int], int], length: int, name: str, *, least: int = 0, guess: int = 1, slack: int | None = None
) -> int:
    """Units of haystack for which `tokens` is at most `length` and, where units are small enough, hardly less.

    False position inside a bracket: a handful of probes, because tokens grow almost linearly with units.

    Args:
        tokens: units of haystack (characters, words, sentences) to the tokens of the whole prompt.
        length: most tokens.
        name: of the task, for the error.
        least: smallest number of units.
        guess: a number of units that may be too many; doubled until it is.
        slack: accepted shortfall in tokens; half a percent of `length` by default.

    Raises:
        DataError: the least haystack is too long already.
    """
    slack = length // 200 if slack is None else slack
    low, low_tokens = least, tokens(least)
    if low_tokens > length:
        raise DataError(f"{name} is too short: the question alone takes {low_tokens} tokens with this tokenizer")
    high = max(guess, least + 1)
    while (high_tokens := tokens(high)) <= length:
        low, low_tokens, high = high, high_tokens, 2 * high
    while length - low_tokens > slack and high - low > 1:
        per_unit = (high_tokens - low_tokens) / (high - low)
        # Aim a little low: a probe below the target ends the search, one above only narrows it.
        probe = low + int((length - slack // 2 - low_tokens) / per_unit)
        probe = min(max(probe, low + 1), high - 1)
        n = tokens(probe)
        if n <= length:
            low, low_tokens = probe, n
        else:
            high, high_tokens = probe, n
    return low
