"""A loss that explodes or is not finite stops the run before it spoils the adapter, and leaves the step for replay."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sekv.budget import Budget
from sekv.errors import DataError
from train import losses
from train.errors import DivergenceError

if TYPE_CHECKING:
    from train.module import SeKVModule

_REMEMBERED = 100  # losses whose median a new one is measured against
_ENOUGH = 20  # of them, before a ratio says anything
_ADAPTER = "adapter."


class DivergenceGuard(Callback):
    """Looks at every loss before its gradient is made, and at every gradient before it is used.

    Args:
        explosion: a loss above this many times the median of the last 100 stops the run; 0 lets any finite one pass.
    """

    def __init__(self, explosion: float) -> None:
        self.explosion = explosion
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._batch: Mapping[str, Tensor] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        """Keeps the batch in sight."""
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Measures the loss.

        Raises:
            DivergenceError: it is not finite, or has exploded; the batch is saved for replay.
        """
        module = cast("SeKVModule", pl_module)
        value = float(loss.detach()) * trainer.accumulate_grad_batches
        usual = median(self._recent) if len(self._recent) >= _ENOUGH else math.inf
        what = None
        if not math.isfinite(value):
            what = "the loss is not finite"
        elif self.explosion and usual > 0 and value > self.explosion * usual:
            what = f"the loss is {value:.4g}, more than {self.explosion:g} times the usual {usual:.4g}"
        if what is not None:
            assert module.last_losses is not None
            parts = ", ".join(f"{name} {part.mean():.4g}" for name, part in module.last_losses.items())
            raise DivergenceError(self._report(trainer, module, f"{what} ({parts})"))
        self._recent.append(value)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Looks at the gradients.

        Raises:
            DivergenceError: names the parameters and the step; the latest batch is saved for replay.
        """
        module = cast("SeKVModule", pl_module)
        named = list(module.adapter.named_parameters())
        broken = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
        if broken:
            what = f"the gradient of {', '.join(broken)} is not finite"
            raise DivergenceError(self._report(trainer, module, what))

    def _report(self, trainer: Trainer, module: SeKVModule, what: str) -> str:
        step, rank = trainer.global_step, f"-rank-{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = Path(trainer.default_root_dir) / f"divergence-step-{step}{rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert module.last_draw is not None
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._batch.items()}
        tensors["cuts"] = module.last_draw.cuts.cpu()
        tensors |= {_ADAPTER + n: t.detach().cpu().contiguous() for n, t in module.adapter.state_dict().items()}
        facts = {
            "step": str(step),
            "budget": str(module.last_draw.budget.share),
            "anneal": str(module.annealing()),
        }
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, metadata=facts)
        temporary.replace(path)
        return (
            f"step {step}: {what}; the batch is in {path}. Look at it with --replay, go on from the last checkpoint "
            "with a lower model.lr, or leave that document out"
        )

    def state_dict(self) -> dict[str, Any]:
        """The recent losses."""
        return {"recent": list(self._recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the recent losses."""
        self._recent.extend(state_dict["recent"])


def replay(module: SeKVModule, path: str | Path) -> dict[str, list[float]]:
    """Computes a saved step again, gradients included.

    Args:
        module: with the settings of the run; its backbone is loaded when it is not there.
        path: a file that the guard left; nothing in it is executed.

    Returns:
        Every loss and figure by document, and the norm of each parameter's gradient under `gradient of NAME`.

    Raises:
        DataError: the file is missing or not such a file.
    """
    from train.module import Draw

    backbone = module.load()
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name).to(backbone.device) for name in file.keys()}  # noqa: SIM118
        draw = Draw(Budget(share=float(facts["budget"])), tensors.pop("cuts"))
        adapter = module.adapter
        adapter.load_state_dict({n.removeprefix(_ADAPTER): t for n, t in tensors.items() if n.startswith(_ADAPTER)})
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a step that this run's settings can replay: {reason}") from None
    outcome = module.evaluate({name: tensors[name] for name in ("input_ids", "attention_mask")}, draw)
    loss = losses.total(outcome.losses, module.loss_config, float(facts["anneal"]))
    adapter.zero_grad()
    loss.mean().backward()
    rows = {"loss": loss, **outcome.losses, **outcome.figures}
    return {
        **{name: value.detach().tolist() for name, value in rows.items()},
        **{f"gradient of {n}": [float(p.grad.norm())] for n, p in adapter.named_parameters() if p.grad is not None},
    }
