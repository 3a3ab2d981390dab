"""Weights of another run: matched tensor by tensor and channel by channel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp import checks
from credit_dp.config import ModelConfig
from credit_dp.data.channels import Channel
from credit_dp.data.setup import TrainingData
from credit_dp.distributed.collectives import all_gather_object, run_on_all_ranks
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training import checkpoint_files
from credit_dp.training.checkpoint import check_model_shapes, gather_shapes, model_shapes
from credit_dp.training.checkpoint_files import Metadata
from credit_dp.training.data_description import (
    MODEL_KINDS,
    DataDescription,
    differently_normalised_channels,
    differing_model_keys,
    format_value,
)
from credit_dp.training.parameter_shards import is_dtensor
from credit_dp.training.replicas import local_tensor
from credit_dp.training.shards import Shape, check_shards, read_shards, translate_read_errors
from credit_dp.training.state import (
    AVERAGE_PREFIX,
    MODEL_PREFIX,
    VALID_KEY,
    TrainingState,
    model_tensors,
    named_tensors,
)

ChannelNames = dict[str, list[str]]  # of the channels of each kind, in order


@final
class ChannelDim(NamedTuple):
    """A dimension with `each` neighbouring entries for each channel of a kind.

    `kind` is empty where no kind accounts for its size.
    """

    kind: str
    entries_per_channel: int


ChannelDims = Mapping[str, Mapping[int, ChannelDim]]  # by tensor and dimension


def channel_names(data: DataDescription) -> ChannelNames:
    """The channels that go in and come out, as a run's description of its data has them.

    A model may treat variables on levels as one channel each: those are listed besides, and so is
    what is left.

    Raises:
        LookupError: the description does not say.
    """
    fields = data["fields"]
    out = [Channel(variable, level) for variable, level in fields["channels"]]
    states = out[: len(out) - fields.get("diagnostic", 0)]
    diagnostic = [channel.name for channel in out[len(states) :]]
    others = [*data["data.forcing"], *data["data.static"]]
    upper = list(dict.fromkeys(c.variable for c in states if c.level is not None))
    surface = [channel.name for channel in states if channel.level is None]
    frames = data.get("model.frames", 1)
    return {
        "input": [*names_of_frames([c.name for c in states], frames), *others],
        "input off levels": [*names_of_frames(surface, frames), *others],
        "input on levels": names_of_frames(upper, frames),
        "output": [channel.name for channel in out],
        "output off levels": [*surface, *diagnostic],
        "output on levels": upper,
    }


def names_of_frames(names: Sequence[str], frames: int) -> list[str]:
    """Names of the states that go in, the oldest first; the newest have their own."""
    ages = reversed(range(frames))
    return [f"{name} {age} steps ago" if age else name for age in ages for name in names]


def channel_dims(
    config: ModelConfig, fields: Fields, grid: tuple[int, int], names: ChannelNames
) -> ChannelDims:
    """The dimensions of each saved tensor of a model that go by channels, by the tensor's name.

    Args:
        config: of the model.
        fields: of its channels.
        grid: rows and columns.
        names: of its channels.

    Raises:
        UserError: the model can't be built for one more channel.
    """
    shapes = state_dict_shapes(config, fields, grid)
    found: dict[str, dict[int, ChannelDim]] = {name: {} for name in shapes}
    for more, kinds in fields_with_one_more(fields):
        for name, larger in state_dict_shapes(config, more, grid).items():
            for dim, (size, grown) in enumerate(zip(shapes.get(name, ()), larger, strict=False)):
                if grown != size and dim not in found[name]:
                    each = [(k, (grown - size) / added) for k, added in kinds.items()]
                    fits = [ChannelDim(k, int(n)) for k, n in each if n * len(names[k]) == size]
                    found[name][dim] = fits[0] if fits else ChannelDim("", 0)
    if type(config) in MODEL_KINDS.values():
        return found
    # Of another's model nobody knows how the entries of a channel lie if there are several.
    return {
        name: {
            at: dim if dim.entries_per_channel == 1 else ChannelDim("", 0)
            for at, dim in dims.items()
        }
        for name, dims in found.items()
    }


def fields_with_one_more(fields: Fields) -> list[tuple[Fields, Mapping[str, int]]]:
    """One more channel of each kind in turn, and how many there are then more of each kind."""
    states = fields.states
    variable = tuple(range(states, states + fields.levels))
    more: list[tuple[Fields, Mapping[str, int]]] = [
        (replace(fields, others=fields.others + 1), {"input": 1, "input off levels": 1}),
        (replace(fields, diagnostic=fields.diagnostic + 1), {"output": 1, "output off levels": 1}),
    ]
    if variable:
        kinds = {"input on levels": fields.frames, "output on levels": 1}
        more.append((replace(fields, upper=(*fields.upper, variable)), kinds))
    return more


def state_dict_shapes(
    config: ModelConfig, fields: Fields, grid: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of all that a model saves, without data where it can be built so."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model: nn.Module = build_model(config, fields, grid)
        except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
            model = build_model(config, fields, grid)
    saved: dict[str, Any] = model.state_dict()
    return {name: tuple(x.shape) for name, x in saved.items() if isinstance(x, torch.Tensor)}


MAX_NAMED_TENSORS = 3  # so many tensors are named, further ones are counted


@final
@dataclass(frozen=True)
class TensorMatch:
    """What of a tensor is in the checkpoint.

    Attributes:
        source: its name there; empty if there is nothing.
        own, saved: for each dimension that goes by channels, the entries here and there that
            belong together, where these are not all in the same order.
        note: which channels, for people.
    """

    source: str = ""
    model_entries: tuple[list[int] | None, ...] = ()
    checkpoint_entries: tuple[list[int] | None, ...] = ()
    note: str = ""


def match_tensor(
    name: str,
    shape: Shape,
    saved: Mapping[str, Shape],
    dims: Mapping[int, ChannelDim],
    names: tuple[ChannelNames, ChannelNames],
) -> TensorMatch:
    """What a checkpoint has of a tensor.

    Args:
        name: in the model.
        shape: of all of it.
        saved: shapes of the checkpoint's tensors.
        dims: those of the tensor that go by channels, where channels are not the same.
        names: of the channels, here and in the checkpoint.
    """
    source = next((p + name for p in (AVERAGE_PREFIX, MODEL_PREFIX) if p + name in saved), "")
    if not source or len(saved[source]) != len(shape):
        return TensorMatch()
    own: list[list[int] | None] = []
    there: list[list[int] | None] = []
    notes = []
    for at, (size, size_there) in enumerate(zip(shape, saved[source], strict=True)):
        kind, each = dims.get(at, ChannelDim("", 1))
        here, before = (of_kind.get(kind, []) for of_kind in names)
        if at not in dims or here == before != []:
            if size != size_there:
                return TensorMatch()
            own.append(None)
            there.append(None)
            continue
        common = [channel for channel in here if channel in before]
        if not common or size_there != each * len(before):
            return TensorMatch()
        own.append(entry_indices(common, here, each))
        there.append(entry_indices(common, before, each))
        notes.append(f"{len(common)} of {len(here)} {kind.split()[0]} channels")
    return TensorMatch(source, tuple(own), tuple(there), " and ".join(notes))


def entry_indices(channels: list[str], among: list[str], each: int) -> list[int]:
    """The numbers of the entries of some channels, `each` for every one of them."""
    return [among.index(channel) * each + entry for channel in channels for entry in range(each)]


def match_summary(
    folder: Path,
    matches: Mapping[str, TensorMatch],
    saved: Mapping[str, Shape],
    otherwise: list[str],
) -> str:
    """What was found, in one line; `otherwise` are channels that are normalised differently."""
    parts = [f"{name}: {match.note}" for name, match in sorted(matches.items()) if match.note]
    fresh = [name for name, match in sorted(matches.items()) if not match.source]
    used = {
        match.source.removeprefix(AVERAGE_PREFIX).removeprefix(MODEL_PREFIX)
        for match in matches.values()
    }
    there = {name.removeprefix(MODEL_PREFIX) for name in saved if name.startswith(MODEL_PREFIX)}
    found = len(matches) - len(fresh)
    averages = any(match.source.startswith(AVERAGE_PREFIX) for match in matches.values())
    return (
        f"{found} of {len(matches)} tensors from {folder}"
        f"{' (averages)' if averages else ''}{count_and_names(parts, 'in part')}"
        f"{count_and_names(fresh, 'fresh')}"
        f"{count_and_names(sorted(there - used), 'of the checkpoint not used')}"
        f"{count_and_names(otherwise, 'channels normalised by another mean or deviation')}"
    )


def count_and_names(names: list[str], what: str) -> str:
    """How many they are, and the first ones."""
    if not names:
        return ""
    more = f", and {len(names) - MAX_NAMED_TENSORS} more" if len(names) > MAX_NAMED_TENSORS else ""
    return f"; {len(names)} {what} ({', '.join(names[:MAX_NAMED_TENSORS])}{more})"


KEY = "init_from"


def load_initial_weights(
    path: str, state: TrainingState, model: ModelConfig, prepared: TrainingData
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
    folder = run_on_all_ranks(lambda: resolve_checkpoint(path))
    numbers = run_on_all_ranks(lambda: checkpoint_files.read_metadata(KEY, folder))
    saved = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    run_on_all_ranks(lambda: check_shards(KEY, folder, saved))
    with translate_read_errors(KEY, folder):
        before = channel_names(numbers["data"])
        otherwise = differently_normalised_channels(numbers["data"], state.data)
        form = differing_model_keys(numbers["data"], state.data)
    names = channel_names(state.data)
    dims = run_on_all_ranks(lambda: changed_dims(names, before, model, prepared))
    own = {name: tensor.detach() for name, tensor in named_tensors(state.parts).items()}
    matches = {
        name: match_tensor(name, tuple(tensor.shape), saved, dims.get(name, {}), (names, before))
        for name, tensor in own.items()
    }
    everywhere = {
        name: match for part in all_gather_object(matches) for name, match in part.items()
    }
    check_any_match(folder, everywhere)
    copy_matches(folder, own, matches, saved)
    if state.average is not None:
        state.average.reset_to_parameters(state.average.averages)
    settings = ", ".join(
        f"{key}={format_value(saved_value)}" for key, (saved_value, _) in form.items()
    )
    differing = f"; the checkpoint has {settings}" if settings else ""
    return f"{KEY}: {match_summary(folder, everywhere, saved, otherwise)}{differing}"


def resolve_checkpoint(path: str) -> Path:
    """The checkpoint at a path, or the newest of a run.

    Raises:
        UserError: there is none.
    """
    if checks.existing_path(path) is None:
        raise UserError(
            f"{KEY}: needs the path of a checkpoint or of a run, but {path} does not exist. "
            f"Change {KEY}."
        )
    return checkpoint_files.locate_checkpoint(KEY, path)


def changed_dims(
    names: ChannelNames, before: ChannelNames, model: ModelConfig, prepared: TrainingData
) -> ChannelDims:
    """The dimensions that go by channels, if these are not the same."""
    if names == before:
        return {}
    fields = prepared.store.channels.fields(model.frames)
    return channel_dims(model, fields, prepared.store.grid, names)


def check_any_match(folder: Path, matches: dict[str, TensorMatch]) -> None:
    """Refuse a checkpoint that has nothing of the model.

    Raises:
        UserError: no tensor has anything.
    """
    if not any(match.source for match in matches.values()):
        raise UserError(
            f"{KEY}: {folder} has no weight of this model: no name and shape is the same. Change "
            f"{KEY}, or the model group to that of the checkpoint."
        )


def copy_matches(
    folder: Path, own: dict[str, Tensor], matches: dict[str, TensorMatch], saved: dict[str, Shape]
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
            copy_entries(own[name], room[match.source], match)


def copy_entries(own: Tensor, source: Tensor, match: TensorMatch) -> None:
    """Fill the entries of a tensor, or of this rank's share of it, that belong to those given."""
    for dim, entries_there in enumerate(match.checkpoint_entries):
        if entries_there is not None:
            source = source.index_select(dim, torch.tensor(entries_there))
    whole = range(source.ndim)
    places = [
        torch.tensor(match.model_entries[dim])
        if match.model_entries[dim] is not None
        else torch.arange(own.shape[dim])
        for dim in whole
    ]
    at = torch.meshgrid(*places, indexing="ij")
    value = torch.zeros(own.shape, dtype=own.dtype)
    value[at] = source
    taken = torch.zeros(own.shape, dtype=torch.bool)
    taken[at] = True
    local = local_tensor(own)
    value, taken = (local_part_of(own, x).to(local.device) for x in (value, taken))
    local.copy_(torch.where(taken, value, local))


def local_part_of(own: Tensor, whole: Tensor) -> Tensor:
    """This rank's share of a tensor that every rank has, cut as another one is; sends nothing."""
    if not is_dtensor(own):
        return whole
    from torch.distributed.tensor import distribute_tensor

    shared = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return shared.to_local()


ADVICE = "Leave the model group out, which comes with the checkpoint, or change checkpoint."


def load_valid_mask(key: str, path: Path, numbers: Metadata) -> Tensor | None:
    """Where the fields that come out had values in training, `(outputs, H, W)`; None: everywhere.

    Collective: all ranks of the run call it. Arguments and errors are those of `load_weights`.
    """
    if VALID_KEY not in numbers["tensors"]:
        return None
    valid = torch.zeros(tuple(numbers["tensors"][VALID_KEY]), dtype=torch.uint8)
    read_shards(key, path, {VALID_KEY: valid})
    return valid.bool()


def load_weights(key: str, path: Path, numbers: Metadata, parts: tuple[nn.Module, ...]) -> None:
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
    check_model_shapes(
        f"{key}: {path}", model_shapes(saved), model_shapes(gather_shapes(own)), ADVICE
    )
    run_on_all_ranks(lambda: check_shards(key, path, saved))
    room = {}
    for name, tensor in own.items():
        average = AVERAGE_PREFIX + name.removeprefix(MODEL_PREFIX)
        room[average if average in saved else name] = tensor
    read_shards(key, path, room)
