"""`sekv plan`: what a training run needs, from its configuration alone, before anything is downloaded."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonargparse
import torch
from lightning.pytorch.cli import ArgsType
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sekv.adapter import SeKVAdapter
from sekv.architecture import Architecture, find_architecture
from sekv.backbone import pick_dtype
from sekv.budget import Budget
from sekv.errors import DataError, SeKVError
from sekv.evaluation.report import format_bytes
from sekv.expected_cut import expected_cut
from sekv.units import parse_size
from train.cli import TrainCLI, check_intervals, one_line, quiet_lightning
from train.curriculum import Curriculum, Stage
from train.data import TextDataModule
from train.footprint import (
    READING,
    TRAINING,
    Part,
    StepSize,
    moment_bytes,
    peak,
    step_parts,
    weight_bytes,
)
from train.module import SeKVModule
from train.windows import smallest_context

_PROCESS_BYTES = 2 * 10**9  # Python with torch, transformers, lightning and datasets, and the CUDA libraries
_WORKER_BYTES = 5 * 10**8  # one process that reads and tokenises
_DEVICE_OVERHEAD = 10**9  # context and kernels of an accelerator, and what its allocator leaves unused

_DESCRIPTION = """\
Say what `sekv train` with the same arguments would need, before anything is downloaded: trainable parameters, memory
by part, tokens and steps, and what would not fit. Nothing is loaded, trained or written."""

_EPILOG = """\
examples:
  sekv plan --config configs/llama-3.1-8b.yaml --device-memory 80GiB
  sekv plan --config configs/qwen3-8b.yaml --data.batch_size 2 --device-memory 40GiB --host-memory 256GiB
  sekv plan --config configs/smollm2-135m.yaml --config configs/ablations/global-threshold.yaml

Every other argument is one of `sekv train`. The architecture comes from the backbone's folder, from a table of
published ones that comes with sekv, or for another Hub id from its config.json alone. The exit code is 1 when
something would not fit. `sekv plan inference --help` plans what a compressed context needs and costs."""


@dataclass(frozen=True)
class Machine:
    """What the run would have.

    Attributes:
        accelerator: trains on one; otherwise device and host memory are the same.
        device_bytes: of one accelerator; None when unknown.
        host_bytes: of the host; None when unknown.
        processes: that train, over all nodes.
    """

    accelerator: bool
    device_bytes: int | None
    host_bytes: int | None
    processes: int


@dataclass(frozen=True)
class Plan:
    """A configuration, its architecture, and the machine.

    Attributes:
        module: configured, nothing loaded.
        datamodule: configured, nothing read.
        trainer: the trainer's options.
        architecture: of the backbone.
        machine: that is planned for.
        dtype: of the backbone.
    """

    module: SeKVModule
    datamodule: TextDataModule
    trainer: Any
    architecture: Architecture
    machine: Machine
    dtype: torch.dtype

    @cached_property
    def adapter(self) -> SeKVAdapter:
        """A fresh one, of the class that is trained."""
        return self.architecture.adapter(self.module.adapter_config)

    @cached_property
    def stages(self) -> list[Stage]:
        """The curriculum."""
        data = self.datamodule
        accumulate = self.trainer.accumulate_grad_batches or 1
        return Curriculum(data.length, data.min_length, data.batch_size, accumulate, data.later).stages

    @property
    def trained_parameters(self) -> int:
        """Parameters with a gradient."""
        adapter = self.adapter
        return adapter.num_parameters if self.module.train_router else sum(p.numel() for p in adapter.gate.parameters())

    def steps_of(self, stage: Stage) -> int:
        """Optimiser steps that a stage takes."""
        later = [s.step for s in self.stages if s.step > stage.step]
        return max(0, min([self.trainer.max_steps, *later]) - stage.step)

    def tokens_per_step(self, stage: Stage) -> int:
        """At most, over all processes."""
        return stage.length * stage.sequences * self.machine.processes

    def parts(self, stage: Stage) -> list[Part]:
        """Memory of one device in a stage."""
        size = StepSize(
            batch=stage.batch_size,
            tokens=stage.length,
            window=self.module.query_window,
            mined=min(self.module.mining.queries, self.module.query_window),
            budget=max(self.module.budgets, key=lambda budget: budget.share or 0.0),
            element_bytes=self.dtype.itemsize,
            checkpoint_attention=self.module.checkpoint_attention,
            shards=self.machine.processes if self.module.shard else 1,
        )
        parts = step_parts(self.architecture.backbone, self.adapter, size)
        if self.machine.accelerator:
            parts.append(Part("context and kernels of the accelerator", _DEVICE_OVERHEAD, (READING, TRAINING)))
        return parts

    def host_parts(self) -> list[Part]:
        """Memory of one process on the host; on a machine without accelerator the step comes on top."""
        both = (READING, TRAINING)
        workers = self.datamodule.num_workers
        parts = [Part("process with its libraries", _PROCESS_BYTES, both)]
        if workers:
            parts.append(Part(f"{workers} workers that read and tokenise", workers * _WORKER_BYTES, both))
        if self.machine.accelerator:
            weights = weight_bytes(self.architecture.backbone, self.dtype.itemsize)
            parts.append(Part("weights on their way to the device (page cache)", weights, both))
        return parts

    def problems(self) -> list[str]:
        """What would not fit, each with its remedy."""
        return [*self._device_problems(), *self._host_problems(), *self._length_problems()]

    def _device_problems(self) -> list[str]:
        limit = self.machine.device_bytes
        if not self.machine.accelerator or limit is None:
            return []
        found = []
        for stage in self.stages:
            needed = peak(self.parts(stage))
            if needed > limit:
                found.append(
                    f"sequences of {stage.length:,} tokens, {stage.batch_size} at a time, need {format_bytes(needed)} "
                    f"on the device, which has {format_bytes(limit)}: {self._remedy(stage)}"
                )
        return found

    def _remedy(self, stage: Stage) -> str:
        """What is easiest to change for a smaller step."""
        if stage.batch_size > 1:
            return "lower data.batch_size and raise trainer.accumulate_grad_batches"
        if not self.module.checkpoint_attention:
            return "set model.checkpoint_attention true"
        return "lower data.length, data.curriculum or model.query_window, set model.shard true, or take a larger device"

    def _host_problems(self) -> list[str]:
        limit = self.machine.host_bytes
        if limit is None:
            return []
        needed = moment_bytes(self.host_parts(), READING)
        if not self.machine.accelerator:
            needed += max(peak(self.parts(stage)) for stage in self.stages)
        if needed <= limit:
            return []
        where = "" if self.machine.accelerator else " (without an accelerator everything is here)"
        return [
            f"each process needs {format_bytes(needed)} on the host, which has {format_bytes(limit)}{where}: take a "
            "larger machine, or give --device-memory to plan for one with an accelerator"
        ]

    def _length_problems(self) -> list[str]:
        found, shape = [], self.architecture.backbone.geometry
        longest = max(stage.length for stage in self.stages)
        if longest > shape.max_positions:
            found.append(
                f"sequences of {longest:,} tokens exceed the {shape.max_positions:,} positions of "
                f"{self.architecture.name}: lower data.length or data.curriculum"
            )
        if len(shape.compressible) < shape.num_layers:
            found.append(f"{self.architecture.name} has layers without full attention, over which training is refused")
        for budget in dict.fromkeys((*self.module.budgets, self.module.val_budget)):
            found += self._budget_problems(budget)
        return found

    def _budget_problems(self, budget: Budget) -> list[str]:
        try:
            smallest = smallest_context(budget, self.module.adapter_config.cutting(), self.datamodule.length)
        except DataError as error:
            return [str(error)]
        needed = smallest + self.module.query_window
        if needed <= self.datamodule.min_length:
            return []
        return [
            f"a budget of {budget} needs documents of at least {needed} tokens: raise data.min_length "
            f"({self.datamodule.min_length}) or the budget"
        ]


class _PlanCLI(TrainCLI):
    """Parses as training does, and makes module and data module only."""

    def before_instantiate_classes(self) -> None:
        """No folder is looked at.

        Raises:
            ConfigError: the trainer's steps or intervals are out of range.
        """
        check_intervals(self.config)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """None: a machine that plans need not have what the run will use."""


def make_plan(argv: ArgsType, device_memory: int | None = None, host_memory: int | None = None) -> Plan:
    """Reads a configuration as `sekv train` does.

    Args:
        argv: arguments of `sekv train`.
        device_memory: bytes of one accelerator; those found here when None.
        host_memory: bytes of the host; those found here when None.

    Raises:
        SeKVError: a value is out of range, or the backbone is unknown.
    """
    cli = _PlanCLI(argv)
    trainer = cli.config.trainer
    architecture = find_architecture(cli.config.model.backbone)
    machine = _machine(trainer, device_memory, host_memory)
    dtype = pick_dtype(cli.config.model.dtype, torch.device("cuda" if machine.accelerator else "cpu"))
    return Plan(cli.model, cli.datamodule, trainer, architecture, machine, dtype)


def _machine(trainer: Any, device_memory: int | None, host_memory: int | None) -> Machine:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    accelerator = trainer.accelerator != "cpu" and (device_memory is not None or found > 0)
    if accelerator and device_memory is None:
        device_memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(found))
    devices = trainer.devices
    count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, list) else -1
    if isinstance(devices, str) and devices.isdigit():
        count = int(devices)
    if count < 1:  # auto, or all
        count = max(1, found) if accelerator else 1
    host = host_memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(accelerator, device_memory, host, count * trainer.num_nodes)


def print_plan(plan: Plan, console: Console) -> None:
    """The plan as tables, its assumptions, and what would not fit."""
    backbone, machine = plan.architecture.backbone, plan.machine
    whole = backbone.num_parameters
    console.print(f"backbone: {plan.architecture.name}, {whole:,} parameters ({plan.architecture.source})")
    trained = plan.trained_parameters
    console.print(f"trainable parameters: {trained:,}, {trained / whole:.4%} of the backbone")
    console.print(
        f"adapter file: {format_bytes(4 * plan.adapter.num_parameters)}, training checkpoint: at most "
        f"{format_bytes(16 * plan.adapter.num_parameters)}"
    )
    where = f"{machine.processes} process(es)" + (", each on an accelerator" if machine.accelerator else " on the CPU")
    console.print(f"on {where}, backbone in {str(plan.dtype).removeprefix('torch.')}\n")
    console.print(_steps_table(plan))
    for stage in plan.stages:
        console.print(_memory_table(plan, stage))
    console.print(_host_table(plan))
    _print_assumptions(plan, console)
    if problems := plan.problems():
        console.print("\nWould not fit:", style="bold red")
        for problem in problems:
            console.print(f"- {problem}", soft_wrap=True)
    elif machine.accelerator or machine.host_bytes:
        console.print("\nEverything fits.", style="bold green")


def _steps_table(plan: Plan) -> Table:
    table = _table("Steps")
    for column in ("from step", "steps", "length", "sequences/step", "tokens/step", "tokens"):
        table.add_column(column, justify="right")
    total = 0
    for stage in plan.stages:
        steps, per_step = plan.steps_of(stage), plan.tokens_per_step(stage)
        total += steps * per_step
        table.add_row(
            f"{stage.step:,}",
            f"{steps:,}",
            f"{stage.length:,}",
            f"{per_step // stage.length:,}",
            f"{per_step:,}",
            f"{steps * per_step:,}",
        )
    table.caption = f"in all {plan.trainer.max_steps:,} steps and at most {total:,} tokens"
    return table


def _memory_table(plan: Plan, stage: Stage) -> Table:
    where = "accelerator" if plan.machine.accelerator else "CPU"
    table = _table(f"Memory of one {where}, {stage.batch_size} x {stage.length:,} tokens")
    table.add_column("part", overflow="fold")
    for moment in (READING, TRAINING):  # a document is read, then trained on
        table.add_column(moment, justify="right", no_wrap=True)
    parts = plan.parts(stage)
    for part in parts:
        table.add_row(part.name, *(format_bytes(part.bytes) if m in part.moments else "" for m in (READING, TRAINING)))
    table.add_section()
    table.add_row("together", *(format_bytes(moment_bytes(parts, moment)) for moment in (READING, TRAINING)))
    return table


def _host_table(plan: Plan) -> Table:
    table = _table("Memory of one process on the host")
    table.add_column("part", overflow="fold")
    table.add_column("bytes", justify="right")
    parts = plan.host_parts()
    for part in parts:
        table.add_row(part.name, format_bytes(part.bytes))
    table.add_section()
    table.add_row("together", format_bytes(moment_bytes(parts, READING)))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _print_assumptions(plan: Plan, console: Console) -> None:
    longest = plan.stages[-1]
    budget = max(plan.module.budgets, key=lambda budget: budget.share or 0.0)
    cut = expected_cut(plan.module.adapter_config, budget, longest.length - plan.module.query_window)
    console.print("Assumed:", style="bold")
    for line in (
        f"documents as long as the stage, the largest budget ({budget}), a context cut into {cut.spans:,} spans of at "
        f"most {cut.longest} tokens and {cut.exact:,} exact rows",
        "attention of the backbone without a tokens x tokens matrix (flash or memory-efficient kernels)",
        "keys and values of training stay on the device; the host holds none of them",
    ):
        console.print(f"- {line}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `sekv plan`.

    Args:
        argv: arguments behind `sekv plan`; the process's own when None.

    Returns:
        0 when everything fits, 1 when something does not, 2 for a mistake that one line explains.
    """
    parser = argparse.ArgumentParser(
        prog="sekv plan",
        usage="sekv plan --config FILE [--config FILE ...] [--KEY VALUE ...] [--device-memory X] [--host-memory X]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device-memory", metavar="X", help="of one accelerator, such as 80GiB (default: found here)")
    parser.add_argument("--host-memory", metavar="X", help="of one host, such as 256GiB (default: found here)")
    options, rest = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    quiet_lightning()
    try:
        sizes = [None if text is None else parse_size(text) for text in (options.device_memory, options.host_memory)]
        plan = make_plan(rest, *sizes)
        print_plan(plan, Console(highlight=False))
        return 1 if plan.problems() else 0
    except SystemExit as stop:  # --print_config
        return stop.code if isinstance(stop.code, int) else 1
    except (SeKVError, jsonargparse.ArgumentError, OSError) as error:
        Console(stderr=True).print(
            f"sekv plan: error: {one_line(error)}", markup=False, highlight=False, soft_wrap=True
        )
        return 2
