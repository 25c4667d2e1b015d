"""Uncertainty of scores: bootstrap intervals, and paired differences on the same samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2_000
_CONFIDENCE = 0.95


def standard_error(scores: Sequence[float]) -> float:
    """Standard error of the mean of `scores`; 0 for a single one."""
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95% percentile interval of the mean over resampled `values`.

    A single value has no interval but itself. Values that are all alike give one of no width, which understates the
    uncertainty of few samples.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)
