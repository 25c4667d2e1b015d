"""Times are taken in turns, and ratios are those of times taken side by side."""

from __future__ import annotations

import pytest
import torch

from sekv.bench.timing import growth, in_turn, interleaved, median_ratio, operators

CPU = torch.device("cpu")


def test_calls_take_turns():
    order = []
    works = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = interleaved(works, 3, CPU)
    assert "".join(order) == "abccbaabc"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert in_turn("ab", 1) == "ba"


def test_a_slow_moment_changes_no_ratio():
    # A machine that was ten times slower in the second repeat.
    assert median_ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5


def test_growth_is_what_is_alive_at_once():
    def work():
        for _ in range(3):
            torch.zeros(1000)

    assert growth(work, CPU) == 4000


def test_a_profile_names_operators():
    assert "aten::mm" in operators(lambda: torch.ones(8, 8) @ torch.ones(8, 8), CPU)


@pytest.mark.parametrize("turn", [0, 2])
def test_even_turns_keep_the_order(turn):
    assert in_turn([1, 2], turn) == [1, 2]
