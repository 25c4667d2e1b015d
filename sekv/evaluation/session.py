"""An evaluation from the command line: the backbone is loaded, progress shown, results written, drawn and printed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape

from sekv.backbone import load_backbone
from sekv.evaluation.plots import plot_scores
from sekv.evaluation.records import PLOT, Result, paired_differences
from sekv.evaluation.report import answer_progress, diagnosis_table, differences_table, results_table
from sekv.evaluation.runner import Evaluation
from sekv.evaluation.shards import Shard


@dataclass(frozen=True)
class Session:
    """How an evaluation is run.

    Attributes:
        backbone: name, folder or Hub id.
        dtype: as `load_backbone` reads it.
        device: likewise; `auto` gives each process of a machine a device of its own.
        restart: throw away the answers that the folder holds.
    """

    backbone: str
    dtype: str = "auto"
    device: str = "auto"
    restart: bool = False

    def run(self, evaluation: Evaluation, output: Console, errors: Console) -> list[Result] | None:
        """Runs this process's share.

        Args:
            evaluation: planned already.
            output: gets the tables.
            errors: gets progress and what to do after an interrupt.

        Returns:
            The results, or None while other processes are still at work.
        """
        shard = Shard.detect()
        with errors.status(f"loading {escape(self.backbone)}"):
            backbone = load_backbone(self.backbone, self.dtype, self._device(shard))
        with errors.status("preparing the tasks"):
            questions = evaluation.prepare(backbone)
            journal = evaluation.journal(backbone, questions, shard, self.restart)
        mine = evaluation.keys(shard.part(questions))
        done = sum(key in journal.records for key in mine)
        if done:
            untraced = ", those without their zooms" if evaluation.trace else ""
            errors.print(f"{done} of {len(mine)} answers are in {escape(str(evaluation.output))} already{untraced}")
        try:
            with answer_progress(errors) as progress:
                bar = progress.add_task(_label(shard), total=len(mine), completed=done)
                results = evaluation.run(backbone, questions, journal, on_record=lambda _: progress.advance(bar))
        except KeyboardInterrupt:
            errors.print(
                f"every answer so far is kept in {escape(str(evaluation.output))}; run the same command to go on"
            )
            raise
        if results is None:
            errors.print(f"process {shard.rank} of {shard.world} is done; the last one writes the results")
            return None
        plot_scores(results, evaluation.output / PLOT)
        for task in dict.fromkeys(result.task for result in results):
            output.print(results_table(results, task))
        if evaluation.baseline is not None:
            output.print(differences_table(paired_differences(list(journal.records.values()), evaluation.baseline)))
        if evaluation.diagnose:
            output.print(diagnosis_table(journal.records.values()))
        output.print(f"written to {escape(str(evaluation.output))}")
        return results

    def _device(self, shard: Shard) -> str:
        if self.device != "auto" or shard.world == 1 or not torch.cuda.is_available():
            return self.device
        return f"cuda:{shard.local_rank % torch.cuda.device_count()}"


def _label(shard: Shard) -> str:
    return "answers" if shard.world == 1 else f"answers of process {shard.rank} of {shard.world}"
