"""The weights of a checkpoint, for a model that only forecasts, on any mesh."""

from pathlib import Path

import torch
from torch import Tensor, nn

from credit_dp.training.agreement import together
from credit_dp.training.checkpoint import check_fit, of_model
from credit_dp.training.checkpoint_files import Numbers
from credit_dp.training.checkpoint_writing import shapes_of_all_ranks
from credit_dp.training.shards import check_shards, read_shards
from credit_dp.training.state import AVERAGE, MODEL, VALID, model_tensors

ADVICE = "Leave the model group out, which comes with the checkpoint, or change checkpoint."


def load_valid(key: str, path: Path, numbers: Numbers) -> Tensor | None:
    """Where the fields that come out had values in training, `(outputs, H, W)`; None: everywhere.

    Collective: all ranks of the run call it. Arguments and errors are those of `load_weights`.
    """
    if VALID not in numbers["tensors"]:
        return None
    valid = torch.zeros(tuple(numbers["tensors"][VALID]), dtype=torch.uint8)
    read_shards(key, path, {VALID: valid})
    return valid.bool()


def load_weights(key: str, path: Path, numbers: Numbers, parts: tuple[nn.Module, ...]) -> None:
    """Fill the stretches of a model that this rank has; with averages, where weights have one.

    Collective: all ranks of the run call it.

    Args:
        key: which messages begin with.
        path: of the checkpoint, and `numbers` what its `state.json` says.
        parts: see `TrainingState`.

    Raises:
        UserError: on all ranks, if the weights are of another model, or can't be read.
    """
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    own = model_tensors(parts)
    check_fit(f"{key}: {path}", of_model(saved), of_model(shapes_of_all_ranks(own)), ADVICE)
    together(lambda: check_shards(key, path, saved))
    room = {}
    for name, tensor in own.items():
        average = AVERAGE + name.removeprefix(MODEL)
        room[average if average in saved else name] = tensor
    read_shards(key, path, room)
