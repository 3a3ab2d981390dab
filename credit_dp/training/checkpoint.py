"""Saves and loads checkpoints: written by the ranks of one mesh, readable on any other.

A save takes a `Snapshot` synchronously; the snapshot is then written by `write_checkpoint`, at once
or in a background thread (see `CheckpointSaver`). A checkpoint is complete or absent: files and
their order are in `checkpoint_files`.

Nearly every function here is collective. Steps that may fail on one rank alone run inside
`run_on_all_ranks`, which raises the error of one rank on all of them: otherwise the others would
wait for it in the next collective.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self, final

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from credit_dp.config.training import TrainerConfig
from credit_dp.data.cache import fingerprint
from credit_dp.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    gather_from_all_ranks,
    gather_on_rank_0,
    global_rank,
    has_process_group,
    result_or_raise,
    run_catching,
    run_on_all_ranks,
    run_on_rank_0,
)
from credit_dp.distributed.process_groups import join_background_group
from credit_dp.errors import UserError
from credit_dp.files import temporary_path
from credit_dp.training import checkpoint_files
from credit_dp.training.checkpoint_files import (
    METADATA_FILE,
    VALIDATION_KEY,
    RetentionPolicy,
    apply_retention,
    finite_or_none,
    step_folder,
)
from credit_dp.training.checkpoint_shards import (
    Shape,
    Shards,
    TensorPart,
    local_parts,
    shard_name,
    translate_read_errors,
    write_shard,
)
from credit_dp.training.data_description import check_data
from credit_dp.training.parameter_shards import is_dtensor
from credit_dp.training.run_folder import provenance
from credit_dp.training.state import GENERATOR_KEY, MODEL_PREFIX, OPTIMIZER_KEY, TrainingState

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint"]


@final
@dataclass(frozen=True)
class WrittenTensors:
    """Which tensors a checkpoint has, and which of them this rank writes.

    A tensor that several ranks hold is written by the lowest of them, so that what is saved does
    not depend on the mesh. Of a `DTensor` every rank writes its shard, if no lower rank has the
    same. Ranks that write nothing copy nothing to the host's memory.

    Attributes:
        digests: of the names and shapes of every rank's tensors. The other attributes follow from
            them.
        shapes: unsharded shapes of the tensors of all ranks.
        lowest_ranks: the lowest rank that holds each tensor of this rank.
    """

    digests: list[str]
    shapes: dict[str, Shape]
    lowest_ranks: dict[str, int]

    @classmethod
    def agree(cls, shapes: dict[str, Shape], digests: list[str]) -> Self:
        """Find out which ranks hold which tensors; collective.

        Ranks with equal digests have equal tables of shapes, so that only one of them sends its
        table, and none does if all are equal. Without a pipeline they are.

        Args:
            shapes: unsharded shapes of this rank's tensors.
            digests: of the shapes of all ranks, see `digest_of`.
        """
        first_ranks = [digests.index(digest) for digest in dict.fromkeys(digests)]
        all_shapes: dict[str, Shape] = {}
        lowest: dict[str, int] = {}
        for rank in first_ranks:
            table = broadcast_object(shapes, rank) if len(first_ranks) > 1 else shapes
            for name, shape in table.items():
                all_shapes.setdefault(name, shape)
                lowest.setdefault(name, rank)
        return cls(digests, all_shapes, {name: lowest[name] for name in shapes})

    def is_written_by(self, rank: int, name: str, tensor: Tensor) -> bool:
        """Whether a rank writes what it holds of a tensor."""
        lowest = self.lowest_ranks[name]
        if not is_dtensor(tensor):
            return rank == lowest
        mesh = tensor.device_mesh
        replica = (
            mesh.get_local_rank(dim)
            for dim, placement in enumerate(tensor.placements)
            if placement.is_replicate()
        )
        return lowest in mesh.mesh and not any(replica)


def digest_of(shapes: dict[str, Shape]) -> str:
    """Return a digest of names and shapes, whatever their order."""
    return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, Shape]:
    """Return the unsharded shapes of tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def gather_shapes(tensors: dict[str, Tensor]) -> dict[str, Shape]:
    """Return the unsharded shapes of the tensors of all ranks; collective."""
    shapes = shapes_of(tensors)
    return WrittenTensors.agree(shapes, all_gather_object(digest_of(shapes))).shapes


@final
@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to a checkpoint: the parts of tensors that it writes, and metadata.

    Attributes:
        parts: of tensors; not copied, unless by `cpu_copy`.
        metadata: the content of `state.json`; complete on rank 0, which writes it.
    """

    parts: list[TensorPart]
    metadata: dict[str, Any]

    def cpu_copy(self) -> "Snapshot":
        """Return a snapshot with copies of the parts in the host's memory."""
        return Snapshot([part.cpu_copy() for part in self.parts], self.metadata)


INTERRUPT_TIMEOUT = 10.0  # seconds that an interrupted run waits for a checkpoint being written


@final
class CheckpointSaver:
    """Saves a run's checkpoints, and removes checkpoints that need not be kept.

    With `trainer.checkpoint_async`, a save copies this rank's tensors to the host's memory, and a
    thread writes them while training continues, one checkpoint at a time. The messages of these
    threads do not mix with those of training, see `join_background_group`.

    Collective: all ranks of the run create it, enter it, save and leave it at the same steps.

    Args:
        folder: of the run's checkpoints.
        config: whether to write in the background, and which checkpoints stay.
        step: the last step before training starts: that state is not saved again.
    """

    def __init__(self, folder: Path, config: TrainerConfig, step: int | None = None) -> None:
        self.folder = folder
        self._in_background = config.checkpoint_async
        self._retention = RetentionPolicy(config.keep_checkpoints, config.keep_best)
        self._saved_step = step
        self._constant_fields: dict[str, Tensor] | None = None
        self._written: WrittenTensors | None = None
        self._folder_is_shared = False
        self._group: dist.ProcessGroup | None = None
        self._pending_write: Future[None] | None = None

    def __enter__(self) -> Self:
        # Imported here, so that the first save does not take longer than others.
        import torch.distributed.checkpoint  # noqa: F401

        if self._in_background and has_process_group():
            self._group = join_background_group()
        return self

    def save(self, state: TrainingState, config: str, error: float | None = None) -> None:
        """Save the present state, unless this step has been saved already.

        Args:
            state: of this rank.
            config: the resolved config, as YAML.
            error: the validation error at this step, if there is one.

        Raises:
            UserError: on all ranks, if this checkpoint or the previous one could not be written.
        """
        self.wait()
        if state.step == self._saved_step:
            return
        if self._constant_fields is None:  # read once, for all checkpoints
            self._constant_fields = read_constant_fields(state)
        snapshot = self._snapshot(state, config, error)
        if self._in_background:
            snapshot = snapshot.cpu_copy()
        check_folder, self._folder_is_shared = not self._folder_is_shared, True
        write = partial(
            write_checkpoint,
            step_folder(self.folder, state.step),
            snapshot,
            self._retention,
            self._group,
            check_folder=check_folder,
        )
        self._saved_step = state.step
        if self._in_background:
            self._pending_write = run_in_thread(write)
        else:
            write()

    def wait(self) -> None:
        """Wait until the last saved checkpoint is on disk.

        Raises:
            UserError: on all ranks, if it could not be written.
        """
        pending, self._pending_write = self._pending_write, None
        if pending is not None:
            pending.result()

    def newest_checkpoint(self) -> Path | None:
        """Wait for a pending write, then return the newest checkpoint on disk; not collective."""
        if self._pending_write is not None:
            wait_for([self._pending_write])  # an error of it is raised by `wait`
        return newest_checkpoint(self.folder)

    def _snapshot(self, state: TrainingState, config: str, error: float | None) -> Snapshot:
        """Return what this rank writes of the present state, not copied; collective."""
        found = run_catching(state.tensors)
        # In the group of training, whose time-out is that of a step: a rank that hangs is noticed.
        digests = gather_from_all_ranks(lambda: digest_of(shapes_of(result_or_raise(found))))
        tensors = result_or_raise(found)
        # All ranks compare the same digests, and so all or none of them agree anew. They do if the
        # optimizer has allocated its tensors since the last save.
        if self._written is None or self._written.digests != digests:
            self._written = WrittenTensors.agree(shapes_of(tensors), digests)
        written, rank = self._written, global_rank()
        parts = local_parts(
            {n: t for n, t in tensors.items() if written.is_written_by(rank, n, t)}
            | (self._constant_fields or {})
        )
        constant_shapes = shapes_of(self._constant_fields or {})  # on rank 0, which writes metadata
        metadata = {
            **state.metadata(),
            "config": config,
            VALIDATION_KEY: finite_or_none(error),
            "tensors": {**written.shapes, **constant_shapes},
        }
        return Snapshot(parts, deepcopy(metadata))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.wait()
            if self._group is not None and self._group is not dist.group.WORLD:
                dist.destroy_process_group(self._group)
        elif self._pending_write is not None:
            # The error that ended the run is raised; one of this write would only hide it.
            wait_for(
                [self._pending_write],
                None if isinstance(error, Exception) else INTERRUPT_TIMEOUT,
            )


def run_in_thread(task: Callable[[], None]) -> Future[None]:
    """Run a task in a daemon thread, which does not keep the program from ending.

    An executor of the standard library would: Python joins its threads at exit.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


ADVICE = "Change the model or data group to that of the checkpoint, or resume."


def find_checkpoint(resume: str | None, folder: Path) -> Path | None:
    """Return the checkpoint to start from, or None for a fresh start.

    Collective: all ranks of the run call it.

    Args:
        resume: None, `auto` (the newest in `folder`, if there is one yet), or the path of a
            checkpoint, of a folder of checkpoints, or of a run.
        folder: the checkpoints of this run.

    Raises:
        UserError: on all ranks, if there is no checkpoint at a path, or if the ranks see different
            checkpoints.
    """
    if resume is None:
        return None
    if resume == "auto":
        path = run_on_rank_0(lambda: newest_checkpoint(folder))
    else:
        path = run_on_rank_0(lambda: checkpoint_files.locate_checkpoint("resume", resume))

    def check_seen() -> None:
        # Others than rank 0 look into the folder only where rank 0 found nothing: then, as a rule,
        # there is no folder.
        seen = newest_checkpoint(folder) if path is None else path
        if seen is not None and (path is None or not (path / METADATA_FILE).is_file()):
            raise UserError(
                f"resume: all ranks have to see the same checkpoint, but rank {global_rank()} sees "
                f"{seen if path is None else 'none'} and rank 0 {path or 'none'}. "
                "Put run.dir on a disk that all machines share."
            )

    run_on_all_ranks(check_seen)
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or None if there is none.

    Raises:
        UserError: beside the folder there is only a checkpoint of an earlier version, a file.
    """
    checkpoints = checkpoint_files.list_checkpoints(folder)
    old_file = folder.parent / "checkpoint.pt"
    if not checkpoints and old_file.exists():
        return checkpoint_files.locate_checkpoint("resume", str(old_file))
    return checkpoints[-1] if checkpoints else None


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Restore `state` from a checkpoint of any mesh; settings of the present config stay.

    Collective: all ranks of the run call it. `path` may be any path that `resume` takes.

    Raises:
        UserError: on all ranks, if one can't read it, or it is of another model, of other data or
            of another optimizer.
    """
    path, metadata, shards = run_on_rank_0(lambda: open_checkpoint("resume", path))
    current = gather_shapes(state.tensors())
    saved = {name: tuple(shape) for name, shape in metadata["tensors"].items()}
    # Everything is checked before the first tensor is read: a refused checkpoint leaves the state
    # as it is. Only damaged entries are found later, by the ranks that read them.
    run_on_all_ranks(lambda: check_data_and_optimizer(path, metadata, state))
    # Shapes were gathered, so all ranks compare the same and need not agree on the outcome.
    check_model_shapes(f"resume: {path}", model_shapes(saved), model_shapes(current))
    tensors = run_on_all_ranks(lambda: state.allocate_tensors(saved))
    run_on_all_ranks(lambda: shards.read(tensors))
    with translate_read_errors("resume", path):
        state.load_metadata(metadata, tensors[GENERATOR_KEY])


def open_checkpoint(key: str, path: Path) -> tuple[Path, checkpoint_files.Metadata, Shards]:
    """Return the path, the metadata and the shards of a checkpoint, given any path around it.

    Raises:
        UserError: there is no checkpoint, or it can't be read.
    """
    path = checkpoint_files.locate_checkpoint(key, str(path))
    metadata = checkpoint_files.read_metadata(key, path)
    return path, metadata, Shards.open(key, path, metadata)


def check_data_and_optimizer(
    path: Path, metadata: checkpoint_files.Metadata, state: TrainingState
) -> None:
    """Check that a checkpoint was trained on the same data with the same optimizer.

    Raises:
        UserError: it was not, or its metadata are damaged.
    """
    with translate_read_errors("resume", path):
        check_data(metadata["data"], state.data)
    optimizer = metadata.get(OPTIMIZER_KEY, "adamw")
    if optimizer != state.optimizer_name:
        raise UserError(
            f"resume: the checkpoint was trained with optimizer={optimizer}, the config has "
            f"{state.optimizer_name}. Set optimizer to that of the checkpoint, or start a new "
            "run with init_from."
        )


def check_model_shapes(
    where: str, saved: dict[str, Shape], model: dict[str, Shape], advice: str = ADVICE
) -> None:
    """Check that a checkpoint has all tensors of a model with their shapes, and no others."""
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
    """Return the shapes of a checkpoint's model tensors, by their names in the model."""
    return {
        name.removeprefix(MODEL_PREFIX): shape
        for name, shape in shapes.items()
        if name.startswith(MODEL_PREFIX)
    }


def read_constant_fields(state: TrainingState) -> dict[str, Tensor]:
    """Read the fields that do not change in training, on rank 0 only; collective.

    Raises:
        UserError: on all ranks, if the fields can't be read.
    """
    return run_on_all_ranks(lambda: state.constant_fields() if global_rank() == 0 else {})


def write_checkpoint(
    path: Path,
    snapshot: Snapshot,
    retention: RetentionPolicy,
    group: dist.ProcessGroup | None = None,
    check_folder: bool = True,
) -> None:
    """Write the checkpoint `path`, then remove checkpoints that need not be kept; collective.

    Earlier checkpoints stay until the new one is complete and on disk. Rank 0 tells the others that
    the folder exists, they send the names and records of their files to rank 0, and it tells them
    that all is done.

    Args:
        path: of the checkpoint.
        snapshot: of this rank.
        retention: which checkpoints stay.
        group: what `join_background_group` returns, if a thread calls this; None: the default
            group.
        check_folder: whether ranks that write nothing look for the folder, too.

    Raises:
        UserError: on all ranks, if one could not write, for instance because the disk is full.
    """
    temporary = temporary_path(path)
    step = snapshot.metadata["step"]

    def write_part() -> dict[str, Any]:
        if snapshot.parts or check_folder:
            check_shared_folder(temporary)
        if not snapshot.parts:
            return {}
        name = shard_name(global_rank())
        with translate_checkpoint_write_errors(temporary, step):
            return {name: write_shard(temporary / name, snapshot.parts)}

    try:
        run_on_rank_0(lambda: begin_checkpoint(temporary, step), group)
        outcomes = gather_on_rank_0(write_part, group)

        def commit() -> None:
            shards = {
                name: record
                for outcome in outcomes
                for name, record in result_or_raise(outcome).items()
            }
            statistics = snapshot.metadata["data"].get("statistics")
            metadata = {
                **snapshot.metadata,
                "shards": dict(sorted(shards.items())),
                "statistics_fingerprint": fingerprint(statistics),
            }
            commit_checkpoint(temporary, path, metadata, retention)

        run_on_rank_0(commit, group)
    except UserError:
        if global_rank() == 0:
            checkpoint_files.remove_temporary_folder(temporary)
        raise


def begin_checkpoint(temporary: Path, step: int) -> None:
    """Create the temporary folder of a checkpoint."""
    with translate_checkpoint_write_errors(temporary, step):
        checkpoint_files.create_temporary_folder(temporary)


def check_shared_folder(temporary: Path) -> None:
    """Check that this rank sees the folder that rank 0 has created.

    Raises:
        UserError: it does not.
    """
    if not temporary.is_dir():
        raise UserError(
            f"{temporary.parent}: has to be on a disk that all machines share, but rank "
            f"{global_rank()} does not see what rank 0 wrote there. Change run.dir."
        )


def commit_checkpoint(
    temporary: Path, path: Path, metadata: dict[str, Any], retention: RetentionPolicy
) -> None:
    """Write the metadata with the code's versions, name the checkpoint, and remove old ones."""
    with translate_checkpoint_write_errors(temporary, metadata["step"]):
        checkpoint_files.commit_checkpoint(temporary, path, {**metadata, "versions": provenance()})
        apply_retention(path, retention)


@contextmanager
def translate_checkpoint_write_errors(temporary: Path, step: int) -> Iterator[None]:
    """Turn an error of the disk, or of full memory, into a `UserError` of one line."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(
            f"{temporary.parent}: the checkpoint of step {step} could not be written "
            f"({reason or type(error).__name__}). The previous one is untouched; free space there "
            "or change run.dir, then continue with resume=auto."
        ) from error
