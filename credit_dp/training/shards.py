"""Sharded tensors on disk: written by all ranks, any other mesh reads the parts that it needs.

The files are safetensors: nothing in them is executed.
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

# What damaged content ends in, in torch's reader or ours.
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
    """Write this rank's share of tensors, sharded or replicated; collective.

    Call it inside `ignore_single_process_warning`, which a thread beside training must not enter
    itself.

    Raises:
        OSError: on all ranks, if one could not write.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # Of what several ranks have, the lowest one's is saved, whatever the mesh.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with raise_first_failure():
        save(
            whole,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=not has_process_group(),
        )


def check_shards(key: str, folder: Path, wanted: dict[str, Shape]) -> None:
    """Refuse shards that are damaged or do not hold the tensors that they should."""
    held = read_tensor_metadata(key, folder)
    for name, shape in wanted.items():
        if name not in held or tuple(held[name].size) != shape:
            raise UserError(
                f"{key}: {folder} is not a readable checkpoint (its shards do not hold {name})."
            )
    if len(held) > len(wanted):
        extra = min(held.keys() - wanted.keys())
        raise UserError(
            f"{key}: {folder} is not a readable checkpoint (its shards hold {extra} besides)."
        )


def read_tensor_metadata(key: str, folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of all tensors in a folder, by name.

    Raises:
        UserError: the files can't be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with translate_read_errors(key, folder):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: held for name, held in found.items() if isinstance(held, TensorStorageMetadata)}


def read_shards(key: str, folder: Path, room: dict[str, Tensor], *, together: bool = True) -> None:
    """Fill tensors, sharded in any way; each rank reads what it needs, which is collective.

    Raises:
        UserError: on all ranks, if one could not read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    alone = not together or not has_process_group()
    with translate_read_errors(key, folder), ignore_single_process_warning(), raise_first_failure():
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(room), storage_reader=reader, no_dist=alone)


@contextmanager
def translate_read_errors(key: str, folder: Path) -> Iterator[None]:
    """Say in one line that a checkpoint can't be read."""
    try:
        yield
    except READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: {folder} is not a readable checkpoint ({reason}).") from error


@contextmanager
def raise_first_failure() -> Iterator[None]:
    """Raise what the first rank that failed has raised, on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise cause from None


@contextmanager
def ignore_single_process_warning() -> Iterator[None]:
    """One process without a process group is as good as several ranks: no warning.

    Which warnings are shown is a matter of the whole process: for its main thread only.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
