"""Where a router zooms: a picture of all layers and heads at every validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from sekv.evaluation.records import replacing
from train.recall import ASKED, ZOOMED

_INCHES_PER_HEAD, _INCHES_PER_LAYER = 0.16, 0.16
_LEAST, _MOST = 2.6, 8.0  # inches of a panel's side


class ZoomHeatmaps(Callback):
    """Draws `zoom-step-N.png` after every validation, and hands it to wandb.

    The module's `validation_step` returns the rates of its documents.

    Args:
        folder: where pictures go; made with the first one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets what an earlier validation left."""
        self._sums, self._count = {}, 0

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Adds up the documents' rates."""
        rates: Mapping[str, Tensor] = outputs
        self._sums = {name: rate.sum(dim=0) + self._sums.get(name, 0.0) for name, rate in rates.items()}
        self._count += len(rates[ASKED])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the mean over all documents of all processes."""
        if not self._sums or (trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf")):
            return
        count = trainer.strategy.reduce(torch.tensor(float(self._count), device=pl_module.device), reduce_op="sum")
        rates = {
            name: (trainer.strategy.reduce(total, reduce_op="sum") / count).cpu() for name, total in self._sums.items()
        }
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        path = self.folder / f"zoom-step-{step:06d}.png"
        self.folder.mkdir(parents=True, exist_ok=True)
        draw_zoom(rates, f"Zooming on held-out text after step {step}", path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("val/zoom_heatmap", [str(path)], step=step)


def draw_zoom(rates: Mapping[str, Tensor], title: str, path: Path) -> None:
    """Two panels, layers downwards and heads across, one colour scale for each.

    Args:
        rates: from `zoom_rates`, averaged over documents [L, heads].
        title: over both panels.
        path: a .png file; replaced at once or not at all.
    """
    asked, zoomed = rates[ASKED], rates[ZOOMED]
    layers, heads = asked.shape
    grouped = zoomed.shape[1] < heads
    width, height = _side(heads, _INCHES_PER_HEAD), _side(layers, _INCHES_PER_LAYER)
    narrow = _side(zoomed.shape[1], _INCHES_PER_HEAD)
    figure = Figure(figsize=(width + narrow + 2.6, height + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(width, narrow))
    _panel(figure, left, asked, "asked for by each query head", "query head")
    _panel(figure, right, zoomed, "zoomed into, within the budget", "KV head" if grouped else "query head")
    left.set_ylabel("layer")
    figure.suptitle(title, fontsize="large")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _side(cells: int, inches: float) -> float:
    return min(_MOST, max(_LEAST, cells * inches))


def _panel(figure: Figure, panel: Axes, rate: Tensor, title: str, heads: str) -> None:
    image = panel.imshow(100.0 * rate.float().numpy(), aspect="auto", cmap="viridis", vmin=0.0, interpolation="nearest")
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel(heads)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=panel, label="share of spans (%)")
