"""A trained model in memory, wherever it was read from: a checkpoint of any mesh, or one file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credit_dp.checks import existing
from credit_dp.errors import UserError
from credit_dp.export.contents import Contents
from credit_dp.training.checkpoint_files import locate, read_numbers
from credit_dp.training.run_folder import discard, unfinished
from credit_dp.training.shards import check_shards, read_shards, tensors_in
from credit_dp.training.state import AVERAGE, MODEL, STATIC, VALID

KEY = "checkpoint"  # what lines about one begin with
# No module or parameter has names like these.
STATIC_FIELDS = "credit_dp.static"
VALID_POINTS = "credit_dp.valid"


@final
@dataclass(frozen=True)
class Trained:
    """A trained model.

    Shapes:
        static `(S, H, W)`, in the store's units; valid `(channels out, H, W)`, not zero where there
        are values, or None: everywhere.
    """

    contents: Contents
    weights: dict[str, Tensor]
    static: Tensor
    valid: Tensor | None = None


def read_trained(path: str) -> Trained:
    """Read an exported file, a checkpoint, or the newest checkpoint of a run; needs no ranks.

    Raises:
        UserError: there is none, or it can't be read.
    """
    place = existing(path)
    if place is not None and place.is_file():
        return read_file(place)
    return read_checkpoint(checkpoint_at(path))


def checkpoint_at(path: str) -> Path:
    """The checkpoint in a folder, in that of a run, or of this path.

    Raises:
        UserError: there is none.
    """
    if existing(path) is None:
        raise UserError(
            f"{path}: does not exist. Give the folder of a run or of a checkpoint, or the file of "
            "an exported model."
        )
    return locate(KEY, path)


def read_checkpoint(path: Path) -> Trained:
    """Read what all ranks of a run have written.

    Raises:
        UserError: it can't be read, or says too little.
    """
    numbers = read_numbers(KEY, path)
    contents = Contents.of_checkpoint(str(path), numbers)
    shapes = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    check_shards(KEY, path, shapes)
    held = tensors_in(KEY, path)
    room = {
        name: torch.empty(shape, dtype=held[name].properties.dtype)
        for name, shape in shapes.items()
        if name.startswith((MODEL, AVERAGE)) or name in (STATIC, VALID)
    }
    read_shards(KEY, path, room, together=False)
    if contents.static and STATIC not in room:
        raise UserError(f"{path}: has no static fields, which the model needs.")
    static = room.pop(STATIC, torch.empty(0, *contents.grid))
    valid = room.pop(VALID, None)
    check_fields(str(path), contents, static, valid)
    weights = {n.removeprefix(MODEL): x for n, x in room.items() if n.startswith(MODEL)}
    # Where weights were averaged, the averages are what forecasts are made with.
    weights |= {n.removeprefix(AVERAGE): x for n, x in room.items() if n.startswith(AVERAGE)}
    return Trained(contents, weights, static, valid)


def read_file(path: Path) -> Trained:
    """Read what `write_file` wrote.

    Raises:
        UserError: it can't be read, or is of something else.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error}).") from error
    contents = Contents.of_texts(str(path), texts)
    static = tensors.pop(STATIC_FIELDS, torch.empty(0, *contents.grid))
    valid = tensors.pop(VALID_POINTS, None)
    check_fields(str(path), contents, static, valid)
    return Trained(contents, tensors, static, valid)


def check_fields(where: str, contents: Contents, static: Tensor, valid: Tensor | None) -> None:
    """Refuse static fields that are not those which the model needs, or points of another grid."""
    wanted = (len(contents.static), *contents.grid)
    if tuple(static.shape) != wanted:
        raise UserError(
            f"{where}: has static fields of shape {tuple(static.shape)}, but its model needs "
            f"{wanted}."
        )
    wanted = (len(contents.channels), *contents.grid)
    if valid is not None and tuple(valid.shape) != wanted:
        raise UserError(
            f"{where}: says where there are values in the shape {tuple(valid.shape)}, but its "
            f"model needs {wanted}."
        )


def write_file(trained: Trained, path: Path) -> None:
    """Write one plain safetensors file, whole or not at all.

    Raises:
        UserError: it could not be written.
    """
    tensors = {**trained.weights, STATIC_FIELDS: trained.static}
    if trained.valid is not None:
        tensors[VALID_POINTS] = trained.valid
    content = save(tensors, trained.contents.texts())
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole, or leave what is there.

    Raises:
        UserError: it could not be written.
    """
    temporary = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        discard(temporary)
        raise UserError(
            f"{path}: could not be written ({error.strerror or error}). "
            "Free space there or change --output."
        ) from error
