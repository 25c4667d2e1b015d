"""What an evaluation says: one record per answer, one result per policy, task and budget."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sekv.evaluation.statistics import bootstrap_interval, standard_error

PLOT = "scores.png"


class Key(NamedTuple):
    """What tells one answer from all others of a folder."""

    task: str
    seed: int
    number: int
    policy: str
    budget: float | int


@dataclass(frozen=True)
class Record:
    """One answer.

    Attributes:
        policy: specification of the policy, as given.
        task: name of the task.
        budget: share of the context (at most 1) or number of rows, as given.
        query_aware: the question was compressed with the context.
        seed: of the task's samples.
        index: number of the sample within its task.
        sample: digest of the prompt, the expected answers and the metric.
        depth: where the needle lies in percent, or None.
        context_tokens: tokens that were compressed.
        truncated: tokens taken out of the middle of the context to fit the backbone.
        question: what was asked.
        answers: what was expected.
        output: what the model wrote.
        new_tokens: tokens it wrote.
        metric: name of the score.
        score: 0 to 100; for `perplexity` 100 over `ppl_ratio`.
        rows: mean context rows attended per query, layer and KV head.
        resident_bytes: of the compressed context on the compute tier.
        host_bytes: of the compressed context on the host tier.
        moved_bytes_per_token: from the host, per token read or written after the context.
        seconds: compression, which all questions about a context share, and answer; a memory that comes from a cache
            counts with the time it took to make.
        prefill_seconds: reading the context, once for all policies and budgets, or bringing it from a cache.
        nll: mean -log p of the continuation's tokens in nats, for `perplexity`.
        ppl_ratio: perplexity over that of the full cache, for `perplexity`.
        diagnosis: where a failed answer was lost, one of `sekv.evaluation.diagnosis.CAUSES`; None when not asked for.
    """

    policy: str
    task: str
    budget: float | int
    query_aware: bool
    seed: int
    index: int
    sample: str
    depth: float | None
    context_tokens: int
    truncated: int
    question: str
    answers: tuple[str, ...]
    output: str
    new_tokens: int
    metric: str
    score: float
    rows: float
    resident_bytes: int
    host_bytes: int
    moved_bytes_per_token: float
    seconds: float
    prefill_seconds: float
    nll: float | None = None
    ppl_ratio: float | None = None
    diagnosis: str | None = None

    @property
    def key(self) -> Key:
        """Its place among the answers of an evaluation."""
        return Key(self.task, self.seed, self.index, self.policy, self.budget)


@dataclass(frozen=True)
class Result:
    """Means over the samples of one policy, task and budget; see `Record` for the units.

    Attributes:
        n: samples, over all seeds.
        score_stderr: standard error of `score`.
        score_low: lower end of the 95% bootstrap interval of `score`.
        score_high: its upper end.
        truncated: samples whose context was shortened to fit the backbone.
        context_tokens: mean tokens that were compressed.
        perplexity: over all continuations, or None for other metrics.
        ppl_ratio: geometric mean over the samples, or None.
    """

    policy: str
    task: str
    budget: float | int
    query_aware: bool
    n: int
    score: float
    score_stderr: float
    score_low: float
    score_high: float
    rows: float
    resident_bytes: float
    host_bytes: float
    moved_bytes_per_token: float
    seconds: float
    truncated: int
    context_tokens: float
    perplexity: float | None = None
    ppl_ratio: float | None = None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Result:
        """Summarises the records of one policy, task and budget."""
        scores = [record.score for record in records]
        low, high = bootstrap_interval(scores)
        nats = [record.nll for record in records if record.nll is not None]
        ratios = [record.ppl_ratio for record in records if record.ppl_ratio is not None]
        return cls(
            policy=records[0].policy,
            task=records[0].task,
            budget=records[0].budget,
            query_aware=records[0].query_aware,
            n=len(records),
            score=fmean(scores),
            score_stderr=standard_error(scores),
            score_low=low,
            score_high=high,
            rows=fmean(record.rows for record in records),
            resident_bytes=fmean(record.resident_bytes for record in records),
            host_bytes=fmean(record.host_bytes for record in records),
            moved_bytes_per_token=fmean(record.moved_bytes_per_token for record in records),
            seconds=fmean(record.seconds for record in records),
            truncated=sum(record.truncated > 0 for record in records),
            context_tokens=fmean(record.context_tokens for record in records),
            perplexity=math.exp(fmean(nats)) if nats else None,
            ppl_ratio=math.exp(fmean(map(math.log, ratios))) if ratios else None,
        )


def summarise(records: Sequence[Record]) -> list[Result]:
    """One result per task, policy and budget, in the order of their first records."""
    groups: dict[tuple[str, str, float | int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.policy, record.budget), []).append(record)
    return [Result.of(group) for group in groups.values()]


@dataclass(frozen=True)
class Difference:
    """A policy against the baseline on the very same samples.

    Attributes:
        policy: the policy compared.
        baseline: what it is compared with, at the same budget.
        task: name of the task.
        budget: as given.
        n: samples that both answered.
        difference: mean of score minus the baseline's score.
        low: lower end of its 95% bootstrap interval, resampled over pairs.
        high: its upper end.
        wins: samples on which the policy scored higher.
        losses: samples on which it scored lower.
    """

    policy: str
    baseline: str
    task: str
    budget: float | int
    n: int
    difference: float
    low: float
    high: float
    wins: int
    losses: int


def paired_differences(records: Sequence[Record], baseline: str) -> list[Difference]:
    """Every other policy against `baseline`, per task and budget, where they share samples."""
    base = {record.key: record.score for record in records if record.policy == baseline}
    groups: dict[tuple[str, str, float | int], list[float]] = {}
    for record in records:
        other = base.get(record.key._replace(policy=baseline))
        if record.policy != baseline and other is not None:
            groups.setdefault((record.policy, record.task, record.budget), []).append(record.score - other)
    return [
        Difference(
            policy,
            baseline,
            task,
            budget,
            len(deltas),
            fmean(deltas),
            *bootstrap_interval(deltas),
            wins=sum(delta > 0 for delta in deltas),
            losses=sum(delta < 0 for delta in deltas),
        )
        for (policy, task, budget), deltas in groups.items()
    ]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that replaces it when the block ends well, and is removed when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
