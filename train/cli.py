"""`sekv train`: one YAML, overrides on the command line, and everything a run leaves behind in one folder."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jsonargparse
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from rich.console import Console
from rich.table import Table

from sekv.errors import DataError, SeKVError
from train.callbacks import ProgressLines, RunSummary, TrainingBar, ValidateEverySteps
from train.data import TextDataModule
from train.divergence import replay
from train.errors import ConfigError
from train.export import read_checkpoint
from train.heatmaps import ZoomHeatmaps
from train.loggers import WandbRun, finish_wandb, run_loggers
from train.module import SeKVModule
from train.parallel import check_precision
from train.resume import AtomicCheckpointIO

_USAGE = "sekv train --config FILE [--config FILE ...] [--KEY VALUE ...]"
_DESCRIPTION = """\
Train a SeKV adapter over a frozen backbone.

  sekv train --config configs/smollm2-135m.yaml                            all of it
  sekv train --config configs/demo.yaml --model.lr 2e-3 --name fast        with changes
  sekv train --config configs/smollm2-135m.yaml --config configs/ablations/no-anchors.yaml
  sekv train --config configs/smollm2-135m.yaml --name run --resume last   go on where run stopped
  sekv train --config configs/smollm2-135m.yaml --data LocalFiles --data.paths "[books/, papers.jsonl]"
  sekv train --config configs/demo.yaml --print_config                     see every value
  sekv train --config RUNS/NAME/config.yaml --replay RUNS/NAME/divergence-step-12.safetensors   look at a bad batch

Data sources, several devices, longer documents as training goes on, and resuming: docs/training.md.

A run leaves RUNS/NAME/config.yaml, checkpoints/ (last and best by held-out loss: the adapter, never the backbone),
heatmaps/ (where it zooms, by layer and head), csv/ and wandb/ (offline unless you are logged in; WANDB_MODE is
respected). `sekv plan --config FILE` says beforehand what a run needs. Then:

  sekv export RUNS/NAME/checkpoints/best.ckpt ADAPTER
"""


class _HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Keeps the line breaks of the description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


class _SaveConfig(SaveConfigCallback):
    """Keeps the whole configuration in the run's folder."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes config.yaml, and tells the loggers what the module's own settings leave out."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, folder / "config.yaml", skip_unset=False, overwrite=True)
        for logger in trainer.loggers:
            logger.log_hyperparams({"data": data_settings(self.config.data)})


class TrainCLI(LightningCLI):
    """The command line of training: the module, a data module of choice, and Lightning's trainer."""

    console: Console
    summary: RunSummary
    best: ModelCheckpoint | None = None
    early_stopping: EarlyStopping | None = None
    loggers: Sequence[Logger] = ()
    wandb_run: WandbRun | None = None
    _resumed: Mapping[str, Any] | None = None  # what the checkpoint to resume from holds

    def __init__(self, args: ArgsType, console: Console | None = None) -> None:
        self.console = console or Console()
        super().__init__(
            SeKVModule,
            TextDataModule,
            subclass_mode_data=True,
            args=args,
            run=False,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=_SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={
                "max_steps": 3000,
                "log_every_n_steps": 10,
                "val_check_interval": 250,
                "check_val_every_n_epoch": None,
                "num_sanity_val_steps": 1,
                "gradient_clip_val": 1.0,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
            },
            parser_kwargs={
                "prog": "sekv train",
                "usage": _USAGE,
                "description": _DESCRIPTION,
                "formatter_class": _HelpFormatter,
                "exit_on_error": False,
            },
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Module and data first: in the help they come before the trainer's many options."""
        parser.add_lightning_class_args(SeKVModule, "model")
        parser.add_lightning_class_args(TextDataModule, "data", subclass_mode=True)
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Where a run lives, and one seed for everything."""
        parser.add_argument("--runs", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument(
            "--name", type=str | None, default=None, help="Name of the run's folder; backbone and time when not given."
        )
        parser.add_argument("--resume", type=str | None, default=None, help="A checkpoint to go on from, or 'last'.")
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="Let the run replace an earlier one of its name."
        )
        parser.add_argument(
            "--patience",
            type=int | None,
            default=None,
            help="Stop after this many validations in a row without a better held-out loss; never when not given.",
        )
        parser.add_argument(
            "--replay", type=str | None, default=None, help="Train nothing: compute a step again that a run saved."
        )
        parser.add_argument("--save_every", type=int, default=100, help="Steps between saves of the last checkpoint.")
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.set_defaults({"data": {"class_path": "train.data.BuiltinCorpus"}})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; Lightning would warn that arguments come from the caller, which is how `sekv` works."""
        self.config = parser.parse_args(cast(list[str], args))

    def before_instantiate_classes(self) -> None:
        """Fixes the run's folder and looks into the checkpoint to resume from, before any backbone loads.

        Raises:
            DataError: the name is taken, the folder cannot be made, or there is nothing to resume from.
            AdapterError: the checkpoint to resume from is corrupt, or not one of ours.
            ConfigError: the trainer's steps or intervals are out of range, or nothing is left to train.
        """
        config = self.config
        check_intervals(config)
        name = config.name or f"{Path(config.model.backbone).name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_dir = Path(config.runs) / name
        _check_writable(self.run_dir)
        self.checkpoint_dir = self.run_dir / "checkpoints"
        self.resume_from: Path | None = None
        if config.resume is not None:
            last = config.resume == "last"
            self.resume_from = self.checkpoint_dir / "last.ckpt" if last else Path(config.resume)
            if not self.resume_from.is_file():
                hint = "; give --name of the run to go on with" if last else ""
                raise DataError(f"there is no checkpoint {self.resume_from} to resume from{hint}")
            _, self._resumed = read_checkpoint(self.resume_from)
            done, steps = self._resumed["global_step"], config.trainer.max_steps
            if 0 <= steps <= done:
                raise ConfigError(
                    f"nothing left to train: {self.resume_from} is at step {done} and trainer.max_steps is {steps}; "
                    "raise trainer.max_steps"
                )
        elif (
            not config.overwrite
            and not config.replay
            and self.checkpoint_dir.is_dir()
            and any(self.checkpoint_dir.iterdir())
        ):
            raise DataError(
                f"{self.run_dir} holds an earlier run; give another --name, --resume last to go on with it, "
                "or --overwrite true"
            )

    def instantiate_classes(self) -> None:
        """Instantiates; a mistake that our own classes explain is not buried in jsonargparse's report.

        Raises:
            SeKVError: a value is out of range, or a file is missing.
        """
        try:
            super().instantiate_classes()
            self.model.data_settings = data_settings(self.config.data)
        except ValueError as error:
            if isinstance(error.__cause__, SeKVError):
                raise error.__cause__ from None
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A trainer that writes into the run's folder.

        Raises:
            ConfigError: Lightning refuses an option.
        """
        options = self.config_init.trainer
        self.summary = RunSummary()
        if options.logger in (None, True):
            self.loggers, self.wandb_run = run_loggers(self.run_dir, resuming=self.config.resume is not None)
        kwargs.update(
            default_root_dir=str(self.run_dir),
            logger=list(self.loggers) or options.logger,
            plugins=[*_as_list(options.plugins), AtomicCheckpointIO()],
            enable_progress_bar=self.console.is_terminal and options.enable_progress_bar is not False,
            callbacks=[*(options.callbacks or []), *self._callbacks(with_loggers=bool(self.loggers or options.logger))],
        )
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ConfigError(f"the trainer cannot be made: {error}") from error

    def _callbacks(self, with_loggers: bool) -> list[Callback]:
        keep: dict[str, Any] = {"dirpath": self.checkpoint_dir, "save_top_k": 1, "enable_version_counter": False}
        bar = TrainingBar(leave=True) if self.console.is_terminal else ProgressLines(self.console)
        callbacks: list[Callback] = [
            bar,
            self.summary,
            ModelCheckpoint(filename="last", every_n_train_steps=self.config.save_every, **keep),
        ]
        if self.datamodule.val_sequences:
            self.best = ModelCheckpoint(filename="best", monitor="val/loss", save_on_train_epoch_end=False, **keep)
            callbacks += [self.best, ZoomHeatmaps(self.run_dir / "heatmaps")]
            if isinstance(interval := self.config.trainer.val_check_interval, int):
                callbacks.append(ValidateEverySteps(interval))
            if self.config.patience is not None:
                self.early_stopping = EarlyStopping("val/loss", patience=self.config.patience)
                callbacks.append(self.early_stopping)
        if with_loggers:
            callbacks.append(LearningRateMonitor("step"))
        return callbacks

    def fit(self) -> Path:
        """Trains.

        Returns:
            The checkpoint to export: the best one, or the last where nothing was held out.

        Raises:
            SeKVError: backbone, checkpoint and documents do not fit; nothing has been written then.
        """
        self._check_everything()
        if self.wandb_run is not None and self.trainer.is_global_zero:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.wandb_run.save(self.run_dir)
        self.trainer.fit(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=str(self.resume_from) if self.resume_from else None,
            weights_only=True,
        )
        last = self.checkpoint_dir / "last.ckpt"
        self.trainer.save_checkpoint(last)
        best = self.best.best_model_path if self.best is not None else ""  # a file may be left from a run replaced
        return Path(best) if best else last

    def _check_everything(self) -> None:
        """Loads the backbone and reads the documents: what is refused here leaves no folder behind."""
        self.datamodule.trainer = self.trainer
        self.model.check_documents(self.datamodule)
        backbone = self.model.load(str(self.trainer.strategy.root_device))
        self.model.check_documents(self.datamodule)
        if self._resumed is not None:
            self.model.check_checkpoint(self._resumed)
        self.datamodule.tokenizer = backbone.tokenizer
        self.datamodule.check()

    def replay(self) -> Table:
        """What a saved step computes.

        Raises:
            DataError: the file is not a step of such a run.
        """
        table = Table("", "per document", title=f"Replay of {self.config.replay}", title_justify="left")
        for name, values in replay(self.model, self.config.replay).items():
            table.add_row(name, "  ".join(f"{value:.5g}" for value in values))
        return table

    def stopped_early(self) -> str:
        """Why training ended before its last step, or nothing."""
        if self.early_stopping is None or self.early_stopping.wait_count < self.early_stopping.patience:
            return ""
        return f"Stopped early: {self.config.patience} validations in a row without a better held-out loss."

    def stopped(self) -> str:
        """What remains of a run that was stopped from outside."""
        last = self.checkpoint_dir / "last.ckpt"
        remedy = f"go on with --name {self.run_dir.name} --resume last" if last.is_file() else "nothing was saved yet"
        return f"stopped after step {self.trainer.global_step}; {remedy}"


def check_intervals(config: Any) -> None:
    """Refuses counts of steps that Lightning would stumble over in the middle of a run."""
    options = config.trainer
    if options.max_steps < 0:
        raise ConfigError(f"trainer.max_steps is {options.max_steps}, but the data have no end; set trainer.max_steps")
    if 0 in (options.max_steps, options.max_epochs):
        raise ConfigError("nothing left to train: trainer.max_steps or trainer.max_epochs is 0; raise it")
    check_precision(options.precision)
    intervals = {
        "trainer.val_check_interval": options.val_check_interval,
        "trainer.log_every_n_steps": options.log_every_n_steps,
        "save_every": config.save_every,
        "patience": config.patience,
    }
    for name, value in intervals.items():
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{name} must be above 0, got {value}")


def data_settings(config: Any) -> dict[str, Any]:
    """The data part of a configuration as plain values, for checkpoints and loggers."""
    return {"class_path": config.class_path, **json.loads(json.dumps(config.init_args.as_dict(), default=str))}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be made, without making it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(f"{folder} cannot be made: {existing} is not a folder; give other --runs or another --name")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"{folder} cannot be made: {existing} is not writable; give other --runs")


def quiet_lightning() -> None:
    """Hides what Lightning says about choices that are deliberate here, such as few data workers."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `sekv train`.

    Args:
        argv: arguments behind `sekv train`; the process's own when None.

    Returns:
        0 on success, 2 for a mistake that one line explains, 130 when interrupted, 143 when terminated.
    """
    console = Console()
    errors = Console(stderr=True)
    quiet_lightning()
    cli: TrainCLI | None = None
    try:
        cli = TrainCLI(list(sys.argv[1:] if argv is None else argv), console)
        if cli.config.replay:
            console.print(cli.replay())
            return 0
        checkpoint = cli.fit()
    except SystemExit as stop:  # --help and --print_config; an interrupt or SIGTERM once there is a trainer
        if cli is None:
            return stop.code if isinstance(stop.code, int) else 1
        errors.print(f"sekv train: {cli.stopped()}", markup=False, highlight=False, soft_wrap=True)
        return 143 if isinstance(stop, SIGTERMException) else 130
    except (SeKVError, jsonargparse.ArgumentError, MisconfigurationException, OSError) as error:
        errors.print(f"sekv train: error: {one_line(error)}", markup=False, highlight=False, soft_wrap=True)
        return 2
    finally:
        if cli is not None:
            finish_wandb(cli.loggers)
    console.print(cli.summary.table())
    if reason := cli.stopped_early():
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Adapter trained: {checkpoint}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Next: sekv export {checkpoint} {cli.run_dir / 'adapter'}", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def one_line(error: Exception) -> str:
    """The message on one line, without jsonargparse's report on the alternatives of an optional class."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    text = re.sub(r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: - ", "", text)
    return text.split(" - Expected a <class 'NoneType'>")[0]
