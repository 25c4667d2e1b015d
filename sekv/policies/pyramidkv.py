"""PyramidKV: SnapKV's scores, more rows in early layers than in late ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sekv.policies.snapkv import SnapKVPolicy


@dataclass(kw_only=True)
class PyramidKVPolicy(SnapKVPolicy):
    """PyramidKV (arXiv 2406.02069): SnapKV with a layer's rows falling linearly from the first layer to the last.

    The last layer gets 1 / beta of the mean, the first one as much above it; sinks and window are kept in every layer
    and are part of the budget, and the mean over layers is the budget. The same allocation serves any scorer:
    `keydiff[layers=pyramid]`.

    Choices where the paper is silent: the series is over what is left after sinks and window; where the first layer
    would exceed the context the series is flattened around its mean, as in the authors' code. The window is SnapKV's
    64 here; the authors' code runs 8.
    """

    name: ClassVar[str] = "pyramidkv"

    layers: str = "pyramid"
