"""Length stages: the tokens per optimiser step are kept, and every count maps to the stage it belongs to."""

from __future__ import annotations

import pytest

from train.curriculum import Curriculum
from train.errors import ConfigError


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "expected"),
    [
        (8, 1, [(8, 1), (4, 1), (2, 1)]),
        (2, 4, [(2, 4), (1, 4), (1, 2)]),
        (1, 8, [(1, 8), (1, 4), (1, 2)]),
    ],
)
def test_tokens_per_step_are_kept_and_a_batch_never_holds_more(batch_size, accumulate, expected):
    curriculum = Curriculum(8192, 6144, batch_size, accumulate, {1000: 16384, 2000: 32768})
    assert [(s.batch_size, s.accumulate) for s in curriculum.stages] == expected
    assert {s.length * s.sequences for s in curriculum.stages} == {8192 * batch_size * accumulate}
    assert all(s.batch_size == 1 or s.batch_size * s.length <= 8192 * batch_size for s in curriculum.stages)
    assert [s.min_length for s in curriculum.stages] == [6144, 12288, 24576]
    assert curriculum.longest == 32768


def test_counts_agree_with_a_plain_walk_through_the_steps():
    curriculum = Curriculum(12, 12, 2, 6, {2: 24, 6: 36})
    batch = sequence = 0
    for step in range(9):
        stage = curriculum.at_step(step)
        assert stage.length == (12 if step < 2 else 24 if step < 6 else 36)
        assert (curriculum.batches_before(step), curriculum.sequences_before(step)) == (batch, sequence)
        for _ in range(stage.accumulate):
            assert curriculum.at_batch(batch) == stage
            assert curriculum.sequences_before_batch(batch) == sequence
            for _ in range(stage.batch_size):
                assert curriculum.at_sequence(sequence) == stage
                sequence += 1
            batch += 1


def test_without_stages_there_is_one():
    curriculum = Curriculum(100, 80, 3)
    assert [curriculum.at_batch(b).length for b in (0, 10**6)] == [100, 100]
    assert curriculum.batches_before(7) == 7


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({5: 3000}, "8000 tokens per step .* not a whole number of sequences of 3000"),
        ({0: 2000}, "steps from 1 on"),
        ({5: 0}, "lengths in tokens, got 5: 0"),
    ],
)
def test_impossible_stages_are_refused(later, message):
    with pytest.raises(ConfigError, match=message):
        Curriculum(1000, 1000, 8, 1, later)


def test_a_stage_whose_batches_would_straddle_steps_is_refused():
    with pytest.raises(
        ConfigError, match="must divide the 15 batches before step 5; begin it at another step, such as 6"
    ):
        Curriculum(1000, 1000, 1, 3, {5: 1500})
