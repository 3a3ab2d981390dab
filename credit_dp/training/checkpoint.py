"""Checkpoints: written by all ranks of a mesh, read by those of any other, whole or not at all.

Each rank writes its own shards and reads what it needs of them; nothing is gathered on the way.
"""

from pathlib import Path

from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files as files
from credit_dp.training.agreement import gather, together
from credit_dp.training.checkpoint_writing import (
    Snapshot,
    constants_of,
    shapes_of_all_ranks,
    write,
)
from credit_dp.training.checkpoints_kept import Kept
from credit_dp.training.data_description import check_data
from credit_dp.training.shards import Shape, alone_or_not, check_shards, read_shards, readable
from credit_dp.training.state import GENERATOR, MODEL, OPTIMIZER, TrainingState

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
    constants = constants_of(state)
    snapshot = together(lambda: Snapshot.of(state, config))
    with alone_or_not():
        write(path, snapshot, constants, Kept())
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
        UserError: on all ranks, if one can't read it, or it is of another model, of other data or
            of another optimizer.
    """
    path = together(lambda: files.locate("resume", str(path)))
    numbers = together(lambda: files.read_numbers("resume", path))
    own = shapes_of_all_ranks(state.tensors())
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    together(lambda: check_origin(path, numbers, state))
    check_fit(f"resume: {path}", of_model(saved), of_model(own))
    together(lambda: check_shards("resume", path, saved))
    room = together(lambda: state.make_room(saved))
    read_shards("resume", path, room)
    with readable("resume", path):
        state.go_on(numbers, room[GENERATOR])


def check_origin(path: Path, numbers: files.Numbers, state: TrainingState) -> None:
    """Refuse a checkpoint of other data or of another optimizer."""
    with readable("resume", path):
        check_data(numbers["data"], state.data)
    optimizer = numbers.get(OPTIMIZER, "adamw")
    if optimizer != state.optimizer:
        raise UserError(
            f"resume: the checkpoint was trained with optimizer={optimizer}, the config has "
            f"{state.optimizer}. Set optimizer to that of the checkpoint, or start a new run with "
            "init_from."
        )


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
