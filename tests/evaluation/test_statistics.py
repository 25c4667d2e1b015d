from __future__ import annotations

import pytest

from sekv.evaluation.statistics import bootstrap_interval, standard_error


def test_standard_error_golden_values() -> None:
    assert standard_error([40.0]) == 0.0
    assert standard_error([0.0, 100.0]) == pytest.approx(50.0)
    assert standard_error([0.0, 100.0, 100.0, 100.0]) == pytest.approx(25.0)


def test_a_bootstrap_interval_is_that_of_the_normal_law_for_many_values() -> None:
    values = [float(i % 2) for i in range(400)]
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.006)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([3.0]) == (3.0, 3.0)
    assert bootstrap_interval([3.0, 3.0]) == (3.0, 3.0)
