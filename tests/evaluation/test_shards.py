from __future__ import annotations

import pytest

from sekv.errors import SeKVError
from sekv.evaluation.shards import WHOLE, Shard

SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, WHOLE),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Shard(3, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, WHOLE),
        (SLURM, Shard(2, 4, 0)),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, WHOLE),
        (SLURM | {"RANK": "1", "WORLD_SIZE": "2"}, Shard(1, 2, 0)),
    ],
)
def test_the_launcher_says_which_part(environment: dict[str, str], shard: Shard) -> None:
    assert Shard.detect(environment) == shard


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0")])
def test_nonsense_of_the_launcher_is_refused(rank: str, world: str) -> None:
    with pytest.raises(SeKVError, match=f"RANK={rank}, WORLD_SIZE={world}"):
        Shard.detect({"RANK": rank, "WORLD_SIZE": world})


def test_the_parts_are_disjoint_and_complete() -> None:
    parts = [Shard(rank, 3).part(range(8)) for rank in range(3)]
    assert sorted(item for part in parts for item in part) == list(range(8))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
