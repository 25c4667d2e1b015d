"""What a person sees of a run: lines where there is no terminal, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.table import Table
from torch import Tensor

from train.module import SeKVModule

_SHARE_OF_ENDS = 0.2  # of the steps, averaged into the summary's first and last loss


class ProgressLines(Callback):
    """One line at every logging step, with rates: for log files, where a progress bar cannot be redrawn.

    Args:
        console: where lines go.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._since: float | None = None  # no clock runs before the first batch, nor during validation
        self._tokens = self._steps = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Starts the clock: what lies before the first batch, such as the warm start, is no step."""
        if self._since is None:
            self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Prints when the loggers log."""
        self._steps += 1
        self._tokens += int(batch["attention_mask"].sum())
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        now = time.monotonic()
        seconds = max(now - (now if self._since is None else self._since), 1e-9)
        figures = trainer.callback_metrics
        shown = ("loss", "logits", "attention", "zoom", "expansion", "rank")
        values = "  ".join(f"{n} {figures[f'train/{n}']:.3g}" for n in shown if f"train/{n}" in figures)
        rates = f"{seconds / self._steps:.2f} s/step  {self._tokens / seconds:,.0f} tokens/s"
        left = (int(trainer.estimated_stepping_batches) - trainer.global_step) * seconds / self._steps / 60
        self.console.print(
            f"step {trainer.global_step}/{trainer.estimated_stepping_batches}  {values}  {rates}  {left:.1f} min left",
            highlight=False,
            soft_wrap=True,
        )
        self._since, self._tokens, self._steps = now, 0, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints held-out figures; the time they took does not count as training."""
        if not trainer.sanity_checking:
            figures = {n.removeprefix("val/"): v for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
            values = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
            self.console.print(f"held out after step {trainer.global_step}  {values}", highlight=False, soft_wrap=True)
        self._since, self._tokens, self._steps = None, 0, 0


class ValidateEverySteps(Callback):
    """Validates every so many optimiser steps; Lightning counts batches, of which a step may take several.

    Args:
        steps: optimiser steps between two validations.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._step = 0  # steps made by the end of the last batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that resumes has made some."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Before Lightning looks whether the count of batches is a multiple of `val_check_batch`."""
        due = trainer.global_step != self._step and trainer.global_step % self.steps == 0
        self._step = trainer.global_step
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        trainer.val_check_batch = batches if due else batches + 1


class TrainingBar(RichProgressBar):
    """Lightning's progress bar for runs that count steps, not epochs."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "Training"

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the run: the loader counts one more, so that no epoch ends before the run."""
        return super().total_train_batches - 1

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Losses only, without the loggers' version."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class RunSummary(Callback):
    """Collects the curves of a run, for a table of what came of it.

    Where the sanity check covers all held-out text (`num_sanity_val_steps: -1`), its figures are those before training.
    """

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.held_out: list[dict[str, float]] = []
        self.parameters = ""
        self.warm_start: list[float] = []
        self.warm_start_documents = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what is trained, and the curve of the warm start that begins here."""
        module = cast(SeKVModule, pl_module)
        self.parameters = module.describe_parameters()
        self.warm_start, self.warm_start_documents = module.warm_start_loss, module.warm_start.documents

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Keeps the loss."""
        self.loss.append(float(trainer.callback_metrics["train/loss"]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the held-out figures."""
        if not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf"):
            figures = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
            self.held_out.append(figures)

    def table(self) -> Table:
        """First and last figures; on held-out text, what share of the teacher's span mass each router covers too."""
        table = Table("", "first", "last", title="Training summary", title_justify="left")
        if self.parameters:
            table.add_row(f"trainable parameters {self.parameters}", "", "")
        if self.warm_start:
            n = min(self.warm_start_documents, len(self.warm_start))  # every document counts once in either mean
            first, last = sum(self.warm_start[:n]) / n, sum(self.warm_start[-n:]) / n
            table.add_row(f"warm-start zoom loss (mean over {n} documents)", f"{first:.3f}", f"{last:.3f}")
        if self.loss:
            n = max(1, round(_SHARE_OF_ENDS * len(self.loss)))
            first, last = sum(self.loss[:n]) / n, sum(self.loss[-n:]) / n
            table.add_row(f"end-to-end loss (mean of {n} steps, other documents)", f"{first:.3f}", f"{last:.3f}")
        if self.held_out:
            before, after = self.held_out[0], self.held_out[-1]
            labels = {
                "val/loss": ("held-out loss", "{:.3f}"),
                "val/logits": ("held-out KL to the full cache, nats per token", "{:.3f}"),
                "val/expansion": ("share of spans zoomed into", "{:.1%}"),
                "val/rank": ("effective rank of a span", "{:.1f}"),
                "val/rows": ("rows attended", "{:.0f}"),
                "val/recall_learned": ("teacher's span mass covered by the learned router", "{:.1%}"),
                "val/recall_mean": ("  by the untrained inner product, same rows", "{:.1%}"),
                "val/recall_oracle": ("  by the teacher's own order, same rows", "{:.1%}"),
            }
            for name, (label, form) in labels.items():
                if name in after:
                    table.add_row(label, form.format(before[name]), form.format(after[name]))
        return table
