"""Weights that a run starts with from another run, whatever its mesh, and in part its variables."""

from pathlib import Path

import torch
from torch import Tensor

from credit_dp import checks
from credit_dp.config import ModelConfig
from credit_dp.data.prepare import Prepared
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_files as files
from credit_dp.training.agreement import gather, together
from credit_dp.training.channel_dims import ChannelDims, Names, channel_dims, channel_names
from credit_dp.training.data_description import differing_form, normalised_otherwise, shown
from credit_dp.training.parameter_shards import is_share
from credit_dp.training.replicas import shard
from credit_dp.training.shards import Shape, check_shards, read_shards, readable
from credit_dp.training.state import TrainingState, named_tensors
from credit_dp.training.weight_match import Match, find, report

KEY = "init_from"


def load_initial_weights(
    path: str, state: TrainingState, model: ModelConfig, prepared: Prepared
) -> str:
    """Take over the weights of a checkpoint by their names; averages, if it has any.

    Where variables have been added, dropped or moved, the weights of the channels in common are
    taken over, and the others stay as they were drawn. Nothing else is taken over: no optimiser
    state and no step. Collective: all ranks of the run call it, before the first step.

    Args:
        path: of a checkpoint, of a folder of checkpoints, or of a run.
        state: whose weights are changed.
        model: the model's config.
        prepared: says which fields there are, on which grid.

    Returns:
        what was found, in one line; the same on every rank.

    Raises:
        UserError: on all ranks, if it can't be read or has no weight of this model.
    """
    folder = together(lambda: checkpoint_at(path))
    numbers = together(lambda: files.read_numbers(KEY, folder))
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    together(lambda: check_shards(KEY, folder, saved))
    with readable(KEY, folder):
        before = channel_names(numbers["data"])
        otherwise = normalised_otherwise(numbers["data"], state.data)
        form = differing_form(numbers["data"], state.data)
    names = channel_names(state.data)
    dims = together(lambda: changed_dims(names, before, model, prepared))
    own = {name: tensor.detach() for name, tensor in named_tensors(state.parts).items()}
    matches = {
        name: find(name, tuple(tensor.shape), saved, dims.get(name, {}), (names, before))
        for name, tensor in own.items()
    }
    everywhere = {name: match for part in gather(matches) for name, match in part.items()}
    refuse_nothing(folder, everywhere)
    take_over(folder, own, matches, saved)
    if state.average is not None:
        state.average.start_from_weights(state.average.averages)
    settings = ", ".join(f"{key}={shown(saved_value)}" for key, (saved_value, _) in form.items())
    differing = f"; the checkpoint has {settings}" if settings else ""
    return f"{KEY}: {report(folder, everywhere, saved, otherwise)}{differing}"


def checkpoint_at(path: str) -> Path:
    """The checkpoint at a path, or the newest of a run.

    Raises:
        UserError: there is none.
    """
    if checks.existing(path) is None:
        raise UserError(
            f"{KEY}: needs the path of a checkpoint or of a run, but {path} does not exist. "
            f"Change {KEY}."
        )
    return files.locate(KEY, path)


def changed_dims(
    names: Names, before: Names, model: ModelConfig, prepared: Prepared
) -> ChannelDims:
    """The dimensions that go by channels, if these are not the same."""
    if names == before:
        return {}
    fields = prepared.store.channels.fields(model.frames)
    return channel_dims(model, fields, prepared.store.grid, names)


def refuse_nothing(folder: Path, matches: dict[str, Match]) -> None:
    """Refuse a checkpoint that has nothing of the model.

    Raises:
        UserError: no tensor has anything.
    """
    if not any(match.source for match in matches.values()):
        raise UserError(
            f"{KEY}: {folder} has no weight of this model: no name and shape is the same. Change "
            f"{KEY}, or the model group to that of the checkpoint."
        )


def take_over(
    folder: Path, own: dict[str, Tensor], matches: dict[str, Match], saved: dict[str, Shape]
) -> None:
    """Fill tensors with what a checkpoint has of them; collective."""
    found = {name: match for name, match in matches.items() if match.source}
    # Of a tensor that fits in part all is read: a share of other channels would be no use.
    room = {
        match.source: torch.empty(saved[match.source], dtype=own[name].dtype)
        if match.note
        else own[name]
        for name, match in found.items()
    }
    read_shards(KEY, folder, room)
    for name, match in found.items():
        if match.note:
            take_part(own[name], room[match.source], match)


def take_part(own: Tensor, source: Tensor, match: Match) -> None:
    """Fill the entries of a tensor, or of this rank's share of it, that belong to those given."""
    for dim, entries_there in enumerate(match.saved):
        if entries_there is not None:
            source = source.index_select(dim, torch.tensor(entries_there))
    whole = range(source.ndim)
    places = [
        torch.tensor(match.own[dim]) if match.own[dim] is not None else torch.arange(own.shape[dim])
        for dim in whole
    ]
    at = torch.meshgrid(*places, indexing="ij")
    value = torch.zeros(own.shape, dtype=own.dtype)
    value[at] = source
    taken = torch.zeros(own.shape, dtype=torch.bool)
    taken[at] = True
    local = shard(own)
    value, taken = (share_of(own, x).to(local.device) for x in (value, taken))
    local.copy_(torch.where(taken, value, local))


def share_of(own: Tensor, whole: Tensor) -> Tensor:
    """This rank's share of a tensor that every rank has, cut as another one is; sends nothing."""
    if not is_share(own):
        return whole
    from torch.distributed.tensor import distribute_tensor

    shared = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return shared.to_local()
