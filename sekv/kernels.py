"""Compiled loops for a decode step on the host: a few thousand numbers, where an operator costs more than its work.

What computes with keys and values has a plain counterpart in torch, which accelerators and longer questions use:
`TokenIndex.log_shares`, `log_sum`, `select_spans`, `Summaries`, `FactorBank.fetch`, `packed_attention`. The
bookkeeping of slots lives on the host for every device. Compiled once per machine and kept beside the package.

Dimensions: B batch, K KV heads, H = G * K query heads, S spans, T span tokens, r routing dimension, d head dimension, E
exact rows, M summary rows, C slots. A *group* is one (batch row, KV head) pair, n its query heads or its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]

_BLOCK = 512  # tokens whose logits stay in the innermost cache while the directions are gone through
NO_SPAN = np.float32(-1e4)  # log share where there is no span: finite, so that nothing becomes NaN in a product with 0
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_TINY = np.finfo(np.float32).tiny
PASSES = 3  # greedy passes over the ranked spans; later ones fill what one span too long for the rest left open

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    # Sums may be reordered, which is what makes them vectors; infinities keep their meaning.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        made: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in: compiled by every process
        made = njit(**options)(function)
    return cast(_Function, made)


@_compiled
def index_logits(query: Floats, projection: Floats, step: Floats, codes: NDArray[np.uint8], out: Floats) -> None:
    """Inner products of projected queries with the keys of an index in four bits.

    Args:
        query: scaled by the factor on q.k [B * H, d].
        projection: of queries [H, r, d].
        step: what one unit is worth [groups, r].
        codes: two directions in each byte, eight standing for zero [groups, ceil(r / 2), T].
        out: written [B * H, T].
    """
    groups, half, n_tokens = codes.shape
    heads, rank, dim = projection.shape
    per_group = len(query) // groups
    projected = np.zeros((per_group, 2 * half), dtype=np.float32)
    zero = np.zeros(per_group, dtype=np.float32)
    low, high = np.empty(_BLOCK, dtype=np.float32), np.empty(_BLOCK, dtype=np.float32)
    for group in range(groups):
        zero[:] = 0.0
        for i in range(per_group):
            head = group * per_group + i
            for j in range(rank):
                inner = np.float32(0.0)
                for c in range(dim):
                    inner += query[head, c] * projection[head % heads, j, c]
                projected[i, j] = inner * step[group, j]
                zero[i] -= np.float32(8.0) * projected[i, j]
        for begin in range(0, n_tokens, _BLOCK):
            for i in range(per_group):
                out[group * per_group + i, begin : begin + _BLOCK] = zero[i]
            for j in range(half):
                code = codes[group, j, begin : begin + _BLOCK]
                for t in range(len(code)):
                    both = np.int32(code[t])
                    low[t], high[t] = np.float32(both & np.int32(15)), np.float32(both >> np.int32(4))
                for i in range(per_group):
                    found = out[group * per_group + i, begin : begin + _BLOCK]
                    lower, upper = projected[i, j], projected[i, half + j]
                    for t in range(len(found)):
                        found[t] += lower * low[t] + upper * high[t]


@_compiled
def exponentials(logits: Floats) -> Floats:
    """Exponentials of what each row's logits are below their peak, in place; the peaks [n] of logits [n, T].

    2^x = 2^round(x) 2^rest, the first by its bits and the second by its series, in vectors of several numbers; what is
    below 2^-126 becomes 0.
    """
    peaks = np.empty(len(logits), dtype=np.float32)
    bits = np.empty(_BLOCK, dtype=np.int32)
    whole = bits.view(np.float32)
    for row in range(len(logits)):
        peak = np.float32(-np.inf)
        for t in range(logits.shape[1]):
            peak = max(peak, logits[row, t])
        peak = max(peak, np.float32(-1e30))  # a context without spans: all of its logits are -inf
        peaks[row] = peak
        for begin in range(0, logits.shape[1], _BLOCK):
            found = logits[row, begin : begin + _BLOCK]
            for t in range(len(found)):
                x = max((found[t] - peak) * _LOG2_E, np.float32(-127.0))
                nearest = np.floor(x + np.float32(0.5))
                rest = (x - nearest) * _LN_2
                series = np.float32(1.0)
                for term in range(7, 0, -1):
                    series = np.float32(1.0) + series * rest * np.float32(1.0 / term)
                found[t] = series
                bits[t] = (np.int32(nearest) + np.int32(127)) << np.int32(23)
            for t in range(len(found)):
                found[t] *= whole[t]
    return peaks


@_compiled
def span_log_shares(
    weight: Floats, peak: Floats, span: Whole, length: Whole, rest: Floats, scale: Floats, offset: Floats
) -> Floats:
    """Log of the share of its attention that each query head is expected to give each span.

    Args:
        weight: exp(logit - peak), 0 at padding [B * H, T].
        peak: [B * H].
        span: span of each token [B, T].
        length: tokens per span [B, S]; 0 where there is none.
        rest: log-sum of the exponentials of everything outside the spans [B * H].
        scale: of the log-sum of a span, per query head [H].
        offset: likewise.

    Returns:
        [B * H, S].
    """
    heads, n_spans = len(scale), length.shape[1]
    share = np.zeros((len(weight), n_spans), dtype=np.float32)
    for row in range(len(weight)):
        b, h = row // heads, row % heads
        found = share[row]
        total, last = np.float32(0.0), span[b, 0]
        for t in range(weight.shape[1]):  # tokens of a span lie side by side
            if span[b, t] != last:
                found[last] += total
                total, last = np.float32(0.0), span[b, t]
            total += weight[row, t]
        found[last] += total
        most = np.float32(-np.inf)
        for s in range(n_spans):
            estimate = (np.log(max(found[s], _TINY)) + peak[row]) * scale[h] + offset[h]
            total = estimate if length[b, s] > 0 else NO_SPAN
            found[s] = total
            most = max(most, total)
        most = max(most, rest[row])
        everything = np.exp(rest[row] - most)
        for s in range(n_spans):
            everything += np.exp(found[s] - most)
        known = most + np.log(everything)
        for s in range(n_spans):
            found[s] -= known
    return share


@_compiled
def wishes(share: Floats, bias: Floats, threshold: Floats, sharers: int) -> tuple[Floats, Flags]:
    """The order in which spans are taken, and which of them lie above the threshold.

    Args:
        share: log shares [B * H, S].
        bias: of alpha's logit, per query head [H].
        threshold: tau [H].
        sharers: query heads that choose together: their alphas are added up, and the strongest margin counts.

    Returns:
        Both [B * H / sharers, S]: alpha summed, or alpha - tau of a head on its own; and alpha >= tau of any head.
    """
    heads, n_spans = len(bias), share.shape[1]
    order = np.zeros((len(share) // sharers, n_spans), dtype=np.float32)
    eligible = np.zeros(order.shape, dtype=np.bool_)
    for row in range(len(share)):
        h, choice = row % heads, row // sharers
        taken_off = threshold[h] if sharers == 1 else np.float32(0.0)
        for s in range(n_spans):
            alpha = np.float32(1.0) / (np.float32(1.0) + np.exp(-(share[row, s] + bias[h])))
            order[choice, s] += alpha - taken_off
            eligible[choice, s] |= alpha >= threshold[h]
    return order, eligible


@_compiled
def choose_spans(order: Floats, cost: Whole, rows: Whole, eligible: Flags) -> Flags:
    """`select_spans` of a single step.

    Args:
        order: the highest are taken first [groups, S].
        cost: rows that zooming into a span adds [groups, S]; negative where there is none.
        rows: rows left [groups, 1].
        eligible: spans that may be taken [groups, S].

    Returns:
        [groups, S].
    """
    chosen = np.zeros(order.shape, dtype=np.bool_)
    for group in range(len(order)):
        ranked = np.argsort(-order[group])
        left = rows[group, 0]
        for _ in range(PASSES):
            paid, at_start = 0, left
            for s in ranked:
                price = cost[group, s]
                if price < 0 or price > at_start or chosen[group, s] or not eligible[group, s]:
                    continue
                paid += price
                if paid <= at_start:
                    chosen[group, s] = True
                    left -= price
    return chosen


@_compiled
def exact_log_sum(query: Floats, key: Floats, n_context: int, bias: Floats, unseen: Flags) -> Floats:
    """Log-sum of the exponentials over exact rows and tail.

    Args:
        query: scaled by the factor on q.k [groups, n, d].
        key: rows [groups, at least n_context + T, d], E exact ones first, the T of the tail from `n_context` on.
        n_context: where the tail begins.
        bias: added to the logits of exact rows, -inf where a row is not real [groups, E].
        unseen: tail tokens that are not real [groups, T].

    Returns:
        [groups, n], -inf where nothing is seen.
    """
    found = np.empty(query.shape[:2], dtype=np.float32)
    for group in range(len(query)):
        seen = _seen(bias[group : group + 1], unseen[group], n_context)
        logits = _seen_logits(query[group], key[group], seen, bias[group : group + 1])
        peaks = exponentials(logits)
        for i in range(len(peaks)):
            found[group, i] = peaks[i] + np.log(logits[i].sum())
    return found


@_compiled
def tokens_left(chosen: Flags, tokens: Whole, row: Whole, length: Whole) -> Whole:
    """Tokens that each summary row stands for when some spans are zoomed into.

    Args:
        chosen: [groups, n, S].
        tokens: of each row before any zoom [groups, M].
        row: summary row of each span [groups, S].
        length: tokens per span [groups, S].

    Returns:
        [groups, n, M].
    """
    groups, n_choices, n_spans = chosen.shape
    left = np.empty((groups, n_choices, tokens.shape[1]), dtype=np.int64)
    for group in range(groups):
        for i in range(n_choices):
            left[group, i] = tokens[group]
            for s in range(n_spans):
                if chosen[group, i, s]:
                    left[group, i, row[group, s]] -= length[group, s]
    return left


@_compiled
def rows_without(
    sums: Floats, summary: Floats, chosen: Flags, left: Whole, row: Whole, length: Whole, out: Floats, first: int
) -> None:
    """Summary rows as they are when some spans are zoomed into: the mean of what is left.

    Args:
        sums: token-weighted sums of the summaries of each row [groups, M, d].
        summary: of each span [groups, S, d].
        chosen: [groups, S].
        left: tokens that are left [groups, M].
        row: summary row of each span [groups, S].
        length: tokens per span [groups, S].
        out: written from row `first` on [groups, at least first + M, d]; anything where nothing is left.
        first: where the M rows begin.
    """
    groups, n_rows, dim = sums.shape
    for group in range(groups):
        for m in range(n_rows):
            out[group, first + m] = sums[group, m]
        for s in range(chosen.shape[1]):
            if chosen[group, s]:
                target, weight = out[group, first + row[group, s]], np.float32(length[group, s])
                for c in range(dim):
                    target[c] -= weight * summary[group, s, c]
        for m in range(n_rows):
            target, share = out[group, first + m], np.float32(1.0) / np.float32(max(left[group, m], 1))
            for c in range(dim):
                target[c] *= share


@_compiled
def visible_slots(chosen: Flags, owner: Whole) -> Flags:
    """Slots whose span is chosen.

    Args:
        chosen: [groups, n, S].
        owner: span of each slot, S for an empty one [groups, C].

    Returns:
        [groups, n, C].
    """
    groups, n_choices, n_spans = chosen.shape
    visible = np.zeros((groups, n_choices, owner.shape[1]), dtype=np.bool_)
    for group in range(groups):
        for i in range(n_choices):
            for c in range(owner.shape[1]):
                s = owner[group, c]
                visible[group, i, c] = s < n_spans and chosen[group, i, s]
    return visible


@_compiled
def admit(
    wanted: Flags, length: Whole, owner: Whole, held: Flags, used: Whole, step: int
) -> tuple[Whole, Whole, Whole]:
    """Reserves slots for the spans of a step; those chosen longest ago make room, the first slots first.

    Args:
        wanted: [groups, S].
        length: tokens per span [groups, S].
        owner: span of each slot, S for an empty one [groups, C]; written.
        held: all rows of a span are in slots [groups, S + 1]; written.
        used: step that last chose a span, -1 in column S [groups, S + 1]; written.
        step: number of this one.

    Returns:
        What has to be fetched: spans, row-major over (group, span) [M]; and of each of their rows the group [P] and the
        slot [P].
    """
    groups, n_spans = wanted.shape
    spans = np.empty(wanted.size, dtype=np.int64)
    n_missing = n_needed = 0
    for group in range(groups):
        for s in range(n_spans):
            if wanted[group, s]:
                used[group, s] = step
                if not held[group, s]:
                    spans[n_missing] = group * n_spans + s
                    n_missing += 1
                    n_needed += length[group, s]
    spans = spans[:n_missing]
    group_of, slot_of = np.empty(n_needed, dtype=np.int64), np.empty(n_needed, dtype=np.int64)
    first = at = 0
    for group in range(groups):
        last, need = first, 0
        while last < n_missing and spans[last] < (group + 1) * n_spans:
            need += length[group, spans[last] - group * n_spans]
            last += 1
        if last > first:
            group_of[at : at + need] = group
            slots = slot_of[at : at + need]
            _oldest(used[group], owner[group], slots)
            _give(slots, spans[first:last] - group * n_spans, length[group], owner[group], held[group])
        first, at = last, at + need
    return spans, group_of, slot_of


@_compiled
def _oldest(used: Whole, owner: Whole, slots: Whole) -> None:
    """Writes the slots of one group whose spans were chosen longest ago, the first slots first."""
    at, last = 0, np.int64(-2)
    while at < len(slots):
        age = np.int64(2**62)  # of the next ones: few steps lie between what is given up and what is not
        for s in owner:
            if last < used[s] < age:
                age = used[s]
        for slot in range(len(owner)):
            if used[owner[slot]] == age and at < len(slots):
                slots[at] = slot
                at += 1
        last = age


@_compiled
def _give(slots: Whole, spans: Whole, length: Whole, owner: Whole, held: Flags) -> None:
    """Gives slots of one group to spans, one behind the other."""
    nobody = len(held) - 1
    for slot in slots:
        held[owner[slot]] = False  # a span that loses one row is lost; its other rows become empty slots
    for slot in range(len(owner)):
        if not held[owner[slot]]:
            owner[slot] = nobody
    at = 0
    for s in spans:
        held[s] = True
        owner[slots[at : at + length[s]]] = s
        at += length[s]


@_compiled
def rebuild_raw(
    raw: NDArray[np.int8],
    step: Floats,
    table: Whole,
    spans: Whole,
    group: Whole,
    row: Whole,
    key: Floats,
    value: Floats,
) -> int:
    """Writes the rows of spans that are kept raw, in 8 bits, to where they belong.

    Args:
        raw: [n, d].
        step: what one unit of each row is worth [n].
        table: per entry its tokens, its rank (-1: raw) and its first row, keys first [3 or more, entries].
        spans: numbers of the spans [M].
        group: of each of their rows [P].
        row: where it goes [P].
        key: written [groups, R, d].
        value: likewise.

    Returns:
        Rows read, of keys and of values; -1 when a span has factors, and nothing was written.
    """
    values = table.shape[1] // 2  # number of the first span's values
    for s in spans:
        if table[1, s] >= 0 or table[1, s + values] >= 0:
            return -1
    at = 0
    for s in spans:
        from_key, from_value = table[2, s], table[2, s + values]
        for r in range(table[0, s]):
            to_key, to_value = key[group[at], row[at]], value[group[at], row[at]]
            key_unit, value_unit = step[from_key + r], step[from_value + r]
            key_row, value_row = raw[from_key + r], raw[from_value + r]
            for c in range(len(to_key)):
                to_key[c] = key_unit * np.float32(key_row[c])
                to_value[c] = value_unit * np.float32(value_row[c])
            at += 1
    return 2 * at


@_compiled
def attend(query: Floats, key: Floats, value: Floats, n_context: int, bias: Floats, unseen: Flags) -> Floats:
    """Attention of one token over the rows that it may see; the others are not read.

    Args:
        query: scaled by the factor on q.k [groups, n, d].
        key: rows [groups, at least n_context + T, d], the context's first and the T of the tail from `n_context` on.
        value: likewise [groups, at least n_context + T, d].
        n_context: where the tail begins.
        bias: added to the logits of the context's rows, -inf where a row is not seen [groups, 1 or n, n_context].
        unseen: tail tokens that are not real [groups, T].

    Returns:
        [groups, n, d]; 0 for a query that sees nothing.
    """
    groups, per_group, _ = query.shape
    out = np.zeros((groups, per_group, value.shape[2]), dtype=np.float32)
    for group in range(groups):
        seen = _seen(bias[group], unseen[group], n_context)
        logits = _seen_logits(query[group], key[group], seen, bias[group])
        exponentials(logits)
        for m in range(len(seen)):
            row = value[group, seen[m]]
            for i in range(per_group):
                weight, found = logits[i, m], out[group, i]
                for c in range(len(row)):
                    found[c] += weight * row[c]
        for i in range(per_group):
            out[group, i] /= max(logits[i].sum(), _TINY)
    return out


@_compiled
def _seen(bias: Floats, unseen: Flags, n_context: int) -> Whole:
    """Rows of one group that some query may see: the first by their bias [1 or n, E], then the tail's."""
    n_first = bias.shape[1]
    rows, n = np.empty(n_first + len(unseen), dtype=np.int64), 0
    for r in range(n_first):
        visible = False
        for i in range(len(bias)):
            visible |= bias[i, r] > -np.inf
        if visible:
            rows[n] = r
            n += 1
    for t in range(len(unseen)):
        if not unseen[t]:
            rows[n] = n_context + t
            n += 1
    return rows[:n]


@_compiled
def _seen_logits(query: Floats, key: Floats, seen: Whole, bias: Floats) -> Floats:
    """Logits [n, M] of queries [n, d] and the rows `seen` [M], with the bias of the first rows [1 or n, E]."""
    logits = np.empty((len(query), len(seen)), dtype=np.float32)
    for m in range(len(seen)):
        row = key[seen[m]]
        for i in range(len(query)):
            asked = query[i]
            inner = np.float32(0.0)
            for c in range(len(row)):
                inner += asked[c] * row[c]
            if seen[m] < bias.shape[1]:
                inner += bias[min(i, len(bias) - 1), seen[m]]
            logits[i, m] = inner
    return logits
