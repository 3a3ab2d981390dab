"""Checkpoints: written by all ranks of a mesh, read by those of any other, whole or not at all."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self, final

import torch.distributed as dist
from torch import Tensor

from credit_dp.config.training import TrainerConfig
from credit_dp.data.cache import fingerprint
from credit_dp.distributed.collectives import gather, grouped, own_rank, together
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files
from credit_dp.training.checkpoint_files import (
    VALIDATION,
    Kept,
    Shape,
    alone_or_not,
    as_error,
    check_shards,
    read_shards,
    readable,
    step_folder,
    tidy,
    write_shards,
)
from credit_dp.training.data_description import check_data
from credit_dp.training.run_folder import provenance
from credit_dp.training.state import GENERATOR, MODEL, OPTIMIZER, TrainingState

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint", "save_checkpoint"]


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
    part = checkpoint_files.unfinished_folder(path)
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
            checkpoint_files.abandon(part)
        raise


def begin(part: Path, step: int) -> None:
    """Make the folder to write into."""
    with could_not_be_written(part, step):
        checkpoint_files.begin(part)


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
    shards = gather(checkpoint_files.shard_names(part), group)
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
        checkpoint_files.finish(part, path, {**numbers, "versions": provenance()})
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
    path = checkpoint_files.step_folder(folder, state.step)
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
        path = together(lambda: checkpoint_files.locate("resume", resume))
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
    steps, old = checkpoint_files.whole_steps(own), own.parent / "checkpoint.pt"
    if not steps and old.exists():
        return checkpoint_files.locate("resume", str(old))
    return steps[-1] if steps else None


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Bring `state` to where a checkpoint left it, on any mesh; settings of the config stay.

    Collective: all ranks of the run call it. `path` may be any that `resume` may be.

    Raises:
        UserError: on all ranks, if one can't read it, or it is of another model, of other data or
            of another optimizer.
    """
    path = together(lambda: checkpoint_files.locate("resume", str(path)))
    numbers = together(lambda: checkpoint_files.read_numbers("resume", path))
    own = shapes_of_all_ranks(state.tensors())
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    together(lambda: check_origin(path, numbers, state))
    check_fit(f"resume: {path}", of_model(saved), of_model(own))
    together(lambda: check_shards("resume", path, saved))
    room = together(lambda: state.make_room(saved))
    read_shards("resume", path, room)
    with readable("resume", path):
        state.go_on(numbers, room[GENERATOR])


def check_origin(path: Path, numbers: checkpoint_files.Numbers, state: TrainingState) -> None:
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


# Disks are slower on some ranks than on others, and a rank may start to write long after another.
LONGEST = timedelta(days=1)
LAST_WAIT = 10.0  # seconds for what is being written when the user wants the run to end at once


@final
class Checkpoints:
    """Saves a run's states into a folder; of those before only some stay.

    With `trainer.checkpoint_async` a save copies what this rank has into the host's memory, and a
    thread writes it while training goes on, one checkpoint at a time. The threads of all ranks meet
    in a process group of their own: none of their messages can mix with those of training.

    Collective: all ranks of the run make one, enter it, save and leave it at the same steps.

    Args:
        folder: of the run's checkpoints.
        config: whether to wait for the disk, and what stays.
        step: after which training starts; that state need not be saved.
    """

    def __init__(self, folder: Path, config: TrainerConfig, step: int | None = None) -> None:
        self.folder = folder
        self._behind = config.checkpoint_async
        self._kept = Kept(config.keep_checkpoints, config.keep_best)
        self._step = step
        self._constants: dict[str, Tensor] | None = None
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        import torch.distributed.checkpoint  # noqa: F401 - not first by a thread beside training

        self._open.enter_context(alone_or_not())
        if self._behind and grouped():
            self._group = dist.new_group(timeout=LONGEST, backend="gloo")
        return self

    def save(self, state: TrainingState, config: str, error: float | None = None) -> None:
        """Save what the state is now, unless it was saved after this step already.

        Args:
            state: of this rank.
            config: the resolved one, as YAML.
            error: found on the validation dates at this step, if any was.

        Raises:
            UserError: on all ranks, if this checkpoint or the one before could not be written.
        """
        self.wait()
        if state.step == self._step:
            return
        if self._constants is None:  # they need no copy, and no second reading
            self._constants = constants_of(state)
        snapshot, constants = self._snapshot(state, config, error), self._constants
        path, kept, group = step_folder(self.folder, state.step), self._kept, self._group
        self._step = state.step
        if self._behind:
            self._writing = in_thread(lambda: write(path, snapshot, constants, kept, group))
        else:
            write(path, snapshot, constants, kept)

    def wait(self) -> None:
        """Wait until all that was saved is on disk.

        Raises:
            UserError: on all ranks, if it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def newest(self) -> Path | None:
        """The newest on disk, once what is being written is there; for one rank to ask."""
        if self._writing is not None:
            wait_for([self._writing])  # whether it could be written is asked elsewhere
        return newest(self.folder)

    def _snapshot(self, state: TrainingState, config: str, error: float | None) -> Snapshot:
        snapshot = together(lambda: Snapshot.of(state, config, error))
        return snapshot.copied() if self._behind else snapshot

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            if error is None:
                self.wait()
                if self._group is not None:
                    dist.destroy_process_group(self._group)
            elif self._writing is not None:
                # What ended the run is told; that this failed as well would not be of use.
                wait_for([self._writing], None if isinstance(error, Exception) else LAST_WAIT)


def in_thread(act: Callable[[], None]) -> Future[None]:
    """Do something in a thread that does not keep the program from ending."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return outcome
