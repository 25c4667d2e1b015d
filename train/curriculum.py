"""Longer sequences as training goes on, with the tokens per optimiser step kept (method section 1.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """What the loader delivers from one optimiser step on.

    Attributes:
        step: first optimiser step.
        length: longest sequence in tokens.
        min_length: shortest sequence in tokens.
        batch_size: sequences per batch and process.
        accumulate: batches per optimiser step.
    """

    step: int
    length: int
    min_length: int
    batch_size: int
    accumulate: int

    @property
    def sequences(self) -> int:
        """Sequences per optimiser step and process."""
        return self.batch_size * self.accumulate


class Curriculum:
    """The stages of a run. Everything in it is a function of a count, so it needs no state of its own.

    Args:
        length: longest sequence of the first stage in tokens.
        min_length: shortest sequence of the first stage; it grows with the length.
        batch_size: sequences per batch and process in the first stage.
        accumulate: batches per optimiser step in the first stage.
        later: length by the optimiser step it begins at.

    Raises:
        ConfigError: steps do not ascend, or the tokens of a step cannot be kept with whole sequences.
    """

    def __init__(
        self, length: int, min_length: int, batch_size: int, accumulate: int = 1, later: Mapping[int, int] | None = None
    ) -> None:
        tokens = length * batch_size * accumulate
        self.stages = [Stage(0, length, min_length, batch_size, accumulate)]
        for step, longer in sorted((later or {}).items()):
            if step < 1 or longer < 1:
                raise ConfigError(f"data.curriculum maps steps from 1 on to lengths in tokens, got {step}: {longer}")
            if tokens % longer:
                raise ConfigError(
                    f"data.curriculum: {tokens} tokens per step and process (data.length {length} x data.batch_size "
                    f"{batch_size} x trainer.accumulate_grad_batches {accumulate}) are not a whole number of sequences "
                    f"of {longer} tokens; choose a batch size or a length that makes them one"
                )
            sequences = tokens // longer
            most = max(1, length * batch_size // longer)  # a batch holds no more tokens than in the first stage
            batch = next(size for size in range(most, 0, -1) if sequences % size == 0)
            stage = Stage(step, longer, -(-min_length * longer // length), batch, sequences // batch)
            if self.batches_before(step) % stage.accumulate:
                raise ConfigError(
                    f"data.curriculum: the stage of {longer} tokens accumulates {stage.accumulate} batches per step, "
                    f"which must divide the {self.batches_before(step)} batches before step {step}; begin it at "
                    f"another step, such as {-(-step // stage.accumulate) * stage.accumulate}"
                )
            self.stages.append(stage)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any stage."""
        return max(stage.length for stage in self.stages)

    def at_step(self, step: int) -> Stage:
        """The stage of an optimiser step."""
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def at_batch(self, batch: int) -> Stage:
        """The stage of a batch, counted from 0 over the whole run."""
        return next(stage for stage in reversed(self.stages) if self.batches_before(stage.step) <= batch)

    def at_sequence(self, sequence: int) -> Stage:
        """The stage of one process's sequence, counted from 0 over the whole run."""
        return next(stage for stage in reversed(self.stages) if self.sequences_before(stage.step) <= sequence)

    def batches_before(self, step: int) -> int:
        """Batches of one process before an optimiser step."""
        return sum(steps * stage.accumulate for stage, steps in self._until(step))

    def sequences_before(self, step: int) -> int:
        """Sequences of one process before an optimiser step."""
        return sum(steps * stage.sequences for stage, steps in self._until(step))

    def sequences_before_batch(self, batch: int) -> int:
        """Sequences of one process before a batch."""
        stage = self.at_batch(batch)
        return self.sequences_before(stage.step) + (batch - self.batches_before(stage.step)) * stage.batch_size

    def _until(self, step: int) -> list[tuple[Stage, int]]:
        """Each stage and how many of its steps lie before `step`."""
        ends = [*(stage.step for stage in self.stages[1:]), step]
        return [(stage, max(0, min(end, step) - stage.step)) for stage, end in zip(self.stages, ends, strict=True)]
