"""Questions and the contexts they are about: a context is read once and compressed once for all of its questions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.evaluation.diagnosis import can_diagnose, diagnose
from sekv.evaluation.metrics import METRICS
from sekv.evaluation.perplexity import continuation_surprisal
from sekv.evaluation.records import Key, Record
from sekv.evaluation.sample import Sample
from sekv.evaluation.trace import Trace
from sekv.evaluation.zooms import ZoomRecorder
from sekv.generation import Answer, answer, read_context
from sekv.memory_cache import Memory, MemoryCache
from sekv.policies.base import FullPolicy, Policy
from sekv.prefill import Prefill
from sekv.prefill_cache import PrefillCache
from sekv.prompt import Prompt


class Question(NamedTuple):
    """A sample and its prompt, which fits the backbone.

    Attributes:
        sample: as its task made it.
        prompt: its token ids.
        seed: that made the sample.
        digest: of everything that decides what a right answer is.
    """

    sample: Sample
    prompt: Prompt
    seed: int
    digest: str

    def key(self, spec: str, budget: Budget) -> Key:
        """Of its answer under a policy and budget."""
        return Key(self.sample.task, self.seed, self.sample.index, spec, budget_number(budget))


class Contexts:
    """Opens contexts, of which a cache folder keeps what was read and compressed.

    Args:
        backbone: reads them.
        policies: that will compress them; one pass over a context records what all of them need.
        folder: of the cache, or None.
    """

    def __init__(self, backbone: Backbone, policies: Sequence[Policy], folder: Path | None) -> None:
        self.backbone, self.policies = backbone, policies
        self.prefills = None if folder is None else PrefillCache(folder, backbone)
        self.memories = None if folder is None else MemoryCache(folder, backbone)

    def open(self, ids: Sequence[int]) -> Context:
        """A context by its token ids; nothing is read yet."""
        return Context(self, list(ids))

    def read(self, ids: Sequence[int]) -> Prefill:
        """Reads a context, or brings it from the folder."""
        if self.prefills is not None:
            return self.prefills.read(ids, self.policies)
        return read_context(self.backbone, ids, self.policies)


class Context:
    """One context: its prefill is there from the first time that something needs it."""

    def __init__(self, contexts: Contexts, ids: list[int]) -> None:
        self.ids, self.backbone = ids, contexts.backbone
        self._contexts = contexts
        self._read: tuple[Prefill, float] | None = None

    def read(self) -> tuple[Prefill, float]:
        """The prefill, and the seconds it took."""
        if self._read is None:
            start = time.perf_counter()
            made = self._contexts.read(self.ids)
            self._read = made, time.perf_counter() - start
        return self._read

    def memory(self, policy: Policy, budget: Budget) -> Memory:
        """The context compressed, or such a memory from the folder."""
        memories = self._contexts.memories
        if memories is None:
            return Memory.of(*self.read(), policy, budget)
        return memories.get(self.ids, policy, budget, self.read)


class Asking:
    """A question about its context.

    Args:
        question: what is asked.
        query_aware: the question is part of the context.
        context: of `memory_ids` of the question's prompt.
    """

    def __init__(self, question: Question, query_aware: bool, context: Context) -> None:
        self.question, self.query_aware, self.context = question, query_aware, context
        self._question_ids = question.prompt.ids[len(context.ids) :]
        self._full_nll: float | None = None

    def record(
        self, key: Key, policy: Policy, memory: Memory, explain: bool = False, traced: bool = False
    ) -> tuple[Record, Trace | None]:
        """Answers from the context compressed by a policy.

        Args:
            key: of the answer.
            policy: that compressed the context.
            memory: the compressed context.
            explain: find out where an answer that is wrong was lost, if the policy can tell.
            traced: keep what the answer zooms into, if it chooses spans.
        """
        sample = self.question.sample
        recorder = ZoomRecorder() if traced else None
        if sample.metric == "perplexity":
            nll, found = self._surprisal(memory)
            ratio = math.exp(nll - self._reference())
            scores: dict[str, Any] = {"score": 100.0 / ratio, "nll": nll, "ppl_ratio": ratio}
        else:
            found, score = self._ask(memory, recorder)
            scores = {"score": score}
            if explain and score < 100.0 and can_diagnose(policy):
                budget = Budget.parse(key.budget)
                scores["diagnosis"] = diagnose(policy, budget, len(self.context.ids), self._score, score)
        record = Record(
            policy=key.policy,
            task=key.task,
            budget=key.budget,
            query_aware=self.query_aware,
            seed=key.seed,
            index=key.number,
            sample=self.question.digest,
            depth=sample.depth,
            context_tokens=len(self.context.ids),
            truncated=self.question.prompt.truncated,
            question=sample.question,
            answers=sample.answers,
            output=found.text,
            new_tokens=len(found.ids),
            metric=sample.metric,
            rows=found.rows,
            resident_bytes=found.resident_bytes,
            host_bytes=found.host_bytes,
            moved_bytes_per_token=found.moved_bytes_per_token,
            seconds=memory.seconds + found.seconds,
            prefill_seconds=memory.prefill_seconds,
            **scores,
        )
        if recorder is None:
            return record, None
        tokenizer = self.context.backbone.tokenizer
        assert tokenizer is not None  # it made the prompt
        return record, recorder.trace(tokenizer, self.context.ids, self._question_ids, found.ids)

    def _ask(self, memory: Memory, recorder: ZoomRecorder | None = None) -> tuple[Answer, float]:
        """An answer and its score."""
        sample, cache = self.question.sample, memory.cache
        if recorder is not None:
            cache = cache.fork()  # other questions about the memory are not recorded
            recorder.start(cache)
        backbone = self.context.backbone
        found = answer(backbone, cache, self.context.ids, self._question_ids, sample.max_new_tokens)
        return found, METRICS[sample.metric](found.text, sample.answers, sample.classes)

    def _score(self, policy: Policy, budget: Budget) -> float:
        return self._ask(Memory.of(*self.context.read(), policy, budget))[1]

    def _surprisal(self, memory: Memory) -> tuple[float, Answer]:
        return continuation_surprisal(self.context.backbone, memory.cache, self._question_ids)

    def _reference(self) -> float:
        """Mean -log p under the full cache, which every ratio is over."""
        if self._full_nll is None:
            full = Memory.of(*self.context.read(), FullPolicy(), Budget(share=1.0))
            self._full_nll, _ = self._surprisal(full)
        return self._full_nll


def budget_number(budget: Budget) -> float | int:
    """The number that was given: a share at most 1, or rows above 1."""
    return budget.share if budget.share is not None else int(budget.rows or 0)
