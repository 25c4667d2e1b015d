"""The evaluation loop: one prefill per sample, shared by every policy and budget."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.errors import BudgetError, DataError, PolicyError
from sekv.evaluation.metrics import METRICS
from sekv.evaluation.records import RESULTS, Record, Result, SampleWriter
from sekv.evaluation.sample import Sample, Task
from sekv.evaluation.tasks import parse_tasks
from sekv.generation import Answer, ask, memory_ids, read_context
from sekv.policies.base import Policy
from sekv.policies.registry import build_policy
from sekv.prefill import Prefill
from sekv.prompt import Prompt, split_prompt

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
        limit: most samples of each task.
        seed: of generated samples.
        query_aware: compress the question with the context.
    """

    policies: dict[str, Policy]
    tasks: list[Task]
    budgets: tuple[Budget, ...]
    output: Path
    adapter: SeKVAdapter | None = None
    limit: int | None = None
    seed: int = 0
    query_aware: bool = False

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
        seed: int = 0,
        query_aware: bool = False,
    ) -> Evaluation:
        """Checks every part.

        Args:
            policies: specifications such as `hubkv:keydiff` or `sekv[routing=oracle,max_span=32]`.
            tasks: as `sekv.evaluation.tasks.parse_tasks` reads them.
            budgets: shares of the context or numbers of rows.
            output: folder, new or existing.
            adapter: an exported adapter or its folder.
            limit: most samples of each task, or None.
            seed: of generated samples.
            query_aware: compress the question with the context.

        Raises:
            SeKVError: of the kind that names what is wrong.
        """
        if not policies:
            raise PolicyError("no policy given; give at least one, such as full")
        if not budgets:
            raise BudgetError("no budget given; give at least one, such as 0.1")
        if limit is not None and limit < 1:
            raise DataError(f"limit {limit} leaves no sample; give 1 or more")
        parsed = tuple(dict.fromkeys(Budget.parse(budget) for budget in budgets))
        sources = parse_tasks(tasks)
        folder = _writable(Path(output))
        loaded = SeKVAdapter.from_pretrained(adapter) if isinstance(adapter, (str, Path)) else adapter
        built = {spec: build_policy(spec, adapter=loaded) for spec in policies}
        return cls(built, sources, parsed, folder, loaded, limit, seed, query_aware)

    def prepare(self, backbone: Backbone) -> list[Question]:
        """Fits the evaluation to a backbone: checks the adapter, makes the prompts, tries the budgets on their lengths.

        Raises:
            SeKVError: of the kind that names what is wrong; nothing was read or written yet.
        """
        if self.adapter is not None:
            self.adapter.check_backbone(backbone)
            self.adapter.to(backbone.device)
        questions = [_question(backbone, sample) for sample in self._samples(backbone)]
        # Every length: the rows that a policy needs grow with the context in steps, a share grows steadily, and a
        # context that is kept whole needs none, so neither the shortest nor the longest stands for the others.
        for n in sorted({len(memory_ids(question.prompt, self.query_aware)) for question in questions}):
            _try_budgets(backbone, n, self.policies.values(), self.budgets)
        return questions

    def _samples(self, backbone: Backbone) -> list[Sample]:
        if backbone.tokenizer is None:
            raise DataError(f"the backbone '{backbone.name}' has no tokenizer, so no task can be read")
        positions = backbone.geometry.max_positions
        return [
            sample
            for task in self.tasks
            for sample in task.samples(backbone.tokenizer, positions, self.limit, self.seed)
        ]

    @property
    def answers_per_question(self) -> int:
        """Answers that each question asks for: one per policy and budget."""
        return len(self.policies) * len(self.budgets)

    @property
    def has_earlier_results(self) -> bool:
        """The output folder holds the results of an earlier evaluation; `run` replaces them when it is complete."""
        return (self.output / RESULTS).exists()

    def run(self, backbone: Backbone, questions: Sequence[Question], on_record: OnRecord | None = None) -> list[Result]:
        """Answers everything and writes samples.jsonl, results.json and results.csv.

        Args:
            backbone: the one that `prepare` was given.
            questions: from `prepare`.
            on_record: called after each answer.

        Returns:
            One result per task, policy and budget. An interrupted run adds samples.jsonl.partial only, and leaves
            earlier results as they are.

        Raises:
            BudgetError: a context needs more rows than a budget gives.
        """
        writer = SampleWriter(self.output)
        try:
            for question in questions:
                self._run_sample(backbone, question, writer, on_record)
        finally:
            writer.close()
        return writer.finish()

    def _run_sample(
        self, backbone: Backbone, question: Question, writer: SampleWriter, on_record: OnRecord | None
    ) -> None:
        start = time.perf_counter()
        context = read_context(backbone, memory_ids(question.prompt, self.query_aware), list(self.policies.values()))
        prefill_seconds = time.perf_counter() - start
        for spec, policy in self.policies.items():
            record: Record | None = None
            for budget in self.budgets:
                if record is not None and not policy.uses_budget:
                    record = replace(record, budget=budget_number(budget))
                else:
                    found = ask(
                        context,
                        policy,
                        budget,
                        question.prompt,
                        question.sample.max_new_tokens,
                        query_aware=self.query_aware,
                    )
                    record = self._record(spec, budget, question, context, found, prefill_seconds)
                writer.add(record)
                if on_record is not None:
                    on_record(record)

    def _record(
        self, spec: str, budget: Budget, question: Question, context: Prefill, found: Answer, prefill_seconds: float
    ) -> Record:
        sample = question.sample
        return Record(
            policy=spec,
            task=sample.task,
            budget=budget_number(budget),
            query_aware=self.query_aware,
            index=sample.index,
            depth=sample.depth,
            context_tokens=context.n_tokens,
            truncated=question.prompt.truncated,
            question=sample.question,
            answers=sample.answers,
            output=found.text,
            new_tokens=len(found.ids),
            score=METRICS[sample.metric](found.text, sample.answers),
            rows=found.rows,
            resident_bytes=found.resident_bytes,
            host_bytes=found.host_bytes,
            moved_bytes_per_token=found.moved_bytes_per_token,
            seconds=found.seconds,
            prefill_seconds=prefill_seconds,
        )


def evaluate(
    backbone: Backbone,
    policies: Sequence[str],
    tasks: Sequence[str],
    budgets: Sequence[Budget | str | float | int],
    output: str | Path,
    *,
    adapter: str | Path | SeKVAdapter | None = None,
    limit: int | None = None,
    seed: int = 0,
    query_aware: bool = False,
) -> list[Result]:
    """Plans, prepares and runs an evaluation; see `Evaluation.plan` for the arguments."""
    evaluation = Evaluation.plan(
        policies, tasks, budgets, output, adapter=adapter, limit=limit, seed=seed, query_aware=query_aware
    )
    return evaluation.run(backbone, evaluation.prepare(backbone))


class Question(NamedTuple):
    """A sample and its prompt, which fits the backbone."""

    sample: Sample
    prompt: Prompt


def budget_number(budget: Budget) -> float | int:
    """The number that was given: a share at most 1, or rows above 1."""
    return budget.share if budget.share is not None else int(budget.rows or 0)


def _question(backbone: Backbone, sample: Sample) -> Question:
    prompt = split_prompt(backbone.tokenizer, sample.context, sample.question, sample.answer_prefix)
    return Question(sample, prompt.fit(backbone.geometry.max_positions, sample.max_new_tokens))


def _try_budgets(backbone: Backbone, n_tokens: int, policies: Iterable[Policy], budgets: Sequence[Budget]) -> None:
    """Prepares every policy for a context of `n_tokens` without reading one: a budget too small is refused at once."""
    ids = torch.zeros(1, n_tokens, dtype=torch.long, device=backbone.device)
    layers = backbone.geometry.num_layers
    blank = Prefill(
        backbone=backbone,
        keys=[None] * layers,
        values=[None] * layers,
        queries=[None] * layers,
        hidden=None,
        surprisal=torch.zeros(1, n_tokens, device=backbone.device),
        input_ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        native={},
    )
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
