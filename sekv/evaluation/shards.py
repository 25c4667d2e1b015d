"""Which part of an evaluation this process does: told by torchrun, Lightning or SLURM, through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sekv.errors import SeKVError

T = TypeVar("T")
_INTERACTIVE = ("bash", "interactive")  # a shell inside an allocation is one process, whatever its size


@dataclass(frozen=True)
class Shard:
    """One of `world` processes that share the work.

    Attributes:
        rank: number of this process.
        world: number of processes.
        local_rank: number of this process on its machine, which picks the device.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def detect(cls, environment: Mapping[str, str] | None = None) -> Shard:
        """The shard that the launcher gave this process; the whole when there was no launcher.

        Raises:
            SeKVError: the launcher's variables contradict one another.
        """
        env = os.environ if environment is None else environment
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in _INTERACTIVE:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        else:
            return cls()
        try:
            rank, world, local = (int(env.get(name, "0")) for name in names)
        except ValueError:
            rank = world = local = -1
        if not 0 <= rank < world or local < 0:
            found = ", ".join(f"{name}={env.get(name)}" for name in names)
            raise SeKVError(f"the launcher's variables make no sense: {found}; unset them to run as one process")
        return cls(rank, world, local)

    def part(self, items: Sequence[T]) -> list[T]:
        """Every `world`-th item, beginning with number `rank`."""
        return list(items[self.rank :: self.world])


WHOLE = Shard()  # everything in one process
