"""The tensors of a checkpoint in shards: ranks write a file each, any mesh reads what it needs.

The files are safetensors, so that reading them never executes code. A file has parts of tensors,
and in its header where each part begins in the unsharded tensor (as torch's
`HuggingFaceStorageReader` expects it) and checksums of its blocks. A rank that reads entries of a
part reads whole blocks, and compares their checksums before it uses the entries.

`torch.distributed.checkpoint` takes a second to import, so the functions below import it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import (
    SHARD_SUFFIX,
    check_shards,
    older_checkpoint_advice,
    shard_record,
)
from credit_dp.training.parameter_shards import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Shape = tuple[int, ...]

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

# Entries of a file's header. The first two are those of torch's own writer of safetensors.
OFFSETS_KEY = "DCP_SHARDING_INFO"
SAVED_OFFSETS_KEY = "saved_offsets"
CHECKSUMS_KEY = "checksums"
PAIRS_KEY = "complex_pairs"  # names of complex numbers that are written as pairs of real ones
BLOCK_BYTES = 2**20  # of a block with its own checksum: what is read in vain at each end of a slice


@final
@dataclass(frozen=True)
class TensorPart:
    """A contiguous part of a tensor, or all of it.

    Attributes:
        name: of the tensor in the checkpoint.
        offsets: of the part's first entry in the unsharded tensor.
        tensor: the part's entries.
    """

    name: str
    offsets: Shape
    tensor: Tensor

    def cpu_copy(self) -> TensorPart:
        """Return the part with a copy of its entries in the host's memory."""
        copy = self.tensor.detach().to("cpu", copy=True).contiguous()
        return TensorPart(self.name, self.offsets, copy)


def local_parts(tensors: Mapping[str, Tensor]) -> list[TensorPart]:
    """Return the parts of tensors that this rank holds: its shard of a `DTensor`, else all."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    whole = {name: tensor for name, tensor in tensors.items() if not is_dtensor(tensor)}
    parts = [TensorPart(name, (0,) * tensor.ndim, tensor) for name, tensor in whole.items()]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({n: tensor for n, tensor in tensors.items() if n not in whole})
    for item in planner.create_local_plan().items:
        data = planner.resolve_data(item)
        if not isinstance(data, Tensor) or item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        # Of a tensor with fewer rows than ranks some ranks hold nothing.
        if data.numel() or not tensors[item.index.fqn].numel():
            offsets = tuple(item.tensor_data.chunk.offsets)
            parts.append(TensorPart(item.index.fqn, offsets, data))
    return parts


def checksums(name: str, offsets: Sequence[int], tensor: Tensor) -> list[int]:
    """Return the number of rows in a block, and the checksum (CRC-32) of each block of rows.

    Rows are entries along the first dimension. The checksums are those of the description of the
    part, too: a flipped bit in a name or an offset is found like one in the data.

    Args:
        name: of the tensor.
        offsets: see `TensorPart`.
        tensor: the part, on the CPU.
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    in_block = max(1, BLOCK_BYTES * rows // max(1, tensor.nbytes))
    start = description_checksum(name, offsets, tensor.dtype, tensor.shape)
    return [in_block, *block_checksums(tensor, in_block, start)]


def description_checksum(
    name: str, offsets: Sequence[int], dtype: torch.dtype, shape: Sequence[int]
) -> int:
    """Return the checksum of what a header says of a part."""
    return zlib.crc32(f"{name} {dtype} {[*shape]} {[*offsets]}".encode())


def block_checksums(tensor: Tensor, rows_in_block: int, start: int) -> list[int]:
    """Return the checksum of each block of rows; `start` is that of the description."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    rows = tensor.shape[0] if tensor.ndim else 1
    size = max(1, rows_in_block * (len(content) // max(1, rows)))
    blocks = range(0, max(1, len(content)), size)
    return [zlib.crc32(content[at : at + size], start) for at in blocks]


def as_pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors as a file can hold them, and what its header says about that.

    safetensors has no complex128: real and imaginary parts become a last dimension.
    """
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    stored = {name: torch.view_as_real(tensors[name].resolve_conj()) for name in pairs}
    return {**tensors, **stored}, {PAIRS_KEY: json.dumps(pairs)} if pairs else {}


def pair_names(header: Mapping[str, str] | None) -> list[str]:
    """Return the names of complex tensors that a file has as pairs of real numbers."""
    names: list[str] = json.loads((header or {}).get(PAIRS_KEY, "[]"))
    return names


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
    offsets = {part.name: part.offsets for part in parts}
    stored, pairs = as_pairs(tensors)
    header = {
        **pairs,
        "format": "pt",
        OFFSETS_KEY: json.dumps({n: {SAVED_OFFSETS_KEY: at} for n, at in offsets.items()}),
        CHECKSUMS_KEY: json.dumps({n: checksums(n, offsets[n], t) for n, t in tensors.items()}),
    }
    content = save(stored, header)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return shard_record(content, len(content))


@final
@dataclass(frozen=True)
class StoredPart:
    """Where a part of a tensor is: the number of its file, its place in the unsharded tensor."""

    file: int
    offsets: Shape
    shape: Shape


def extent(parts: Sequence[StoredPart]) -> Shape:
    """Return the shape of the tensor that has these parts."""
    ends = ([*map(sum, zip(part.offsets, part.shape, strict=True))] for part in parts)
    return tuple(map(max, zip(*ends, strict=True)))


@final
@dataclass(frozen=True)
class Shards:
    """The shards of a checkpoint, as their headers describe them.

    One rank opens them and sends this object to the others: a thousand ranks that open a thousand
    files each would keep a file system busy for minutes. A rank then opens the files it reads from.

    Attributes:
        key: config key that error messages begin with.
        folder: of the checkpoint.
        files: names of the shards.
        parts: of each tensor.
        dtypes: of each tensor.
    """

    key: str
    folder: Path
    files: tuple[str, ...]
    parts: dict[str, list[StoredPart]]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def open(cls, key: str, folder: Path, metadata: Mapping[str, Any]) -> Self:
        """Read the headers of a checkpoint's shards, and check that they are its own.

        Args:
            key: config key that error messages begin with.
            folder: of the checkpoint.
            metadata: the content of its `state.json`.

        Raises:
            UserError: they are damaged or of another save, or a tensor is missing, has another
                shape or is unexpected.
        """
        check_shards(key, folder, metadata)
        files = tuple(metadata["shards"])
        parts = defaultdict[str, list[StoredPart]](list)
        dtypes: dict[str, torch.dtype] = {}
        with translate_read_errors(key, folder):
            for number, file in enumerate(files):
                for name, (offsets, shape, dtype) in read_header(folder / file).items():
                    parts[name].append(StoredPart(number, offsets, shape))
                    dtypes[name] = dtype
            shards = cls(key, folder, files, dict(parts), dtypes)
            shards._check({name: tuple(shape) for name, shape in metadata["tensors"].items()})
        return shards

    def _check(self, expected: dict[str, Shape]) -> None:
        where = f"{self.key}: {self.folder} is not a readable checkpoint"
        for name, shape in expected.items():
            parts = self.parts.get(name, [])
            entries = sum(math.prod(part.shape) for part in parts)
            if not parts or entries != math.prod(shape) or extent(parts) != shape:
                raise UserError(f"{where} (its shards do not hold {name}).")
        if len(self.parts) > len(expected):
            extra = min(self.parts.keys() - expected.keys())
            raise UserError(f"{where} (its shards hold {extra} besides).")

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
            planner.set_up_planner(dict(tensors), self._torch_metadata())
            places = {(name, p.offsets): p for name, parts in self.parts.items() for p in parts}
            items = defaultdict[int, list[Any]](list)
            for item in planner.create_local_plan().items:
                part = places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                items[part.file].append((item, part))
            for number, of_file in sorted(items.items()):
                name = self.files[number]
                with safe_open(str(self.folder / name), framework="pt") as file:
                    shard = ShardReader(self, name, file)
                    for item, part in of_file:
                        first, lengths = tuple(item.storage_offsets), tuple(item.lengths)
                        entries = shard.read(item.storage_index.fqn, part, first, lengths)
                        planner.resolve_tensor(item).detach().copy_(entries)

    def _torch_metadata(self) -> Metadata:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        def entry(name: str) -> TensorStorageMetadata:
            chunks = [
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape))
                for part in self.parts[name]
            ]
            shape = torch.Size(extent(self.parts[name]))
            return TensorStorageMetadata(TensorProperties(self.dtypes[name]), shape, chunks)

        return Metadata({name: entry(name) for name in self.parts})


def read_header(path: Path) -> dict[str, tuple[Shape, Shape, torch.dtype]]:
    """Return offsets, shape and dtype of all parts in a shard, by the names of the tensors."""
    from safetensors.torch import _getdtype  # as torch's own reader does

    with safe_open(str(path), framework="pt") as file:
        places = json.loads(file.metadata()[OFFSETS_KEY])
        pairs = pair_names(file.metadata())
        header = {}
        for name in file.keys():  # noqa: SIM118 - `safe_open` can't be iterated
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), _getdtype(part.get_dtype())
            if name in pairs:
                shape, dtype = shape[:-1], torch.complex128
            offsets = tuple(places[name][SAVED_OFFSETS_KEY])
            header[name] = (offsets, shape, dtype)
        return header


@final
class ShardReader:
    """Reads entries of the parts in one shard, and checks them.

    Args:
        shards: of which this is one.
        name: of its file.
        file: opened by `safe_open`, which has no type hints.
    """

    def __init__(self, shards: Shards, name: str, file: Any) -> None:
        self._shards = shards
        self._name = name
        self._file = file
        self._checksums: dict[str, list[int]] = json.loads(file.metadata()[CHECKSUMS_KEY])
        self._pairs = pair_names(file.metadata())

    def read(self, name: str, part: StoredPart, first: Shape, lengths: Shape) -> Tensor:
        """Return entries of a part.

        Args:
            name: of the tensor.
            part: of the tensor, in this shard.
            first: entry to read, counted from the part's first entry.
            lengths: how many entries to read along each dimension.

        Raises:
            UserError: a block in which they are is not as it was written.
        """
        if not part.shape:
            entry = self._as_saved(name, self._file.get_tensor(name))
            self._check_blocks(name, part, entry, 0)
            return entry
        in_block = self._checksums[name][0]
        # Whole blocks of rows, as far as the part has rows.
        start = first[0] // in_block * in_block
        stop = min(-(-(first[0] + lengths[0]) // in_block) * in_block, part.shape[0])
        rows = self._as_saved(name, self._file.get_slice(name)[start:stop])
        self._check_blocks(name, part, rows, start)
        begins = (first[0] - start, *first[1:])
        return rows[tuple(slice(b, b + n) for b, n in zip(begins, lengths, strict=True))]

    def _as_saved(self, name: str, stored: Tensor) -> Tensor:
        return torch.view_as_complex(stored) if name in self._pairs else stored

    def _check_blocks(self, name: str, part: StoredPart, rows: Tensor, start: int) -> None:
        in_block, *written = self._checksums[name]
        description = description_checksum(name, part.offsets, rows.dtype, part.shape)
        found = block_checksums(rows, in_block, description)
        if found != written[start // in_block :][: len(found)]:
            folder, key = self._shards.folder, self._shards.key
            raise UserError(
                f"{key}: {folder} is damaged: {name} in {self._name} is not as it was written "
                f"(checksum). {older_checkpoint_advice(folder)}"
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
