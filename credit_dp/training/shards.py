"""Writes sharded tensors to one folder; any mesh can read the parts it needs.

The files are safetensors, so that reading them never executes code. `torch.distributed.checkpoint`
takes a second to import, so the functions below import it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from credit_dp.distributed.collectives import has_process_group
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Shape = tuple[int, ...]

# Errors that torch's reader or ours raises for damaged files.
READ_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def write_shards(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Write this rank's part of tensors, sharded or replicated; collective.

    Call it inside `ignore_single_process_warning`. This function does not enter it itself, because
    it may run in a thread, and warning filters are those of the whole process.

    Raises:
        OSError: on all ranks, if one could not write.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # Torch spreads replicated tensors over the ranks that have them, to balance the load. Here the
    # lowest rank writes them, so that what is saved does not depend on the mesh.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with raise_first_failure():
        save(
            contiguous,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=not has_process_group(),
        )


def check_shards(key: str, folder: Path, expected: dict[str, Shape]) -> None:
    """Check that the shards of a checkpoint are readable and hold exactly the expected tensors.

    Raises:
        UserError: they are damaged, or a tensor is missing, has another shape or is unexpected.
    """
    stored = read_tensor_metadata(key, folder)
    for name, shape in expected.items():
        if name not in stored or tuple(stored[name].size) != shape:
            raise UserError(
                f"{key}: {folder} is not a readable checkpoint (its shards do not hold {name})."
            )
    if len(stored) > len(expected):
        extra = min(stored.keys() - expected.keys())
        raise UserError(
            f"{key}: {folder} is not a readable checkpoint (its shards hold {extra} besides)."
        )


def read_tensor_metadata(key: str, folder: Path) -> dict[str, TensorStorageMetadata]:
    """Read the shape and dtype of all tensors in a folder, by name.

    Raises:
        UserError: the files can't be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with translate_read_errors(key, folder):
        entries = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(
    key: str, folder: Path, tensors: dict[str, Tensor], *, collective: bool = True
) -> None:
    """Fill tensors in place, sharded in any way: each rank reads the parts that it needs.

    All ranks of the run call it, unless `collective` is false.

    Raises:
        UserError: on all ranks, if one could not read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    single_process = not collective or not has_process_group()
    with translate_read_errors(key, folder), ignore_single_process_warning(), raise_first_failure():
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(tensors), storage_reader=reader, no_dist=single_process)


@contextmanager
def translate_read_errors(key: str, folder: Path) -> Iterator[None]:
    """Turn errors of a damaged checkpoint into a `UserError` of one line."""
    try:
        yield
    except READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: {folder} is not a readable checkpoint ({reason}).") from error


@contextmanager
def raise_first_failure() -> Iterator[None]:
    """Raise the error of the lowest rank that failed, instead of torch's collection of errors."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise cause from None


@contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """Silence torch's warning that it saves or loads in a single process, which is intended here.

    Warning filters belong to the whole process: enter this in the main thread only.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
