"""Which rank this process is, among how many."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Ranks:
    """The place of one process in its run; `local_*` counts those on the same machine, the
    `node`-th of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
