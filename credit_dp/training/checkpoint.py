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
from credit_dp.distributed.collectives import (
    all_gather_object,
    global_rank,
    has_process_group,
    run_on_all_ranks,
)
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files
from credit_dp.training.checkpoint_files import (
    VALIDATION_KEY,
    RetentionPolicy,
    apply_retention,
    finite_or_none,
    step_folder,
)
from credit_dp.training.data_description import check_data
from credit_dp.training.run_folder import provenance
from credit_dp.training.shards import (
    Shape,
    check_shards,
    ignore_single_process_warning,
    read_shards,
    translate_read_errors,
    write_shards,
)
from credit_dp.training.state import GENERATOR_KEY, MODEL_PREFIX, OPTIMIZER_KEY, TrainingState

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint", "save_checkpoint"]


@final
@dataclass(frozen=True)
class Snapshot:
    """All that a rank puts into a checkpoint of one step."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @classmethod
    def of(cls, state: TrainingState, config: str, error: float | None = None) -> Self:
        """What the state is now; training on changes its tensors.

        Args:
            state: of this rank.
            config: the resolved one, as YAML.
            error: found on the validation dates at this step, if any was.
        """
        numbers = {**state.metadata(), "config": config, VALIDATION_KEY: finite_or_none(error)}
        return cls(state.tensors(), deepcopy(numbers))

    def cpu_copy(self) -> "Snapshot":
        """The same with tensors of its own, in the host's memory."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self.tensors.items()
        }
        return Snapshot(tensors, self.metadata)


def read_constant_fields(state: TrainingState) -> dict[str, Tensor]:
    """What a checkpoint carries besides, which rank 0 has and the others leave to it; collective.

    Raises:
        UserError: on all ranks, if they can't be read.
    """
    return run_on_all_ranks(lambda: state.constant_fields() if global_rank() == 0 else {})


def write_checkpoint(
    path: Path,
    snapshot: Snapshot,
    constants: dict[str, Tensor],
    kept: RetentionPolicy,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `path`, and remove those that need not stay then; collective.

    Those before stay until the new one is whole and on disk. `group` has all ranks; nobody else
    uses it meanwhile.

    Raises:
        UserError: on all ranks, if one could not write, for instance because the disk is full.
    """
    part = checkpoint_files.temporary_folder(path)
    first, step = global_rank() == 0, snapshot.metadata["step"]
    try:
        run_on_all_ranks(lambda: begin_checkpoint(part, step) if first else None, group)
        run_on_all_ranks(lambda: check_shared_folder(part), group)
        tensors = {**snapshot.tensors, **constants}
        with translate_checkpoint_write_errors(part, step):
            write_shards(part, tensors, group)
        numbers = {**snapshot.metadata, **describe_tensors(part, snapshot, tensors, group)}
        run_on_all_ranks(
            lambda: commit_checkpoint(part, path, numbers, kept) if first else None, group
        )
    except UserError:
        if first:
            checkpoint_files.remove_temporary_folder(part)
        raise


def begin_checkpoint(part: Path, step: int) -> None:
    """Make the folder to write into."""
    with translate_checkpoint_write_errors(part, step):
        checkpoint_files.create_temporary_folder(part)


def check_shared_folder(part: Path) -> None:
    """Refuse a folder that only some of the ranks see."""
    if not part.is_dir():
        raise UserError(
            f"{part.parent}: has to be on a disk that all machines share, but rank {global_rank()} "
            "does not see what rank 0 wrote there. Change run.dir."
        )


def describe_tensors(
    part: Path, snapshot: Snapshot, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """What is needed to find and to check the tensors, and what they are for; collective."""
    # Each rank sees its own file at least, however slow the disk is to show those of others.
    shards = all_gather_object(checkpoint_files.shard_names(part), group)
    return {
        "tensors": gather_shapes(tensors, group),
        "shards": sorted({name for names in shards for name in names}),
        "statistics_fingerprint": fingerprint(snapshot.metadata["data"].get("statistics")),
    }


def gather_shapes(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Shape]:
    """The whole shape of every tensor that a rank has; collective, and the same on all ranks."""
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return {name: shape for part in all_gather_object(own, group) for name, shape in part.items()}


def commit_checkpoint(
    part: Path, path: Path, numbers: dict[str, Any], kept: RetentionPolicy
) -> None:
    """Complete a checkpoint, which says what code made it, and give it its name."""
    with translate_checkpoint_write_errors(part, numbers["step"]):
        checkpoint_files.commit_checkpoint(part, path, {**numbers, "versions": provenance()})
        apply_retention(path, kept)


@contextmanager
def translate_checkpoint_write_errors(part: Path, step: int) -> Iterator[None]:
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
    constants = read_constant_fields(state)
    snapshot = run_on_all_ranks(lambda: Snapshot.of(state, config))
    with ignore_single_process_warning():
        write_checkpoint(path, snapshot, constants, RetentionPolicy())
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
        path = run_on_all_ranks(lambda: newest_checkpoint(own))
    else:
        path = run_on_all_ranks(lambda: checkpoint_files.locate_checkpoint("resume", resume))
    seen = all_gather_object(path)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(
                f"resume: all ranks have to see the same checkpoint, but rank {rank} sees "
                f"{other or 'none'} and rank 0 {seen[0] or 'none'}. "
                "Put run.dir on a disk that all machines share."
            )
    return path


def newest_checkpoint(own: Path) -> Path | None:
    """The newest checkpoint in the run's own folder, if it has one yet.

    Raises:
        UserError: it has one of an earlier version, which is a file.
    """
    steps, old = checkpoint_files.list_checkpoints(own), own.parent / "checkpoint.pt"
    if not steps and old.exists():
        return checkpoint_files.locate_checkpoint("resume", str(old))
    return steps[-1] if steps else None


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Bring `state` to where a checkpoint left it, on any mesh; settings of the config stay.

    Collective: all ranks of the run call it. `path` may be any that `resume` may be.

    Raises:
        UserError: on all ranks, if one can't read it, or it is of another model, of other data or
            of another optimizer.
    """
    path = run_on_all_ranks(lambda: checkpoint_files.locate_checkpoint("resume", str(path)))
    numbers = run_on_all_ranks(lambda: checkpoint_files.read_metadata("resume", path))
    own = gather_shapes(state.tensors())
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    run_on_all_ranks(lambda: check_data_and_optimizer(path, numbers, state))
    check_model_shapes(f"resume: {path}", model_shapes(saved), model_shapes(own))
    run_on_all_ranks(lambda: check_shards("resume", path, saved))
    room = run_on_all_ranks(lambda: state.allocate_tensors(saved))
    read_shards("resume", path, room)
    with translate_read_errors("resume", path):
        state.load_metadata(numbers, room[GENERATOR_KEY])


def check_data_and_optimizer(
    path: Path, numbers: checkpoint_files.Metadata, state: TrainingState
) -> None:
    """Refuse a checkpoint of other data or of another optimizer."""
    with translate_read_errors("resume", path):
        check_data(numbers["data"], state.data)
    optimizer = numbers.get(OPTIMIZER_KEY, "adamw")
    if optimizer != state.optimizer_name:
        raise UserError(
            f"resume: the checkpoint was trained with optimizer={optimizer}, the config has "
            f"{state.optimizer_name}. Set optimizer to that of the checkpoint, or start a new "
            "run with "
            "init_from."
        )


def check_model_shapes(
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


def model_shapes(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Those of the model, by the names that they have there."""
    return {
        name.removeprefix(MODEL_PREFIX): shape
        for name, shape in shapes.items()
        if name.startswith(MODEL_PREFIX)
    }


# Disks are slower on some ranks than on others, and a rank may start to write long after another.
WRITE_TIMEOUT = timedelta(days=1)
INTERRUPT_TIMEOUT = (
    10.0  # seconds for what is being written when the user wants the run to end at once
)


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
        self._in_background = config.checkpoint_async
        self._retention = RetentionPolicy(config.keep_checkpoints, config.keep_best)
        self._saved_step = step
        self._constants: dict[str, Tensor] | None = None
        self._group: dist.ProcessGroup | None = None
        self._pending_write: Future[None] | None = None
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        import torch.distributed.checkpoint  # noqa: F401 - not first by a thread beside training

        self._exit_stack.enter_context(ignore_single_process_warning())
        if self._in_background and has_process_group():
            self._group = dist.new_group(timeout=WRITE_TIMEOUT, backend="gloo")
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
        if state.step == self._saved_step:
            return
        if self._constants is None:  # they need no copy, and no second reading
            self._constants = read_constant_fields(state)
        snapshot, constants = self._snapshot(state, config, error), self._constants
        path, kept, group = step_folder(self.folder, state.step), self._retention, self._group
        self._saved_step = state.step
        if self._in_background:
            self._pending_write = run_in_thread(
                lambda: write_checkpoint(path, snapshot, constants, kept, group)
            )
        else:
            write_checkpoint(path, snapshot, constants, kept)

    def wait(self) -> None:
        """Wait until all that was saved is on disk.

        Raises:
            UserError: on all ranks, if it could not be written.
        """
        writing, self._pending_write = self._pending_write, None
        if writing is not None:
            writing.result()

    def newest_checkpoint(self) -> Path | None:
        """The newest on disk, once what is being written is there; for one rank to ask."""
        if self._pending_write is not None:
            wait_for([self._pending_write])  # whether it could be written is asked elsewhere
        return newest_checkpoint(self.folder)

    def _snapshot(self, state: TrainingState, config: str, error: float | None) -> Snapshot:
        snapshot = run_on_all_ranks(lambda: Snapshot.of(state, config, error))
        return snapshot.cpu_copy() if self._in_background else snapshot

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._exit_stack:
            if error is None:
                self.wait()
                if self._group is not None:
                    dist.destroy_process_group(self._group)
            elif self._pending_write is not None:
                # What ended the run is told; that this failed as well would not be of use.
                wait_for(
                    [self._pending_write],
                    None if isinstance(error, Exception) else INTERRUPT_TIMEOUT,
                )


def run_in_thread(act: Callable[[], None]) -> Future[None]:
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
