"""The tensors of a checkpoint in shards: ranks write a file each, any mesh reads what it needs.

The files are safetensors, so that reading them never executes code, as torch's
`HuggingFaceStorageWriter` writes them: parts of tensors and, in the header, where each part begins
in the unsharded tensor. The header also has checksums of blocks of rows, for which that writer has
no place. Torch's planners decide which part a rank has to write, and which entries it has to read;
its `HuggingFaceStorageReader` reads the headers.

Complex numbers are saved as pairs of real ones, as safetensors has no complex128.

`torch.distributed.checkpoint` takes a second to import, so the functions below import it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import (
    SHARD_SUFFIX,
    Metadata,
    locate_checkpoint,
    older_checkpoint_advice,
    read_metadata,
    shard_record,
)
from credit_dp.training.parameter_shards import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.planner import ReadItem

Shape = tuple[int, ...]

# Entries of a file's header. The first two are those of torch's own writer of safetensors.
OFFSETS_KEY = "DCP_SHARDING_INFO"
SAVED_OFFSETS_KEY = "saved_offsets"
CHECKSUMS_KEY = "checksums"
BLOCK_BYTES = 2**20  # of a block with its own checksum: what is read in vain at each end of a slice


@final
@dataclass(frozen=True)
class TensorPart:
    """A contiguous part of a tensor, or all of it.

    Attributes:
        name: of the tensor in the checkpoint.
        offsets: of the part's first entry in the unsharded tensor.
        tensor: the part's entries, real numbers.
    """

    name: str
    offsets: Shape
    tensor: Tensor

    def cpu_copy(self) -> TensorPart:
        """Return the part with a copy of its entries in the host's memory."""
        copy = self.tensor.detach().to("cpu", copy=True).contiguous()
        return TensorPart(self.name, self.offsets, copy)


def real_view(tensor: Tensor) -> Tensor:
    """Return a tensor with complex numbers as pairs of real ones, in a last dimension.

    Raises:
        TypeError: the tensor is complex and sharded, which fsdp2 refuses.
    """
    if tensor.is_complex() and is_dtensor(tensor):
        raise TypeError("a complex tensor can't be sharded over ranks")
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def local_parts(tensors: Mapping[str, Tensor]) -> list[TensorPart]:
    """Return the parts of tensors that this rank holds: its shard of a `DTensor`, else all."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    reals = {name: real_view(tensor) for name, tensor in tensors.items()}
    whole = {name: tensor for name, tensor in reals.items() if not is_dtensor(tensor)}
    parts = [TensorPart(name, (0,) * tensor.ndim, tensor) for name, tensor in whole.items()]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({n: tensor for n, tensor in reals.items() if n not in whole})
    for item in planner.create_local_plan().items:
        data = planner.resolve_data(item)
        if not isinstance(data, Tensor) or item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        # Of a tensor with fewer rows than ranks some ranks hold nothing.
        if data.numel() or not reals[item.index.fqn].numel():
            offsets = tuple(item.tensor_data.chunk.offsets)
            parts.append(TensorPart(item.index.fqn, offsets, data))
    return parts


def checksums(tensor: Tensor) -> list[int]:
    """Return the number of rows in a block, and the checksum (CRC-32) of each block of rows.

    Rows are entries along the first dimension of a tensor on the CPU.
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    in_block = max(1, BLOCK_BYTES * rows // max(1, tensor.nbytes))
    return [in_block, *block_checksums(tensor, in_block)]


def block_checksums(tensor: Tensor, rows_in_block: int) -> list[int]:
    """Return the checksum of each block of rows."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    rows = tensor.shape[0] if tensor.ndim else 1
    size = max(1, rows_in_block * (len(content) // max(1, rows)))
    return [zlib.crc32(content[at : at + size]) for at in range(0, max(1, len(content)), size)]


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001{SHARD_SUFFIX}"


def write_shard(path: Path, parts: Sequence[TensorPart]) -> dict[str, Any]:
    """Write parts of tensors to a file with their checksums, and flush it to disk.

    Returns:
        The file's `shard_record`.

    Raises:
        OSError: the file can't be written.
    """
    tensors = {part.name: part.tensor.detach().cpu().contiguous() for part in parts}
    header = {
        "format": "pt",
        OFFSETS_KEY: json.dumps({p.name: {SAVED_OFFSETS_KEY: p.offsets} for p in parts}),
        CHECKSUMS_KEY: json.dumps({name: checksums(tensor) for name, tensor in tensors.items()}),
    }
    content = save(tensors, header)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return shard_record(content, len(content))


@final
@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    One rank opens it and sends this object to the others: a thousand ranks that open a thousand
    shards each would keep a file system busy for minutes. A rank then opens those it reads from.

    Attributes:
        key: config key that error messages begin with.
        folder: of the checkpoint.
        metadata: the content of its `state.json`.
        stored: torch's description of the parts in the shards, as real numbers.
    """

    key: str
    folder: Path
    metadata: Metadata
    stored: torch_metadata.Metadata

    @classmethod
    def open(cls, key: str, path: str | Path) -> Self:
        """Open a checkpoint, and check that its shards are its own and complete.

        Args:
            key: config key that error messages begin with.
            path: any path that `locate_checkpoint` takes.

        Raises:
            UserError: there is no checkpoint, or it is damaged.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        folder = locate_checkpoint(key, str(path))
        metadata = read_metadata(key, folder, shards=True)
        with translate_read_errors(key, folder):
            stored = HuggingFaceStorageReader(str(folder)).read_metadata()
        checkpoint = cls(key, folder, metadata, stored)
        for name, shape in checkpoint.shapes.items():
            tensor: Any = stored.state_dict_metadata.get(name)
            if (
                tensor is None
                or tensor.size not in (shape, (*shape, 2))
                or tensor.size.numel() != sum(part.sizes.numel() for part in tensor.chunks)
            ):
                raise UserError(
                    f"{key}: {folder} is not a readable checkpoint (its shards do not hold {name})."
                )
        return checkpoint

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return the unsharded shapes of the tensors, by name."""
        return {name: tuple(shape) for name, shape in self.metadata["tensors"].items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        tensor: Any = self.stored.state_dict_metadata[name]
        is_complex = len(tensor.size) > len(self.shapes[name])
        dtype: torch.dtype = tensor.properties.dtype
        return dtype.to_complex() if is_complex else dtype

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, sharded in any way, with the entries that this rank needs.

        Raises:
            UserError: a file can't be read, or a tensor is not as it was written.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        with translate_read_errors(self.key, self.folder):
            # Torch's planner finds the entries of each stored part that a tensor, or this rank's
            # shard of it, needs.
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            reals = {name: real_view(tensor) for name, tensor in tensors.items()}
            planner.set_up_planner(reals, self.stored)
            items: dict[str, list[ReadItem]] = defaultdict(list)
            for item in planner.create_local_plan().items:
                items[self.stored.storage_data[item.storage_index].relative_path].append(item)
            for path, of_file in sorted(items.items()):
                with safe_open(path, framework="pt") as file:
                    written = json.loads(file.metadata()[CHECKSUMS_KEY])
                    for item in of_file:
                        name = item.storage_index.fqn
                        entries = read_entries(
                            file, name, item.storage_offsets, item.lengths, written[name]
                        )
                        if entries is None:
                            raise UserError(
                                f"{self.key}: {self.folder} is damaged: {name} in "
                                f"{Path(path).name} is not as it was written (checksum). "
                                f"{older_checkpoint_advice(self.folder)}"
                            )
                        planner.resolve_tensor(item).detach().copy_(entries)


def read_entries(
    file: Any, name: str, first: Sequence[int], lengths: Sequence[int], written: Sequence[int]
) -> Tensor | None:
    """Return entries of the part of a tensor in a shard; None if it is not as it was written.

    Args:
        file: opened by `safe_open`, which has no type hints.
        name: of the tensor.
        first: entry to read, counted from the part's first entry.
        lengths: how many entries to read along each dimension.
        written: the part's `checksums`.
    """
    in_block, *expected = written
    if not lengths:
        entry: Tensor = file.get_tensor(name)
        return entry if block_checksums(entry, in_block) == expected else None
    # Whole blocks of rows; the last block of the part may be shorter.
    start = first[0] // in_block * in_block
    stop = -(-(first[0] + lengths[0]) // in_block) * in_block
    part = file.get_slice(name)
    rows: Tensor = part[start : min(stop, part.get_shape()[0])]
    if block_checksums(rows, in_block) != expected[start // in_block : stop // in_block]:
        return None
    begins = (first[0] - start, *first[1:])
    return rows[tuple(slice(at, at + n) for at, n in zip(begins, lengths, strict=True))]


# Errors that torch, safetensors or this module raise for damaged files.
READ_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


@contextmanager
def translate_read_errors(key: str, folder: Path) -> Iterator[None]:
    """Turn errors of a damaged checkpoint into a `UserError` of one line."""
    try:
        yield
    except READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{key}: {folder} is not a readable checkpoint ({reason}). "
            f"{older_checkpoint_advice(folder)}"
        ) from error
