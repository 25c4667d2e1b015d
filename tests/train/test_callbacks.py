"""What is printed of a run, with known numbers."""

from __future__ import annotations

import io
from types import SimpleNamespace

import torch
from rich.console import Console

from train import callbacks
from train.callbacks import ProgressLines, RunSummary


def text_of(printed):
    return " ".join(printed.getvalue().split())


def trainer_at(step, metrics, **extra):
    return SimpleNamespace(
        global_step=step,
        log_every_n_steps=2,
        estimated_stepping_batches=10,
        callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
        sanity_checking=False,
        num_sanity_val_steps=0,
        **extra,
    )


def test_lines_have_true_rates_and_come_at_logging_steps_only(monkeypatch):
    clock = iter([0.0, 8.0])
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: next(clock))
    printed = io.StringIO()
    lines = ProgressLines(Console(file=printed, width=200))
    batch = {"attention_mask": torch.ones(2, 50)}
    lines.on_train_batch_start(trainer_at(0, {}), None, batch, 0)
    lines.on_train_batch_end(trainer_at(1, {"train/loss": 3.0}), None, None, batch, 0)
    lines.on_train_batch_start(trainer_at(1, {}), None, batch, 1)
    assert printed.getvalue() == ""
    lines.on_train_batch_end(trainer_at(2, {"train/loss": 2.5}), None, None, batch, 1)
    # 2 steps and 200 tokens in 8 seconds; 8 steps are left.
    assert text_of(printed) == "step 2/10 loss 2.5 4.00 s/step 25 tokens/s 0.5 min left"


def test_validation_time_does_not_count_as_training(monkeypatch):
    clock = iter([0.0, 100.0, 102.0])
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: next(clock))
    printed = io.StringIO()
    lines = ProgressLines(Console(file=printed, width=200))
    batch = {"attention_mask": torch.ones(1, 10)}
    lines.on_train_batch_start(trainer_at(0, {}), None, batch, 0)
    lines.on_train_batch_end(trainer_at(1, {}), None, None, batch, 0)
    lines.on_validation_end(trainer_at(1, {"val/loss": 1.0, "train/loss": 9.0}), None)
    assert text_of(printed) == "held out after step 1 loss 1"
    lines.on_train_batch_start(trainer_at(1, {}), None, batch, 1)
    lines.on_train_batch_end(trainer_at(2, {}), None, None, batch, 1)
    assert "2.00 s/step" in text_of(printed)


def rows_of(summary):
    columns = [list(column.cells) for column in summary.table().columns]
    return {name.strip(): values for name, *values in zip(*columns, strict=True)}


def test_the_summary_compares_first_and_last():
    summary = RunSummary()
    for step, loss in enumerate([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]):
        summary.on_train_batch_end(trainer_at(step, {"train/loss": loss}), None, None, {}, step)
    for recall in (0.25, 0.5):
        figures = {"val/loss": 2.0, "val/recall_learned": recall, "val/recall_mean": 0.3, "val/rank": 7.25}
        summary.on_validation_end(trainer_at(5, figures), None)
    rows = rows_of(summary)
    assert rows["end-to-end loss (mean of 2 steps, other documents)"] == ["4.500", "0.250"]
    assert rows["teacher's span mass covered by the learned router"] == ["25.0%", "50.0%"]
    assert rows["by the untrained inner product, same rows"] == ["30.0%", "30.0%"]
    assert rows["effective rank of a span"] == ["7.2", "7.2"]
    assert "rows attended" not in rows


def test_what_is_trained_is_in_the_summary():
    summary = RunSummary()
    module = SimpleNamespace(
        describe_parameters=lambda: "560,000 (0.41% of the backbone)",
        warm_start_loss=[],
        warm_start=SimpleNamespace(documents=2),
    )
    summary.on_train_start(trainer_at(0, {}), module)
    assert rows_of(summary) == {"trainable parameters 560,000 (0.41% of the backbone)": ["", ""]}
    module.warm_start_loss += [4.0, 2.0, 1.0, 0.5, 0.3]  # the warm start follows
    assert rows_of(summary)["warm-start zoom loss (mean over 2 documents)"] == ["3.000", "0.400"]


def test_a_whole_sanity_check_is_the_first_figure_and_a_partial_one_is_not():
    for checked, kept in ((2, 0), (float("inf"), 1)):
        summary = RunSummary()
        trainer = trainer_at(0, {"val/loss": 1.0})
        trainer.sanity_checking, trainer.num_sanity_val_steps = True, checked
        summary.on_validation_end(trainer, None)
        assert len(summary.held_out) == kept


def test_a_run_without_steps_has_an_empty_table():
    assert rows_of(RunSummary()) == {}
