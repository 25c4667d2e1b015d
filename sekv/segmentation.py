"""Surprisal to anchors and spans: an exact partition of the context (method section 1.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sekv.errors import PolicyError


@dataclass(frozen=True)
class SegmentationConfig:
    """How a context is cut.

    Attributes:
        alpha: a token is an anchor when its surprisal exceeds mean + alpha * standard deviation.
        min_span: spans shorter than this many tokens stay exact.
        max_span: longer spans are split into near-equal pieces, at a line break where one is near. A budget that cannot
            hold one zoomed span of this length beside the summaries gets shorter spans.
        persistent_share: share of the budget that exact rows and summaries may take before any zoom; the anchor
            threshold rises until they fit.
        summary_share: share of the budget for summary rows: neighbouring spans that are not zoomed into are attended to
            as one row, so that spans can be short without their summaries using up the budget. 1 gives every span a
            row of its own.
        sinks: first tokens that stay exact.
        tail: last tokens that stay exact.
        method: `surprisal`, or `fixed` for equal chunks without anchors (ablation).
        anchors: keep anchors exact; False leaves each at the head of the span it opens (ablation).
    """

    alpha: float = 1.0
    min_span: int = 4
    max_span: int = 32
    persistent_share: float = 0.35
    summary_share: float = 0.1
    sinks: int = 4
    tail: int = 32
    method: str = "surprisal"
    anchors: bool = True

    def __post_init__(self) -> None:
        if self.method not in ("surprisal", "fixed"):
            raise PolicyError(f"segmentation '{self.method}' is unknown; use 'surprisal' or 'fixed'")
        # A run one token over max_span is halved, and the halves must not fall below min_span.
        if not 1 <= self.min_span <= (self.max_span + 1) // 2:
            raise PolicyError(
                f"need 1 <= min_span <= (max_span + 1) / 2, got min_span={self.min_span}, max_span={self.max_span}"
            )
        for name in ("persistent_share", "summary_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise PolicyError(f"{name} must be in (0, 1], got {getattr(self, name)}")

    @property
    def merges(self) -> bool:
        """Whether spans that are not zoomed into share rows."""
        return self.summary_share < 1.0

    def summary_rows(self, rows: int, n_spans: int) -> int:
        """Most rows that the summaries of `n_spans` spans take under a budget of `rows`."""
        return min(n_spans, max(1, int(self.summary_share * rows + 1e-6))) if self.merges else n_spans

    def minimum_rows(self, n_tokens: int) -> int:
        """Smallest budget in rows for a context of `n_tokens`: sinks, tail, one summary per span, one zoom."""
        return min(n_tokens, min(self._rows_with(n_tokens, span) for span in self._span_choices()))

    def for_budget(self, n_tokens: int, rows: int) -> SegmentationConfig:
        """This config with the longest spans, up to `max_span`, of which `rows` can hold the summaries and one zoom."""
        fitting = (span for span in self._span_choices() if self._rows_with(n_tokens, span) <= rows)
        return replace(self, max_span=next(fitting, self.max_span))

    def _span_choices(self) -> range:
        return range(self.max_span, max(1, 2 * self.min_span - 1) - 1, -1)

    def _rows_with(self, n_tokens: int, max_span: int) -> int:
        region = max(0, n_tokens - self.sinks - self.tail)
        pieces = max(1, -(-region // max_span))
        exact, longest = self.sinks + self.tail, -(-region // pieces)
        if not self.merges:
            return exact + pieces + max(0, longest - 1)
        # The summaries' share grows with the budget: the smallest that leaves room for one span, from just below it.
        needed = exact + longest
        rows = max(needed + 1, min(needed + pieces, int((needed - 1) / (1 - self.summary_share))))
        while rows - self.summary_rows(rows, pieces) < needed:
            rows += 1
        return rows


@dataclass(frozen=True)
class Segmentation:
    """The partition of a batch of left-padded contexts into exact tokens and spans.

    Dimensions: B batch, E most exact tokens of any row, S most spans of any row (at least 1).

    Attributes:
        exact_index: token indices that stay exact, ascending [B, E]; 0 beyond a row's own count.
        exact_mask: True where `exact_index` is real [B, E].
        span_start: first token index of each span [B, S]; 0 where there is none.
        span_length: tokens of each span [B, S]; 0 where there is none.
        span_row: summary row that stands for each span while it is not zoomed into [B, S], ascending from 0; 0 where
            there is none.
        merged: rows are shared between spans; False gives every span its own.
    """

    exact_index: Tensor
    exact_mask: Tensor
    span_start: Tensor
    span_length: Tensor
    span_row: Tensor
    merged: bool

    @property
    def summary_rows(self) -> Tensor:
        """Summary rows before any zoom [B]."""
        return torch.where((self.span_length > 0).any(1), self.span_row.amax(1) + 1, 0)

    @property
    def persistent_rows(self) -> Tensor:
        """Rows attended to before any zoom: exact tokens and summary rows [B]."""
        return self.exact_mask.sum(1) + self.summary_rows

    @property
    def zoom_cost(self) -> Tensor:
        """Rows that zooming into each span adds [B, S]: its tokens, less its own summary; -1 where there is none."""
        return torch.where(self.span_length > 0, self.span_length - (0 if self.merged else 1), -1)

    def tensors(self) -> list[Tensor]:
        """The live tensors, for byte counts."""
        return [self.exact_index, self.exact_mask, self.span_start, self.span_length, self.span_row]

    def exact_rows(self, x: Tensor) -> Tensor:
        """Rows of the exact tokens [B, K, E, d] from [B, K, N, d]; any row beyond a context's own count."""
        return x.gather(2, self.exact_index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def segment(
    surprisal: Tensor,
    mask: Tensor,
    rows: Tensor,
    config: SegmentationConfig,
    line_breaks: Tensor | None = None,
) -> Segmentation:
    """Cuts each context of a batch into exact tokens and spans.

    Args:
        surprisal: nats [B, N], left-padded.
        mask: True for real tokens [B, N].
        rows: budget of each context in rows [B]; a context that fits is kept exact as a whole.
        config: constants.
        line_breaks: True for tokens that contain a line break [B, N], or None.

    Returns:
        The partition, with indices into the padded axis N.
    """
    n = surprisal.shape[1]
    parts = []
    for i, length in enumerate(mask.sum(1).tolist()):  # rows of a batch have different lengths and budgets
        pad = n - length
        breaks = None if line_breaks is None else line_breaks[i, pad:]
        exact, start, span_length = _segment_row(surprisal[i, pad:], int(rows[i]), config, breaks)
        parts.append((exact + pad, start + pad, span_length))
    result = _padded(parts, surprisal.device)
    if not config.merges:
        return result
    counts = (result.span_length > 0).sum(1).tolist()
    allowed = [config.summary_rows(int(r), n) for r, n in zip(rows, counts, strict=True)]
    return replace(
        result, span_row=shared_rows(result.span_length, result.span_length.new_tensor(allowed)), merged=True
    )


def _padded(parts: list[tuple[Tensor, Tensor, Tensor]], device: torch.device) -> Segmentation:
    """Exact indices, span starts and span lengths of each context as one segmentation."""
    none = torch.zeros(1, dtype=torch.long, device=device)
    exact_index = pad_sequence([e for e, _, _ in parts], batch_first=True)
    counts = torch.tensor([len(e) for e, _, _ in parts], device=device)
    span_length = pad_sequence([x if len(x) else none for _, _, x in parts], batch_first=True)
    span_start = pad_sequence([s if len(s) else none for _, s, _ in parts], batch_first=True)
    return Segmentation(
        exact_index=exact_index,
        exact_mask=torch.arange(exact_index.shape[1], device=counts.device) < counts[:, None],
        span_start=span_start.masked_fill(span_length == 0, 0),
        span_length=span_length,
        span_row=torch.arange(span_length.shape[1], device=device).masked_fill(span_length == 0, 0),
        merged=False,
    )


def shared_rows(length: Tensor, allowed: Tensor) -> Tensor:
    """The summary row of each span [B, S]: runs of spans with about equally many tokens, numbered without gaps.

    Args:
        length: tokens per span [B, S].
        allowed: most rows of each context [B].
    """
    first = length.cumsum(1) - length
    share = first * allowed[:, None] // length.sum(1, keepdim=True).clamp_min(1)
    steps = share.diff(dim=1, prepend=share[:, :1]) > 0
    return steps.cumsum(1).masked_fill(length == 0, 0)


def _segment_row(
    surprisal: Tensor, rows: int, config: SegmentationConfig, line_breaks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact token indices, span starts and span lengths of one unpadded context [N]."""
    n, device = surprisal.shape[0], surprisal.device
    first, last = min(config.sinks, n), max(min(config.sinks, n), n - config.tail)
    empty = torch.empty(0, dtype=torch.long, device=device)
    if n <= rows or first >= last:
        return torch.arange(n, device=device), empty, empty
    config = config.for_budget(n, rows)
    region = surprisal[first:last]
    anchor = _choose_anchors(region, surprisal, rows, config)
    start, length = _runs(anchor, config.anchors)
    short = length < config.min_span
    exact = torch.ones(n, dtype=torch.bool, device=device)
    exact[first:last] = anchor if config.anchors else False
    exact[first:last] |= _covered(start[short], length[short], last - first)
    breaks = None if line_breaks is None else line_breaks[first:last]
    start, length = _split(start[~short], length[~short], config, breaks)
    return exact.nonzero().squeeze(1), start + first, length


def _choose_anchors(region: Tensor, surprisal: Tensor, rows: int, config: SegmentationConfig) -> Tensor:
    """Anchor mask over the region: the most, up to the surprisal rule, whose persistent rows fit their share."""
    if config.method == "fixed":
        return torch.zeros_like(region, dtype=torch.bool)
    rule = surprisal.mean() + config.alpha * surprisal.std(unbiased=False)
    ranked = region.sort(descending=True).values
    high = int((ranked > rule).sum())
    allowed = int(config.persistent_share * rows) - (surprisal.shape[0] - region.shape[0])

    def mask_of(count: int) -> Tensor:
        # Strictly above the next value: ties at the threshold are left out together.
        return region > (ranked[count] if count < len(ranked) else -1.0)

    def fits(count: int) -> bool:
        anchor = mask_of(count)
        _, length = _runs(anchor, config.anchors)
        short = length < config.min_span
        n_spans = int((-(-length // config.max_span))[~short].sum())
        kept = anchor.sum() if config.anchors else 0
        return int(kept + length[short].sum()) + config.summary_rows(rows, n_spans) <= allowed

    # Persistent rows never fall as anchors are added, so the largest count that fits is found by bisection.
    low = 0
    if high == 0 or fits(high):
        return mask_of(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return mask_of(low)


def _runs(anchor: Tensor, exclusive: bool) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the maximal runs between anchors [R].

    With `exclusive` the anchors belong to no run; otherwise each anchor opens one.
    """
    edge = torch.zeros(1, dtype=torch.bool, device=anchor.device)
    if exclusive:
        inside = torch.cat([edge, ~anchor, edge]).int().diff()
        start, end = (inside == 1).nonzero().squeeze(1), (inside == -1).nonzero().squeeze(1)
    else:
        opens = anchor.clone()
        opens[0] = True
        start = opens.nonzero().squeeze(1)
        end = torch.cat([start[1:], start.new_tensor([anchor.shape[0]])])
    return start, end - start


def _covered(start: Tensor, length: Tensor, n: int) -> Tensor:
    """Mask [n] of the tokens inside the given disjoint runs."""
    steps = torch.zeros(n + 1, dtype=torch.long, device=start.device)
    steps.index_add_(0, start, torch.ones_like(start))
    steps.index_add_(0, start + length, -torch.ones_like(start))
    return steps[:n].cumsum(0) > 0


def _split(
    start: Tensor, length: Tensor, config: SegmentationConfig, line_breaks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Splits runs longer than `max_span` into the fewest near-equal pieces, cut after a line break if one is near."""
    pieces = -(-length // config.max_span)
    run = torch.repeat_interleave(torch.arange(len(start), device=start.device), pieces)
    within = torch.arange(len(run), device=start.device) - (pieces.cumsum(0) - pieces)[run]
    cut = start[run] + within * length[run] // pieces[run]
    if line_breaks is not None and len(cut):
        share = length[run] // pieces[run]
        slack = torch.minimum(config.max_span - share - 1, share - config.min_span).clamp_min(0) // 2
        cut = torch.where(within > 0, _nearest_break(cut, slack, line_breaks), cut)
    end = torch.cat([cut[1:], cut.new_zeros(1)])
    last = within == pieces[run] - 1
    end = torch.where(last, (start + length)[run], end[: len(run)])
    return cut, end - cut


def _nearest_break(cut: Tensor, slack: Tensor, line_breaks: Tensor) -> Tensor:
    """Moves each cut to the nearest position right behind a line break within `slack` tokens; else leaves it."""
    n = line_breaks.shape[0]
    position = torch.arange(n + 1, device=cut.device)
    opens = torch.cat(
        [line_breaks.new_zeros(1), line_breaks]
    )  # True where the token before the position breaks the line
    before = torch.where(opens, position, -(n + 1)).cummax(0).values[cut]
    after = torch.where(opens, position, 2 * (n + 1)).flip(0).cummin(0).values.flip(0)[cut]
    near = torch.where(cut - before <= after - cut, before, after)
    return torch.where((near - cut).abs() <= slack, near, cut)


def uniform_pages(mask: Tensor, page: int, sinks: int, tail: int, ends: Tensor | None = None) -> Segmentation:
    """Everything between sinks and tail in spans, whatever it says: pages of equal length, or sentences.

    Args:
        mask: True for real tokens [B, N], padding on the left.
        page: most tokens of a span.
        sinks: first tokens that stay exact.
        tail: last tokens that stay exact.
        ends: True for tokens that end a span wherever it began [B, N]; None cuts by length alone.

    Returns:
        The partition; no token between sinks and tail is exact.
    """
    parts = []
    n = mask.shape[1]
    for i, length in enumerate(mask.sum(1).tolist()):  # rows of a batch have different lengths
        token = torch.arange(n - length, n, device=mask.device)
        first = min(sinks, length)
        last = max(first, length - tail)
        middle = token[first:last]
        exact = torch.cat([token[:first], token[last:]])
        opens = torch.zeros(len(middle), dtype=torch.bool, device=mask.device)
        opens[:1] = True
        if ends is not None and len(middle):
            opens[1:] = ends[i, middle[:-1]]
        begin = torch.where(opens, torch.arange(len(middle), device=mask.device), 0).cummax(0).values
        opens |= (torch.arange(len(middle), device=mask.device) - begin) % page == 0
        start = opens.nonzero().squeeze(1)
        span_length = torch.cat([start[1:], start.new_tensor([len(middle)])])[: len(start)] - start
        parts.append((exact, middle[start], span_length))
    return _padded(parts, mask.device)
