"""Saves and loads checkpoints: written by the ranks of one mesh, readable on any other.

A save finds out which of its tensors this rank writes (`TensorTable`), copies them if it writes in
the background, and calls `write_checkpoint`, at once or in a thread. A checkpoint is complete or
absent: files and their order are in `checkpoint_files`, what they hold is in `state`.

Nearly every function here is collective. Steps that may fail on one rank alone run inside
`run_on_all_ranks`, which raises the error of one rank on all of them: otherwise the others would
wait for it in the next collective.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, Self, final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from credit_dp.config.model import FIXER_KEYS, ModelConfig, OwnModelConfig
from credit_dp.config.training import TrainerConfig
from credit_dp.data.cache import fingerprint
from credit_dp.distributed.collectives import (
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
from credit_dp.fields import Fields
from credit_dp.files import temporary_path
from credit_dp.models import build_model
from credit_dp.process import complete
from credit_dp.training.checkpoint_files import (
    METADATA_FILE,
    VALIDATION_KEY,
    VALIDATION_KEYS_KEY,
    Metadata,
    RetentionPolicy,
    apply_retention,
    commit_checkpoint,
    create_temporary_folder,
    finite_or_none,
    list_checkpoints,
    locate_checkpoint,
    step_folder,
)
from credit_dp.training.checkpoint_shards import (
    Checkpoint,
    Shape,
    TensorPart,
    local_parts,
    shard_name,
    write_shard,
)
from credit_dp.training.data_description import check_data
from credit_dp.training.parameter_shards import is_dtensor
from credit_dp.training.run_folder import provenance
from credit_dp.training.state import GENERATOR_KEY, MODEL_PREFIX, OPTIMIZER_KEY, TrainingState


@final
@dataclass(frozen=True)
class TensorTable:
    """Which tensors a checkpoint has, and which ranks hold them.

    Attributes:
        shapes: unsharded shapes of the tensors of all ranks.
        lowest_ranks: the lowest rank that holds each of them.
    """

    shapes: dict[str, Shape]
    lowest_ranks: dict[str, int]

    @classmethod
    def gather(cls, tensors: Callable[[], dict[str, Tensor]]) -> Self:
        """Find out which ranks hold which tensors; collective.

        Ranks with equal digests have equal tables of shapes, so that only one of them sends its
        table, and none does if all are equal. Without a pipeline they are.

        Args:
            tensors: returns this rank's tensors.

        Raises:
            UserError: on all ranks, if `tensors` raises one.
        """
        found = run_catching(lambda: shapes_of(tensors()))
        digests = gather_from_all_ranks(lambda: digest_of(result_or_raise(found)))
        return cls.agree(result_or_raise(found), digests)

    @classmethod
    def agree(cls, shapes: dict[str, Shape], digests: list[str]) -> Self:
        """Return the table of all ranks, given this rank's shapes and all ranks' digests."""
        first_ranks = [digests.index(digest) for digest in dict.fromkeys(digests)]
        all_shapes: dict[str, Shape] = {}
        lowest: dict[str, int] = {}
        for rank in first_ranks:
            table = broadcast_object(shapes, rank) if len(first_ranks) > 1 else shapes
            all_shapes = table | all_shapes
            lowest = dict.fromkeys(table, rank) | lowest
        return cls(all_shapes, lowest)

    def is_written_by(self, rank: int, name: str, tensor: Tensor) -> bool:
        """Whether a rank writes what it holds of a tensor.

        A tensor that several ranks hold is written by the lowest of them, so that what is saved
        does not depend on the mesh. Of a `DTensor` every rank writes its shard, if no lower rank
        has the same.
        """
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
        self._validation_keys = config.validation_keys
        self._saved_step = step
        self._constant_fields: dict[str, Tensor] | None = None
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
        # In the group of training, whose time-out is that of a step: a rank that hangs is noticed.
        table, rank = TensorTable.gather(state.tensors), global_rank()
        tensors = {n: t for n, t in state.tensors().items() if table.is_written_by(rank, n, t)}
        parts = local_parts(tensors | self._constant_fields)
        if self._in_background:
            parts = [part.cpu_copy() for part in parts]
        metadata = {
            **state.metadata(),
            "config": config,
            VALIDATION_KEY: finite_or_none(error),
            VALIDATION_KEYS_KEY: self._validation_keys,
            "tensors": table.shapes | shapes_of(self._constant_fields),
        }
        path = step_folder(self.folder, state.step)
        write = partial(
            write_checkpoint, path, parts, deepcopy(metadata), self._retention, self._group
        )
        self._saved_step = state.step
        if self._in_background:
            self._pending_write = Future()
            arguments = (self._pending_write, write)
            Thread(target=complete, args=arguments, name="checkpoint", daemon=True).start()
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
        path = run_on_rank_0(lambda: locate_checkpoint("resume", resume))

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
    """Return the newest checkpoint in a folder, or None if there is none."""
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Restore `state` from a checkpoint of any mesh; settings of the present config stay.

    Collective: all ranks of the run call it. `path` may be any path that `resume` takes.

    Raises:
        UserError: on all ranks, if one can't read it, or it is of another model, of other data or
            of another optimizer.
    """
    checkpoint = run_on_rank_0(lambda: Checkpoint.open("resume", path))
    metadata = checkpoint.metadata
    table = TensorTable.gather(state.tensors)
    # Everything is checked before the first tensor is read: a refused checkpoint leaves the state
    # as it is. Only damaged entries are found later, by the ranks that read them.
    run_on_all_ranks(lambda: check_data_and_optimizer(metadata, state))
    # Shapes were gathered, so all ranks compare the same and need not agree on the outcome.
    where = f"resume: {checkpoint.folder}"
    check_model_shapes(where, model_shapes(checkpoint.shapes), model_shapes(table.shapes))
    tensors = run_on_all_ranks(lambda: state.allocate_tensors(checkpoint.shapes, checkpoint.dtype))
    run_on_all_ranks(lambda: checkpoint.read(tensors))
    state.load_metadata(metadata, tensors[GENERATOR_KEY])


def check_data_and_optimizer(metadata: Metadata, state: TrainingState) -> None:
    """Check that a checkpoint was trained on the same data with the same optimizer.

    Raises:
        UserError: it was not.
    """
    check_data(metadata["data"], state.data)
    check_optimizer(metadata, state.optimizer_name)


def check_optimizer(metadata: Metadata, name: str) -> None:
    """Refuse a checkpoint of another optimizer."""
    optimizer = metadata[OPTIMIZER_KEY]
    if optimizer != name:
        raise UserError(
            f"resume: the checkpoint was trained with optimizer={optimizer}, the config has "
            f"{name}. Set optimizer to that of the checkpoint, or start a new "
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


def check_model_size(
    where: str,
    config: ModelConfig,
    fields: Fields,
    grid: tuple[int, int],
    saved: Mapping[str, Shape],
    advice: str = ADVICE,
) -> None:
    """Refuse a config that comes with weights and is of a far larger model, before it is built.

    Anybody may have written it, and the model might be larger than the memory, or take days to
    build. Here it is built without data, until it has many more weights than there are.

    Raises:
        UserError: it is larger, or it can't be built on this grid.
    """
    limit = 10**6 + 10 * sum(map(prod, saved.values()))
    larger = UserError(f"{where} has far fewer weights than the model of its config. {advice}")
    # Lists of Python are as long as whole numbers say. Those of plug-ins can be anything.
    if not isinstance(config, OwnModelConfig):
        values = [value for key, value in asdict(config).items() if key not in FIXER_KEYS]
        lists = [value if isinstance(value, list) else [value] for value in values]
        if any(isinstance(x, int) and x > limit for x in chain([fields.inputs], *lists)):
            raise larger
    count = 0

    def add(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += parameter.numel()
        if count > limit:
            raise larger

    hook = register_module_parameter_registration_hook(add)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            build_model(config, fields, grid)
    except UserError:
        raise
    except Exception:  # noqa: BLE001 - of constructors that need the values of tensors
        return
    finally:
        hook.remove()


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
    parts: Sequence[TensorPart],
    metadata: Metadata,
    retention: RetentionPolicy,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `path`, then remove checkpoints that need not be kept; collective.

    Earlier checkpoints stay until the new one is complete and on disk. Rank 0 tells the others that
    the folder exists, they send the names and records of their files to rank 0, and it tells them
    that all is done.

    Args:
        path: of the checkpoint.
        parts: of tensors, which this rank writes.
        metadata: the content of `state.json`; complete on rank 0, which writes it.
        retention: which checkpoints stay.
        group: what `join_background_group` returns, if a thread calls this; None: the default
            group.

    Raises:
        UserError: on all ranks, if one could not write, for instance because the disk is full.
    """
    temporary = temporary_path(path)
    write_errors = partial(translate_write_errors, temporary, metadata["step"])

    def begin() -> None:
        with write_errors():
            create_temporary_folder(temporary)

    def write_part() -> dict[str, Any]:
        if not temporary.is_dir():
            raise UserError(
                f"{temporary.parent}: has to be on a disk that all machines share, but rank "
                f"{global_rank()} does not see what rank 0 wrote there. Change run.dir."
            )
        name = shard_name(global_rank())
        with write_errors():
            return {name: write_shard(temporary / name, parts)} if parts else {}

    def commit() -> None:
        of_ranks = [result_or_raise(outcome) for outcome in outcomes]
        shards = {name: record for of_rank in of_ranks for name, record in of_rank.items()}
        content = {
            **metadata,
            "shards": dict(sorted(shards.items())),
            "statistics_fingerprint": fingerprint(metadata["data"].get("statistics")),
            "versions": provenance(),
        }
        with write_errors():
            commit_checkpoint(temporary, path, content)
            apply_retention(path, retention)

    try:
        run_on_rank_0(begin, group)
        outcomes = gather_on_rank_0(write_part, group)
        run_on_rank_0(commit, group)
    except UserError:
        if global_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def translate_write_errors(temporary: Path, step: int) -> Iterator[None]:
    """Turn an error of the disk, or of full memory, into a `UserError` of one line."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        cure = "Free space there or change run.dir, then start again."
        with suppress(OSError):  # the disk may be gone
            if list_checkpoints(temporary.parent):
                cure = (
                    "The previous one is untouched; free space there or change run.dir, then "
                    "continue with resume=auto."
                )
        raise UserError(
            f"{temporary.parent}: the checkpoint of step {step} could not be written "
            f"({reason or type(error).__name__}). {cure}"
        ) from error
