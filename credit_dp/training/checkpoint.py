"""Checkpoints: written by all ranks of a mesh, read by those of any other, whole or not at all.

Each rank writes its own shards and reads what it needs of them; nothing is gathered on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credit_dp
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files as files
from credit_dp.training.agreement import gather, own_rank, together
from credit_dp.training.data_description import Description, check_data
from credit_dp.training.shards import Shape, check_shards, read_shards, readable, write_shards
from credit_dp.training.state import GENERATOR, MODEL, TrainingState

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

ADVICE = "Change the model or data group to that of the checkpoint, or resume."


def save_checkpoint(folder: Path, state: TrainingState, config: str) -> Path:
    """Write a checkpoint into `folder`, with the resolved config (YAML), and remove older ones.

    Collective: all ranks of the run call it. The previous checkpoint stays until the new one is
    whole and on disk.

    Returns:
        The folder of this checkpoint.

    Raises:
        UserError: on all ranks, if one could not write, for instance because the disk is full.
    """
    path = files.step_folder(folder, state.step)
    part = files.unfinished_folder(path)
    first = own_rank() == 0
    try:
        together(lambda: begin(part, state.step) if first else None)
        together(lambda: check_shared(part))
        constants = together(lambda: state.constants() if first else {})
        tensors = {**state.tensors(), **constants}
        with could_not_be_written(part, state.step):
            write_shards(part, tensors)
        numbers = {**state.numbers(), **describe(part, tensors), "config": config}
        together(lambda: finish(part, path, numbers) if first else None)
    except UserError:
        if first:
            files.abandon(part)
        raise
    return path


def find_checkpoint(resume: str | None, own: Path) -> Path | None:
    """The checkpoint to start from, or None for a fresh start.

    Collective: all ranks of the run call it. `resume` is None, `auto` (the newest in the run's
    `own` folder of checkpoints, if there is one yet), or the path of a checkpoint, of a folder of
    checkpoints, or of a run.

    Raises:
        UserError: on all ranks, if a path was given and nothing is there, or if the ranks see
            different ones.
    """
    if resume is None:
        return None
    if resume == "auto":
        path = together(lambda: newest(own))
    else:
        path = together(lambda: files.locate("resume", resume))
    seen = gather(path)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(
                f"resume: all ranks have to see the same checkpoint, but rank {rank} sees "
                f"{other or 'none'} and rank 0 {seen[0] or 'none'}. "
                "Put run.dir on a disk that all machines share."
            )
    return path


def newest(own: Path) -> Path | None:
    """The newest checkpoint in the run's own folder, if it has one yet.

    Raises:
        UserError: it has one of an earlier version, which is a file.
    """
    steps, old = files.whole_steps(own), own.parent / "checkpoint.pt"
    if not steps and old.exists():
        return files.locate("resume", str(old))
    return steps[-1] if steps else None


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Bring `state` to where a checkpoint left it, on any mesh; settings of the config stay.

    Collective: all ranks of the run call it. `path` may be any that `resume` may be.

    Raises:
        UserError: on all ranks, if one can't read it, or it is of another model or of other data.
    """
    path = together(lambda: files.locate("resume", str(path)))
    numbers = together(lambda: files.read_numbers("resume", path))
    own = shapes_of_all_ranks(state.tensors())
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    together(lambda: check_origin(path, numbers["data"], state))
    check_fit(f"resume: {path}", of_model(saved), of_model(own))
    together(lambda: check_shards("resume", path, saved))
    room = state.make_room(saved)
    read_shards("resume", path, room)
    with readable("resume", path):
        state.go_on(numbers, room[GENERATOR])


def check_origin(path: Path, saved: Description, state: TrainingState) -> None:
    """Refuse a checkpoint of other data, or one that does not say of which it is."""
    with readable("resume", path):
        check_data(saved, state.data)


def check_fit(
    where: str, saved: dict[str, Shape], model: dict[str, Shape], advice: str = ADVICE
) -> None:
    """Refuse weights of another model, naming the first that differs."""
    for name, shape in model.items():
        if name not in saved:
            raise UserError(f"{where} has no {name}, which the model has. {advice}")
        if saved[name] != shape:
            raise UserError(
                f"{where} has {saved[name]} for {name}, which is {shape} in the model. {advice}"
            )
    extra = next((name for name in saved if name not in model), None)
    if extra is not None:
        raise UserError(f"{where} has {extra}, which the model does not have. {advice}")


def of_model(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Those of the model, by the names that they have there."""
    return {
        name.removeprefix(MODEL): shape for name, shape in shapes.items() if name.startswith(MODEL)
    }


def shapes_of_all_ranks(tensors: dict[str, Tensor]) -> dict[str, Shape]:
    """The whole shape of every tensor that a rank has; collective, and the same on all ranks."""
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return {name: shape for part in gather(own) for name, shape in part.items()}


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


def describe(part: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What is needed to find and to check the tensors; collective."""
    return {
        "tensors": shapes_of_all_ranks(tensors),
        # Each rank sees its own file at least, however slow the disk is to show those of others.
        "shards": sorted({name for names in gather(files.shard_names(part)) for name in names}),
        "versions": {"credit_dp": credit_dp.__version__, "torch": torch.__version__},
    }


def finish(part: Path, path: Path, numbers: dict[str, Any]) -> None:
    """Complete a checkpoint and give it its name."""
    with could_not_be_written(part, numbers["step"]):
        files.finish(part, path, numbers)


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
