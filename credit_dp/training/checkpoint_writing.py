"""How a checkpoint gets to disk: what it holds is taken in one go, its writing may take its time.

Each rank writes its own shards; nothing is gathered on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch.distributed as dist
from torch import Tensor

from credit_dp.data.cache import fingerprint
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files as files
from credit_dp.training.agreement import gather, own_rank, together
from credit_dp.training.checkpoints_kept import VALIDATION, Kept, as_error, tidy
from credit_dp.training.provenance import provenance
from credit_dp.training.shards import Shape, write_shards
from credit_dp.training.state import TrainingState


@final
@dataclass(frozen=True)
class Snapshot:
    """All that a rank puts into a checkpoint of one step."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, state: TrainingState, config: str, error: float | None = None) -> Self:
        """What the state is now; training on changes its tensors.

        Args:
            state: of this rank.
            config: the resolved one, as YAML.
            error: found on the validation dates at this step, if any was.
        """
        numbers = {**state.numbers(), "config": config, VALIDATION: as_error(error)}
        return cls(state.tensors(), deepcopy(numbers))

    def copied(self) -> "Snapshot":
        """The same with tensors of its own, in the host's memory."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.tensors.items()
        }
        return Snapshot(tensors, self.numbers)


def constants_of(state: TrainingState) -> dict[str, Tensor]:
    """What a checkpoint carries besides, which rank 0 has and the others leave to it; collective.

    Raises:
        UserError: on all ranks, if they can't be read.
    """
    return together(lambda: state.constants() if own_rank() == 0 else {})


def write(
    path: Path,
    snapshot: Snapshot,
    constants: dict[str, Tensor],
    kept: Kept,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `path`, and remove those that need not stay then; collective.

    Those before stay until the new one is whole and on disk. `group` has all ranks; nobody else
    uses it meanwhile.

    Raises:
        UserError: on all ranks, if one could not write, for instance because the disk is full.
    """
    part = files.unfinished_folder(path)
    first, step = own_rank() == 0, snapshot.numbers["step"]
    try:
        together(lambda: begin(part, step) if first else None, group)
        together(lambda: check_shared(part), group)
        tensors = {**snapshot.tensors, **constants}
        with could_not_be_written(part, step):
            write_shards(part, tensors, group)
        numbers = {**snapshot.numbers, **describe(part, snapshot, tensors, group)}
        together(lambda: finish(part, path, numbers, kept) if first else None, group)
    except UserError:
        if first:
            files.abandon(part)
        raise


def begin(part: Path, step: int) -> None:
    """Make the folder to write into."""
    with could_not_be_written(part, step):
        files.begin(part)


def check_shared(part: Path) -> None:
    """Refuse a folder that only some of the ranks see."""
    if not part.is_dir():
        raise UserError(
            f"{part.parent}: has to be on a disk that all machines share, but rank {own_rank()} "
            "does not see what rank 0 wrote there. Change run.dir."
        )


def describe(
    part: Path, snapshot: Snapshot, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """What is needed to find and to check the tensors, and what they are for; collective."""
    # Each rank sees its own file at least, however slow the disk is to show those of others.
    shards = gather(files.shard_names(part), group)
    return {
        "tensors": shapes_of_all_ranks(tensors, group),
        "shards": sorted({name for names in shards for name in names}),
        "statistics_fingerprint": fingerprint(snapshot.numbers["data"].get("statistics")),
    }


def shapes_of_all_ranks(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Shape]:
    """The whole shape of every tensor that a rank has; collective, and the same on all ranks."""
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return {name: shape for part in gather(own, group) for name, shape in part.items()}


def finish(part: Path, path: Path, numbers: dict[str, Any], kept: Kept) -> None:
    """Complete a checkpoint, which says what code made it, and give it its name."""
    with could_not_be_written(part, numbers["step"]):
        files.finish(part, path, {**numbers, "versions": provenance()})
        tidy(path, kept)


@contextmanager
def could_not_be_written(part: Path, step: int) -> Iterator[None]:
    """Say in one line that a checkpoint could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{part.parent}: the checkpoint of step {step} could not be written "
            f"({error.strerror or error}). The previous one is untouched; free space there or "
            f"change run.dir, then go on with resume=auto."
        ) from error
