"""The Lightning module: a frozen backbone, an adapter that learns, and the losses between them (method section 1.6)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import DEFAULT_BACKBONE, Backbone, compare_fingerprints, load_backbone
from sekv.budget import Budget
from sekv.errors import AdapterError, BudgetError, DataError
from train import losses
from train.data import TextDataModule
from train.divergence import DivergenceGuard
from train.errors import ConfigError
from train.examples import read_example
from train.losses import LossConfig
from train.objective import MiningConfig, Outcome, evaluate_batch
from train.parallel import shard_backbone
from train.resume import DataReport, LengthCurriculum, RunState
from train.retrieval import retrieval_sequence
from train.warmstart import WarmStartConfig, fit_routers
from train.windows import cut_documents, draw_cuts, smallest_context

_REPORT_EVERY = 100  # steps of the warm start between two lines
ADAPTER_KEY = "sekv"  # where a checkpoint keeps what an export needs besides the weights


@dataclass(frozen=True)
class Draw:
    """The random choices of one step.

    Attributes:
        budget: rows for the contexts.
        cuts: context tokens of each document [B].
    """

    budget: Budget
    cuts: Tensor


class SeKVModule(LightningModule):
    """Trains a SeKV adapter over a frozen backbone. A checkpoint holds the adapter, never the backbone.

    Args:
        backbone: `smollm2-135m` (the embedded default), a folder, or a Hub id.
        dtype: float32, bfloat16, float16 or auto, for the backbone; the adapter is float32.
        adapter: what is trained; every ablation is a value here.
        losses: weights and constants of the four losses.
        mining: which window queries the losses look at.
        warm_start: fitting of the routers to the teacher's own queries before the first step.
        train_router: False leaves the routers as they are made, with neither warm start nor gradient; only the rank
            gate learns (ablation).
        budgets: shares of the context, one drawn at every step; the smallest decides how long documents must be.
        val_budget: share of the context used in validation.
        query_window: tokens behind the context that query the memory, Q.
        lr: peak learning rate of AdamW.
        weight_decay: of AdamW.
        warmup: share of the steps with a rising learning rate; a cosine follows.
        explosion: a loss above this many times the median of the last 100 stops the run; 0 lets any finite one pass.
        checkpoint_attention: compute each layer's attention again in the backward pass instead of keeping it: less
            memory for a longer step.
        shard: deal the backbone's layers to all processes (FSDP), for one that is larger than a device.
        seed: of cut points and budgets.
    """

    adapter: SeKVAdapter

    def __init__(
        self,
        backbone: str = DEFAULT_BACKBONE,
        dtype: str = "auto",
        adapter: SeKVConfig = SeKVConfig(),
        losses: LossConfig = LossConfig(),
        mining: MiningConfig = MiningConfig(),
        warm_start: WarmStartConfig = WarmStartConfig(),
        train_router: bool = True,
        budgets: tuple[float, ...] = (0.1, 0.15, 0.2),
        val_budget: float = 0.1,
        query_window: int = 128,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup: float = 0.1,
        explosion: float = 20.0,
        checkpoint_attention: bool = False,
        shard: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # A checkpoint keeps plain values only, so on reloading the groups arrive as dictionaries.
        self.adapter_config = _group(SeKVConfig, adapter)
        self.loss_config = _group(LossConfig, losses)
        self.mining = _group(MiningConfig, mining)
        self.warm_start = _group(WarmStartConfig, warm_start)
        self.save_hyperparameters(
            {
                "backbone": backbone,
                "dtype": dtype,
                "adapter": asdict(self.adapter_config),
                "losses": asdict(self.loss_config),
                "mining": asdict(self.mining),
                "warm_start": asdict(self.warm_start),
                "train_router": train_router,
                "budgets": list(budgets),
                "val_budget": val_budget,
                "query_window": query_window,
                "lr": lr,
                "weight_decay": weight_decay,
                "warmup": warmup,
                "explosion": explosion,
                "checkpoint_attention": checkpoint_attention,
                "shard": shard,
                "seed": seed,
            }
        )
        if self.loss_config.labels == "share" and self.adapter_config.index != "tokens":
            raise ConfigError(
                "model.losses.labels=share needs shares, which only model.adapter.index=tokens gives; use mass or cover"
            )
        if not budgets:
            raise BudgetError("model.budgets is empty; give at least one share of the context, such as 0.1")
        self.budgets = [_share(budget, "model.budgets") for budget in budgets]
        self.val_budget = _share(val_budget, "model.val_budget")
        if query_window < 1:
            raise ConfigError(f"model.query_window must be at least 1 token, got {query_window}")
        if not 0 <= warmup < 1:
            raise ConfigError(f"model.warmup is a share of the steps in [0, 1), got {warmup}")
        if not 0 < lr < math.inf:
            raise ConfigError(f"model.lr must be a number above 0, got {lr}")
        if not 0 <= weight_decay < math.inf:
            raise ConfigError(f"model.weight_decay must be 0 or more, got {weight_decay}")
        if not 0 <= explosion < math.inf:
            raise ConfigError(f"model.explosion must be 0 or more, got {explosion}")
        self.train_router = train_router
        self.explosion, self.checkpoint_attention, self.shard = explosion, checkpoint_attention, shard
        self.query_window, self.lr, self.weight_decay, self.warmup, self.seed = (
            query_window,
            lr,
            weight_decay,
            warmup,
            seed,
        )
        self.data_settings: dict[str, Any] = {}  # where the documents come from, for the model card
        self.warm_start_loss: list[float] = []  # of every step of this run's warm start
        self.backbone: Backbone | None = None  # not a torch module, so it enters neither parameters nor checkpoints
        self.last_draw: Draw | None = None  # of the latest training step, with its losses per document
        self.last_losses: dict[str, Tensor] | None = None
        self._sharded = False

    def configure_callbacks(self) -> list[Callback]:
        """What every run has, whoever makes the trainer."""
        return [DivergenceGuard(self.explosion), RunState(), LengthCurriculum(), DataReport()]

    def setup(self, stage: str) -> None:
        """Refuses documents too short for the budgets, before any weights load.

        Raises:
            DataError: names the length that is needed.
        """
        if isinstance(datamodule := getattr(self.trainer, "datamodule", None), TextDataModule):
            self.check_documents(datamodule)

    def check_documents(self, datamodule: TextDataModule) -> None:
        """Refuses documents too short for the budgets or, once the backbone is there, too long for it.

        Raises:
            DataError: names the length that is needed.
        """
        least = min(stage.min_length for stage in datamodule.curriculum.stages)
        longest = datamodule.longest
        if self.backbone is not None and longest > self.backbone.geometry.max_positions:
            raise DataError(
                f"data.length is {longest} tokens, but {self.backbone.name} takes at most "
                f"{self.backbone.geometry.max_positions}; lower data.length or data.curriculum"
            )
        for budget in (*self.budgets, self.val_budget):
            needed = self._smallest_context(budget, longest) + self.query_window
            if needed > least:
                raise DataError(
                    f"a budget of {budget} needs documents of at least {needed} tokens ({self.query_window} of "
                    f"them the query window), but data.min_length is {least}; raise data.min_length or the budget"
                )

    def configure_model(self) -> None:
        """Loads the backbone and makes the adapter, once.

        Raises:
            DataError: documents are longer than the backbone's positions.
            ConfigError: the backbone is to be dealt to several processes, and there is one.
        """
        attached = self._trainer is not None
        self.load(str(self.trainer.strategy.root_device) if attached else "auto")
        if attached and isinstance(datamodule := getattr(self.trainer, "datamodule", None), TextDataModule):
            self.check_documents(datamodule)
        if attached and self.shard and not self._sharded:
            device = self.trainer.strategy.root_device
            shard_backbone(cast(Backbone, self.backbone), device)
            self.adapter.to(device)
            self._sharded = True

    def load(self, device: str = "auto") -> Backbone:
        """The backbone and, in `adapter`, a fresh adapter over it; both are made at the first call."""
        if self.backbone is None:
            where = "cpu" if self.shard else device
            self.backbone = load_backbone(self.hparams["backbone"], dtype=self.hparams["dtype"], device=where)
        if not hasattr(self, "adapter"):
            with torch.random.fork_rng(devices=[]):  # the start depends on the seed, not on what drew numbers before
                torch.manual_seed(self.seed)
                self.adapter = SeKVAdapter.create(self.backbone, self.adapter_config)
            if not self.train_router:
                self.adapter.requires_grad_(False).gate.requires_grad_(True)
        return self.backbone

    def describe_parameters(self) -> str:
        """How many parameters are trained, and their share of the backbone."""
        count = sum(p.numel() for p in self._trained())
        whole = self.adapter.backbone_parameters
        return f"{count:,}" + (f" ({count / whole:.2%} of the backbone)" if whole else "")

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.adapter.parameters() if p.requires_grad]

    def on_train_start(self) -> None:
        """Fits the routers to the teacher before the first step of a fresh run; a resumed run has them already."""
        self.print(f"trainable parameters: {self.describe_parameters()}")
        wanted = self.warm_start.documents + self.warm_start.retrieval
        if self.train_router and wanted and not self.global_step:
            self._fit_routers()

    def _fit_routers(self) -> None:
        backbone, datamodule = cast(Backbone, self.backbone), cast(Any, self.trainer).datamodule
        count = self.warm_start.documents + self.warm_start.retrieval
        sequences = datamodule.warm_start_sequences(count)
        documents = [(ids, self.query_window) for ids in sequences[: self.warm_start.documents]]
        rng = random.Random(self.seed)
        limit = backbone.geometry.max_positions
        smallest = self._smallest_context(self.val_budget, limit)
        documents += [
            retrieval_sequence(datamodule.tokenizer, ids, rng, smallest, limit)
            for ids in sequences[self.warm_start.documents :]
        ]
        started = time.monotonic()
        examples = []
        for i, (ids, window) in enumerate(documents, start=1):
            batch = torch.as_tensor(ids, dtype=torch.long, device=backbone.device)[None]
            examples.append(
                read_example(
                    backbone,
                    self.adapter,
                    batch,
                    window=window,
                    budget=self.val_budget,
                    mining=self.mining,
                )
            )
            self.print(f"warm start: read document {i}/{len(documents)}, {(time.monotonic() - started) / i:.1f} s each")
        started = time.monotonic()

        def report(step: int, loss: float) -> None:
            self.warm_start_loss.append(loss)
            done, steps = step + 1, self.warm_start.steps
            if done % _REPORT_EVERY == 0 or done == steps:
                rate = done / max(time.monotonic() - started, 1e-9)
                self.print(f"warm start: step {done}/{steps}, zoom loss {loss:.4f}, {rate:.1f} steps/s")

        fit_routers(self.adapter, examples, self.warm_start, self.loss_config, report)
        if self.trainer.world_size > 1:  # equal but for rounding, which on accelerators may differ
            for parameter in self.adapter.parameters():
                torch.distributed.broadcast(parameter.data, src=0)

    def evaluate(self, batch: Mapping[str, Tensor], draw: Draw, recall: bool = False) -> Outcome:
        """Losses and figures of a batch under given random choices.

        Args:
            batch: `input_ids` and `attention_mask` [B, N].
            draw: budget and cuts.
            recall: measure the routers too.
        """
        backbone = cast(Backbone, self.backbone)
        ids, mask = cut_documents(batch["input_ids"], batch["attention_mask"].bool(), draw.cuts, self.query_window)
        return evaluate_batch(
            backbone,
            self.adapter,
            ids,
            mask,
            window=self.query_window,
            budget=draw.budget,
            mining=self.mining,
            config=self.loss_config,
            recall=recall,
            checkpoint=self.checkpoint_attention,
        )

    def annealing(self) -> float:
        """Factor on the budget loss at this step."""
        return losses.annealing(self.global_step, self._total_steps)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The mean objective of the batch's documents."""
        draw = self.last_draw = self._draw(batch)
        outcome = self.evaluate(batch, draw)
        self.last_losses = {name: value.detach() for name, value in outcome.losses.items()}
        anneal = self.annealing()
        loss = losses.total(outcome.losses, self.loss_config, anneal).mean()
        size = len(draw.cuts)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        self.log("train/anneal", anneal, batch_size=size)
        self.log_dict(_means("train", outcome), batch_size=size)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Losses, and the recall of each router, with the whole document but its last tokens as context.

        Returns:
            How often each layer and head zooms, each [B, L, heads].
        """
        lengths = batch["attention_mask"].sum(dim=1)
        outcome = self.evaluate(batch, Draw(self.val_budget, lengths - self.query_window), recall=True)
        loss = losses.total(outcome.losses, self.loss_config, anneal=1.0).mean()
        size = len(lengths)
        self.log("val/loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log_dict(_means("val", outcome), batch_size=size, sync_dist=True)
        return outcome.maps

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up and a cosine to zero over all steps."""
        optimizer = torch.optim.AdamW(self._trained(), lr=self.lr, weight_decay=self.weight_decay)
        steps = self._total_steps
        schedule = get_cosine_schedule_with_warmup(optimizer, round(self.warmup * steps), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what an export needs without the backbone: plain values only."""
        checkpoint[ADAPTER_KEY] = {
            "config": asdict(self.adapter_config),
            "fingerprint": self.adapter.fingerprint,
            "backbone_parameters": self.adapter.backbone_parameters,
            "data": self.data_settings,
            "metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to continue over another backbone or another adapter.

        Raises:
            AdapterError: names the differences.
        """
        self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another backbone, of other adapter settings, or of other trained parts.

        Raises:
            AdapterError: names the differences.
        """
        saved = checkpoint.get(ADAPTER_KEY)
        if saved is None:
            raise AdapterError(f"the checkpoint has no part '{ADAPTER_KEY}': it was not written by this trainer")
        now = {"train_router": self.train_router, **asdict(self.adapter_config)}
        then = {
            "train_router": checkpoint["hyper_parameters"].get("train_router", True),
            **asdict(SeKVConfig(**saved["config"])),
        }
        changed = [f"{name} was {then[name]} and is {value}" for name, value in now.items() if value != then[name]]
        if changed:
            raise AdapterError(
                f"the checkpoint was trained with other settings: {'; '.join(changed)}. Give the settings of its run, "
                "which are in its config.yaml"
            )
        backbone = cast(Backbone, self.backbone)
        differences = compare_fingerprints(saved["fingerprint"], backbone.fingerprint())
        if differences:
            raise AdapterError(
                f"the checkpoint was trained over another backbone than {backbone.name}: {'; '.join(differences)}"
            )

    @property
    def _total_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ConfigError("the length of training is unknown; set trainer.max_steps")
        return int(steps)

    def _draw(self, batch: Mapping[str, Tensor]) -> Draw:
        """Budget and cut points of a step.

        They depend on the seed and the count of batches only, so a resumed run draws what an uninterrupted one would;
        and the documents of all ranks are drawn for together, so that splitting a batch over ranks changes nothing.
        """
        lengths = batch["attention_mask"].sum(dim=1)
        count, rank, world = len(lengths), self.global_rank, self.trainer.world_size
        generator = torch.Generator().manual_seed(
            self.seed * 1_000_003 + self.trainer.fit_loop.epoch_loop.total_batch_idx
        )
        budget = self.budgets[int(torch.randint(len(self.budgets), (), generator=generator))]
        position = torch.rand(count * world, generator=generator)[rank::world]
        limit = cast(Backbone, self.backbone).geometry.max_positions
        return Draw(budget, draw_cuts(lengths, position, self.query_window, self._smallest_context(budget, limit)))

    def _smallest_context(self, budget: Budget, limit: int) -> int:
        return smallest_context(budget, self.adapter_config.cutting(), limit)


def _group(kind: type[Any], value: Any) -> Any:
    return kind(**value) if isinstance(value, Mapping) else value


def _share(value: float, name: str) -> Budget:
    if not 0 < value < 1:
        raise BudgetError(f"{name} holds {value}; training needs shares of the context in (0, 1)")
    return Budget(share=value)


def _means(prefix: str, outcome: Outcome) -> dict[str, Tensor]:
    values = {**outcome.losses, **outcome.figures}
    return {f"{prefix}/{name}": value.detach().mean() for name, value in values.items()}
