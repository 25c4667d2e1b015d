"""Cutting documents into a context prefix and the query window behind it (method section 1.6)."""

from __future__ import annotations

import math
import sys
from functools import lru_cache

import torch
from torch import Tensor

from sekv.budget import Budget
from sekv.errors import DataError
from sekv.prefill import left_padded
from sekv.segmentation import SegmentationConfig


@lru_cache
def smallest_context(budget: Budget, config: SegmentationConfig, limit: int) -> int:
    """The shortest context, in tokens, from which on `budget` holds the memory it must hold.

    Args:
        budget: share or rows.
        config: how contexts are segmented.
        limit: longest context looked at.

    Raises:
        DataError: no context of up to `limit` tokens is long enough.
    """
    if budget.rows_for(limit) < config.minimum_rows(limit):
        raise DataError(
            f"a budget of {budget} cannot hold a context of {limit} tokens: sinks, tail, summaries and one span need "
            f"{config.minimum_rows(limit)} rows; raise the budget, train on longer documents, or lower max_span"
        )
    longest = min(limit, _always_held_from(budget, config))
    short = (n for n in range(longest, 0, -1) if budget.rows_for(n) < config.minimum_rows(n))
    return next(short, 0) + 1


def _always_held_from(budget: Budget, config: SegmentationConfig) -> int:
    """A length in tokens from which on a share holds every context, so that longer ones need no look.

    A context of n tokens has at least share * n - 1 rows and needs at most E + (n - E) / m + m + 1 of them, where E
    counts sinks and tail and m is `max_span`. With a share s for summary rows it never needs more than
    1 + (E + m) / (1 - s).
    """
    exact, share = config.sinks + config.tail, budget.share or 0.0
    margin, bounds = share - 1.0 / config.max_span, []
    if margin > 0.0:
        bounds.append((exact - exact / config.max_span + config.max_span + 2) / margin)
    if share > 0.0 and config.merges:
        bounds.append((2 + math.ceil((exact + config.max_span) / (1 - config.summary_share))) / share)
    return math.ceil(min(bounds, default=sys.maxsize))


def draw_cuts(lengths: Tensor, position: Tensor, window: int, smallest: int) -> Tensor:
    """The number of context tokens of each document; the query window follows right behind.

    Args:
        lengths: tokens of each document [B].
        position: where to cut, in [0, 1), uniform for a random cut [B].
        window: query tokens Q.
        smallest: shortest context allowed.

    Returns:
        Cuts in [smallest, length - window] [B].

    Raises:
        DataError: a document is shorter than `smallest` + `window` tokens.
    """
    room = lengths - window - smallest
    if bool((room < 0).any()):
        raise DataError(
            f"a document of {int(lengths.min())} tokens is too short to train on: a context of {smallest} tokens (the "
            f"least this budget allows) and a query window of {window} need {smallest + window}; raise data.min_length "
            "or the budget"
        )
    return smallest + (position.to(lengths.device) * (room + 1)).long()


def cut_documents(input_ids: Tensor, mask: Tensor, cuts: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Context and window of each document, padded on the left so that all windows end in the last column.

    Args:
        input_ids: [B, N], padding on either side.
        mask: True for real tokens [B, N].
        cuts: context tokens of each document [B].
        window: query tokens Q.

    Returns:
        Token ids and mask [B, max(cuts) + Q]; padding has id 0.
    """
    input_ids, mask = left_padded(input_ids, mask)
    size = int(cuts.max()) + window
    column = torch.arange(size, device=input_ids.device)
    token = column - (size - window - cuts)[:, None]  # index in the document, negative on padding
    source = token + (mask.shape[1] - mask.sum(dim=1))[:, None]
    real = token >= 0
    return torch.where(real, input_ids.gather(1, source.clamp_min(0)), 0), real
