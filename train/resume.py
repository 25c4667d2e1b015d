"""What a run needs besides weights, optimiser and schedule to go on as if it had never stopped."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from train.data import TextDataModule


class RunState(Callback):
    """Random states, gradients of a step that is only half accumulated, and a checkpoint when the run is terminated.

    Where several processes save, each contributes the mean of the gradients, so all must save together.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._restored: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remembers the trainer."""
        self._trainer = trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restores at the last moment: making the loaders draws random numbers."""
        state, self._restored = self._restored, None
        if state is None:
            return
        # The loggers' step. Lightning takes every checkpoint for one saved within a step, and so counts one too many.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        torch.set_rng_state(state["torch"].cpu())
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
        kind, words, gauss = state["python"]
        random.setstate((kind, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - what libraries draw from
        named = dict(pl_module.named_parameters())
        for parameter, gradient in state["gradients"].items():
            named[parameter].grad = gradient.to(named[parameter])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves on SIGTERM: Lightning raises it between two batches, on all processes."""
        if isinstance(exception, SIGTERMException):
            saver = next((c for c in trainer.checkpoint_callbacks if getattr(c, "filename", None) == "last"), None)
            folder = getattr(saver, "dirpath", None) or trainer.default_root_dir
            trainer.save_checkpoint(Path(folder) / "last.ckpt")

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        kind, words, gauss = random.getstate()
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": [kind, list(words), gauss],
            "numpy": [name, torch.from_numpy(cast(Any, keys).astype(np.int64)), *rest],
            "gradients": self._gradients(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the first batch."""
        self._restored = state_dict

    def _gradients(self) -> dict[str, Tensor]:
        """Of the batches since the last optimiser step; none where a step has just been made."""
        trainer = self._trainer
        if trainer is None or not trainer.fit_loop.epoch_loop.batch_progress.current.ready % (
            trainer.accumulate_grad_batches
        ):
            return {}
        named = trainer.lightning_module.named_parameters()
        kept = {n: p.grad.detach() for n, p in named if p.requires_grad and p.grad is not None}
        return {n: cast(Tensor, trainer.strategy.reduce(g.clone(), reduce_op="mean")) for n, g in kept.items()}


class LengthCurriculum(Callback):
    """Sets how many batches make an optimiser step, stage by stage, and says when a stage begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For a resumed run, whose first batch may be in a later stage."""
        self._set(trainer, pl_module, trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the batch is counted towards a step."""
        self._set(trainer, pl_module, trainer.fit_loop.epoch_loop.total_batch_idx)

    def _set(self, trainer: Trainer, pl_module: LightningModule, batch: int) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if not isinstance(datamodule, TextDataModule) or not datamodule.later:
            return
        stage = datamodule.curriculum.at_batch(batch)
        trainer.accumulate_grad_batches = stage.accumulate
        if batch == datamodule.curriculum.batches_before(stage.step):
            pl_module.print(
                f"stage of {stage.length} tokens from step {stage.step} on: {stage.batch_size} sequences per batch and "
                f"process, {stage.accumulate} batches per step"
            )


class DataReport(Callback):
    """Logs what of the data could not be used, and says it at the end."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With the losses."""
        if isinstance(datamodule := getattr(trainer, "datamodule", None), TextDataModule):
            tally = datamodule.tally
            counts = {"corrupt": tally.corrupt, "textless": tally.textless, "files_unreadable": len(tally.files)}
            pl_module.log_dict({f"data/{name}": float(value) for name, value in counts.items()}, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One line."""
        if isinstance(datamodule := getattr(trainer, "datamodule", None), TextDataModule):
            pl_module.print(datamodule.tally.describe())


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: a run killed while saving leaves the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves to `path`."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        try:
            torch.save(checkpoint, temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
