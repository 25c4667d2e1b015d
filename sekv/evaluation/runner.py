"""The evaluation loop: one prefill per context, one memory per policy and budget; every answer is kept at once."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from sekv import __version__
from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.errors import BudgetError, DataError, PolicyError
from sekv.evaluation.asking import Asking, Context, Contexts, Question, budget_number
from sekv.evaluation.journal import Journal
from sekv.evaluation.records import Key, Record, Result
from sekv.evaluation.sample import Sample, Task
from sekv.evaluation.shards import WHOLE, Shard
from sekv.evaluation.tasks import parse_tasks
from sekv.generation import memory_ids
from sekv.memory_cache import Memory, adapter_digest
from sekv.policies.base import Policy
from sekv.policies.registry import build_policy
from sekv.prefill import Prefill
from sekv.prompt import split_prompt

OnRecord = Callable[[Record], None]


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate, checked as far as it can be without a backbone. Make one with `Evaluation.plan`.

    Attributes:
        policies: by their specifications, in order.
        tasks: sources of samples.
        budgets: each with every policy.
        output: folder of the results; nothing is written before the first answer.
        adapter: what trained policies use.
        limit: most samples of each task and seed.
        seeds: of generated samples.
        query_aware: compress the question with the context.
        baseline: specification of the policy that the others are compared with, or None.
        cache: folder that keeps contexts once read, and their memories, or None.
        diagnose: find out where SeKV loses the answers that it gets wrong; several more answers for each.
        trace: samples of each task and seed, from the first, whose zooms are kept.
    """

    policies: dict[str, Policy]
    tasks: list[Task]
    budgets: tuple[Budget, ...]
    output: Path
    adapter: SeKVAdapter | None = None
    limit: int | None = None
    seeds: tuple[int, ...] = (0,)
    query_aware: bool = False
    baseline: str | None = None
    cache: Path | None = None
    diagnose: bool = False
    trace: int = 0

    @classmethod
    def plan(
        cls,
        policies: Sequence[str],
        tasks: Sequence[str],
        budgets: Sequence[Budget | str | float | int],
        output: str | Path,
        *,
        adapter: str | Path | SeKVAdapter | None = None,
        limit: int | None = None,
        seeds: Sequence[int] = (0,),
        query_aware: bool = False,
        baseline: str | None = None,
        cache: str | Path | None = None,
        diagnose: bool = False,
        trace: int = 0,
    ) -> Evaluation:
        """Checks every part.

        Args:
            policies: specifications such as `hubkv:keydiff` or `sekv[routing=oracle,max_span=32]`.
            tasks: as `sekv.evaluation.tasks.parse_tasks` reads them.
            budgets: shares of the context or numbers of rows.
            output: folder, new or existing.
            adapter: an exported adapter or its folder.
            limit: most samples of each task and seed, or None.
            seeds: of generated samples; other samples are the same for all and are asked once.
            query_aware: compress the question with the context.
            baseline: one of `policies`, for paired differences, or None.
            cache: folder that keeps contexts once read, for this run and later ones, or None.
            diagnose: find out where SeKV loses the answers that it gets wrong.
            trace: samples of each task and seed, from the first, of which it is kept what policies that choose spans
                zoomed into; answers that are there already get none.

        Raises:
            SeKVError: of the kind that names what is wrong.
        """
        if not policies:
            raise PolicyError("no policy given; give at least one, such as full")
        if not budgets:
            raise BudgetError("no budget given; give at least one, such as 0.1")
        if limit is not None and limit < 1:
            raise DataError(f"limit {limit} leaves no sample; give 1 or more")
        if trace < 0:
            raise DataError(f"trace {trace} is no number of samples; give 0 or more")
        if not seeds:
            raise DataError("no seed given; give at least one, such as 0")
        if baseline is not None and baseline not in policies:
            raise PolicyError(f"the baseline '{baseline}' is not among the policies: {', '.join(policies)}")
        parsed = tuple(dict.fromkeys(Budget.parse(budget) for budget in budgets))
        sources = parse_tasks(tasks)
        folder = _writable(Path(output))
        loaded = SeKVAdapter.from_pretrained(adapter) if isinstance(adapter, (str, Path)) else adapter
        built = {spec: build_policy(spec, adapter=loaded) for spec in policies}
        kept = None if cache is None else Path(cache)
        seeds = tuple(dict.fromkeys(seeds))
        return cls(built, sources, parsed, folder, loaded, limit, seeds, query_aware, baseline, kept, diagnose, trace)

    def prepare(self, backbone: Backbone) -> list[Question]:
        """Fits the evaluation to a backbone: checks the adapter, makes the prompts, tries the budgets on their lengths.

        Raises:
            SeKVError: of the kind that names what is wrong; nothing was read or written yet.
        """
        if self.adapter is not None:
            self.adapter.check_backbone(backbone)
            self.adapter.to(backbone.device)
        questions = list(self._questions(backbone))
        if self.query_aware and any(question.sample.metric == "perplexity" for question in questions):
            raise DataError("ppl asks no question that could be compressed with the context; leave out --query-aware")
        # Every length: the rows that a policy needs grow with the context in steps, a share grows steadily, and a
        # context that is kept whole needs none, so neither the shortest nor the longest stands for the others.
        for n in sorted({len(memory_ids(question.prompt, self.query_aware)) for question in questions}):
            _try_budgets(backbone, n, self.policies.values(), self.budgets)
        return questions

    def _questions(self, backbone: Backbone) -> Iterable[Question]:
        tokenizer = backbone.tokenizer
        if tokenizer is None:
            raise DataError(f"the backbone '{backbone.name}' has no tokenizer, so no task can be read")
        for task in self.tasks:
            for seed in self.seeds if task.seeded else self.seeds[:1]:
                for sample in task.samples(tokenizer, backbone.geometry.max_positions, self.limit, seed):
                    yield _question(backbone, sample, seed)

    @property
    def answers_per_question(self) -> int:
        """Answers that each question asks for: one per policy and budget."""
        return len(self.policies) * len(self.budgets)

    def keys(self, questions: Iterable[Question]) -> list[Key]:
        """The answers that `questions` ask for, in the order in which one process gives them."""
        return [
            question.key(spec, budget) for question in questions for spec in self.policies for budget in self.budgets
        ]

    def settings(self, backbone: Backbone) -> dict[str, Any]:
        """What all answers of a folder must have in common to be compared."""
        return {
            "version": __version__,
            "backbone": backbone.fingerprint(),
            "dtype": str(backbone.model.dtype),
            "adapter": None if self.adapter is None else adapter_digest(self.adapter),
            "query_aware": self.query_aware,
        }

    def journal(
        self, backbone: Backbone, questions: Sequence[Question], shard: Shard = WHOLE, restart: bool = False
    ) -> Journal:
        """The folder's answers so far.

        Raises:
            DataError: the folder holds answers of other settings or to other questions.
        """
        journal = Journal(self.output, self.settings(backbone), shard, restart)
        digests = {(q.sample.task, q.seed, q.sample.index): q.digest for q in questions}
        for key, record in journal.records.items():
            if digests.get(key[:3], record.sample) != record.sample:
                raise DataError(
                    f"{self.output} has an answer to another sample {key.number} of {key.task}: its text or limit was "
                    "another; give another --output, or --restart to throw the answers away"
                )
        return journal

    def run(
        self, backbone: Backbone, questions: Sequence[Question], journal: Journal, on_record: OnRecord | None = None
    ) -> list[Result] | None:
        """Gives the answers that are missing, as far as they are this process's share, and writes the results.

        Args:
            backbone: the one that `prepare` was given.
            questions: from `prepare`.
            journal: from `journal`, with what is there already.
            on_record: called after each new answer.

        Returns:
            One result per task, policy and budget of the folder; None while other processes are still at work.

        Raises:
            BudgetError: a context needs more rows than a budget gives.
        """
        contexts = Contexts(backbone, list(self.policies.values()), self.cache)
        asked = groupby(journal.shard.part(questions), key=lambda one: memory_ids(one.prompt, self.query_aware))
        with journal:
            for ids, group in asked:
                self._answer(contexts.open(ids), list(group), journal, on_record)
        return journal.finish(self.keys(questions), self.baseline)

    def _answer(
        self, context: Context, questions: Sequence[Question], journal: Journal, on_record: OnRecord | None
    ) -> None:
        """Answers questions about one context: each policy and budget compresses it once, one memory at a time."""
        asked = [Asking(question, self.query_aware, context) for question in questions]
        for spec, policy in self.policies.items():
            for budget in self.budgets:
                memory: Memory | None = None
                for asking in asked:
                    key = asking.question.key(spec, budget)
                    if key in journal.records:
                        continue
                    same = (key._replace(budget=budget_number(one)) for one in self.budgets)
                    twin = None if policy.uses_budget else next((k for k in same if k in journal.records), None)
                    trace = None
                    if twin is not None:
                        record = replace(journal.records[twin], budget=key.budget)
                    else:
                        memory = memory or context.memory(policy, budget)
                        traced = asking.question.sample.index < self.trace
                        record, trace = asking.record(key, policy, memory, self.diagnose, traced)
                    journal.add(record, trace)
                    if on_record is not None:
                        on_record(record)


def evaluate(
    backbone: Backbone,
    policies: Sequence[str],
    tasks: Sequence[str],
    budgets: Sequence[Budget | str | float | int],
    output: str | Path,
    *,
    restart: bool = False,
    **options: Any,
) -> list[Result]:
    """Plans, prepares and runs an evaluation in this process; see `Evaluation.plan` for the arguments.

    With `restart` the answers that `output` holds are thrown away; otherwise they are kept and only missing ones given.
    """
    evaluation = Evaluation.plan(policies, tasks, budgets, output, **options)
    questions = evaluation.prepare(backbone)
    results = evaluation.run(backbone, questions, evaluation.journal(backbone, questions, restart=restart))
    assert results is not None
    return results


def _question(backbone: Backbone, sample: Sample, seed: int) -> Question:
    prompt = sample.prompt or split_prompt(
        backbone.tokenizer, sample.context, sample.question, sample.answer_prefix, sample.chat, sample.separator
    )
    positions = backbone.geometry.max_positions
    if sample.max_length is not None:
        positions = min(positions, sample.max_length + sample.max_new_tokens)
    prompt = prompt.fit(positions, sample.max_new_tokens)
    told = [prompt.context_ids, prompt.question_ids, sample.answers, sample.max_new_tokens, sample.metric]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return Question(sample, prompt, seed, digest)


def _try_budgets(backbone: Backbone, n_tokens: int, policies: Iterable[Policy], budgets: Sequence[Budget]) -> None:
    """Prepares every policy for a context of `n_tokens` without reading one: a budget too small is refused at once."""
    ids = torch.zeros(1, n_tokens, dtype=torch.long, device=backbone.device)
    blank = Prefill.blank(backbone, ids, torch.zeros(1, n_tokens, device=backbone.device))
    for policy in policies:
        for budget in budgets:
            if bool((policy.rows(blank, budget) < blank.lengths).any()):
                policy.prepare(blank, budget)


def _writable(folder: Path) -> Path:
    """The folder, if a file can be made in it; asked by making one, because permissions do not tell for root."""
    made = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            reason = next((f"{path} is a file" for path in (folder, *folder.parents) if path.is_file()), reason)
        raise DataError(f"the output folder {folder} cannot be written: {reason}") from None
    finally:
        for path in made:  # from the innermost
            with suppress(OSError):
                path.rmdir()
    return folder
