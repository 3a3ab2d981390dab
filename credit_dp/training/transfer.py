"""Loads weights from checkpoints of other runs.

`load_initial_weights` (for `init_from`) matches tensors by name, and inside a tensor channel by
channel, where the two runs have other variables. In this order: `channel_dims` finds the dimensions
of each tensor that depend on the channels, `match_tensor` compares them with the checkpoint, and
`copy_matches` reads and copies the entries in common.

`load_weights` and `load_valid_mask` are for forecasts: the model must be that of the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.config import DiffusionConfig, ModelConfig
from credit_dp.config.model import MODELS
from credit_dp.data.channels import Channel
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store
from credit_dp.distributed.collectives import (
    all_gather_object,
    run_on_all_ranks,
    run_on_rank_0,
)
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_on_meta
from credit_dp.training.checkpoint import TensorTable, check_model_shapes, model_shapes
from credit_dp.training.checkpoint_shards import Checkpoint, Shape
from credit_dp.training.data_description import (
    DataDescription,
    describe_store,
    differently_normalised_channels,
    differing_model_keys,
    format_value,
    grid_of_fields,
)
from credit_dp.training.parameter_shards import local_tensor, own_shard
from credit_dp.training.state import (
    AVERAGE_PREFIX,
    MODEL_PREFIX,
    VALID_KEY,
    TrainingState,
    model_tensors,
    named_tensors,
)

ChannelNames = dict[str, list[str]]  # by kind of channel, in the order of the channels


@final
class ChannelDim(NamedTuple):
    """A dimension of a tensor that has neighbouring entries for each channel of a kind.

    Attributes:
        kind: a key of `ChannelNames`; empty if the size is explained by no kind.
        entries_per_channel: the number of entries for one channel.
    """

    kind: str
    entries_per_channel: int


ChannelDims = Mapping[str, Mapping[int, ChannelDim]]  # by name of the tensor and dimension

MAX_NAMED = 10  # tensors and channels: the summary names these, and counts the others


@final
@dataclass(frozen=True)
class TensorMatch:
    """The part of a tensor that a checkpoint has.

    Attributes:
        source: the tensor's name in the checkpoint; empty if nothing matches.
        model_entries: for each dimension, the indices of the entries in common in the model's
            tensor; None where all entries match in order.
        checkpoint_entries: likewise in the checkpoint's tensor.
        note: the channels that the checkpoint lacks, for the summary; empty if it has all.
    """

    source: str = ""
    model_entries: tuple[list[int] | None, ...] = ()
    checkpoint_entries: tuple[list[int] | None, ...] = ()
    note: str = ""

    @property
    def is_reordered(self) -> bool:
        """Whether entries are copied one by one."""
        return any(entries is not None for entries in self.model_entries)


KEY = "init_from"


def load_initial_weights(
    path: str, state: TrainingState, model: ModelConfig, prepared: TrainingData
) -> str:
    """Load the weights of a checkpoint by name; the averaged weights, if it has any.

    If variables were added, dropped or moved, the weights of the channels in common are loaded and
    the others keep their initial values. Optimizer state and step are not loaded. Collective: all
    ranks of the run call it, before the first step.

    Args:
        path: of a checkpoint, of a folder of checkpoints, or of a run.

    Returns:
        A summary in one line, the same on every rank.

    Raises:
        UserError: on all ranks, if the checkpoint can't be read or has no weight of this model.
    """
    checkpoint = run_on_rank_0(lambda: Checkpoint.open(KEY, path))
    saved, data = checkpoint.shapes, checkpoint.metadata["data"]
    rescaled = differently_normalised_channels(data, state.data)
    differing = differences(data, state.data)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(state.parts).items()}
    matches = run_on_all_ranks(
        lambda: match_tensors(checkpoint, tensors, state.data, model, prepared.store)
    )
    # Ranks of a pipeline hold different tensors: only all of them together know whether the
    # checkpoint has anything of the model.
    all_matches = {
        name: match for of_rank in all_gather_object(matches) for name, match in of_rank.items()
    }
    check_any_match(checkpoint.folder, all_matches)
    copy_matches(checkpoint, tensors, matches)
    if state.average is not None:
        state.average.reset_to_parameters(state.average.averages)
    return f"{KEY}: {match_summary(checkpoint.folder, all_matches, saved, rescaled)}{differing}"


def differences(saved: DataDescription, current: DataDescription) -> str:
    """Return what else differs from the checkpoint's run, for the end of the summary, or ""."""
    keys = differing_model_keys(saved, current)
    keys |= {
        key: saved[key] for key in ("data.step", "model.residual") if saved[key] != current[key]
    }
    texts = [f"{key}={format_value(value)}" for key, value in keys.items()]
    grids = [grid_of_fields(of["fields"]) for of in (saved, current)]
    # A model may have learned where its rows and columns are; another resolution is on purpose.
    if grids[0] == grids[1] and (differing := grids[0].difference(grids[1])):
        texts.append(f"{differing[0]}, but data.store has {differing[1]}")
    return f"; the checkpoint has {', '.join(texts)}" if texts else ""


def check_initial_weights(
    path: str, model: nn.Module, config: ModelConfig, store: Store | None
) -> None:
    """Refuse a checkpoint that `load_initial_weights` would refuse, before there are statistics.

    Args:
        model: complete; its parameters may be on the meta device.
        store: without it, only whether the checkpoint can be read is checked.

    Raises:
        UserError: the checkpoint can't be read, or has no weight of this model.
    """
    checkpoint = Checkpoint.open(KEY, path)
    if store is not None:
        data = describe_store(store, config)
        matches = match_tensors(checkpoint, named_tensors((model,)), data, config, store)
        check_any_match(checkpoint.folder, matches)


def match_tensors(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    data: DataDescription,
    model: ModelConfig,
    store: Store,
) -> dict[str, TensorMatch]:
    """Return for each tensor of a model what a checkpoint has of it."""
    names, source_names = channel_names(data), channel_names(checkpoint.metadata["data"])
    dims: ChannelDims = {}
    if names != source_names:
        fields = store.channels.fields(model.frames, model.denoises)
        dims = channel_dims(model, fields, store.grid, names)
    both = names, source_names
    return {
        name: match_tensor(name, tuple(x.shape), checkpoint.shapes, dims.get(name, {}), both)
        for name, x in tensors.items()
    }


def check_any_match(folder: Path, matches: dict[str, TensorMatch]) -> None:
    """Check that a checkpoint has at least part of one tensor of the model.

    Raises:
        UserError: nothing matches.
    """
    if not any(match.source for match in matches.values()):
        raise UserError(
            f"{KEY}: {folder} has no weight of this model: no name and shape is the same. Change "
            f"{KEY}, or the model group to that of the checkpoint."
        )


def channel_names(data: DataDescription) -> ChannelNames:
    """Return the names of the input and output channels in a run's description of its data.

    Some models treat a variable on levels as one channel with a level dimension. Their kinds are
    "on levels", with variables in place of channels, and "single-level", with all other channels.

    Raises:
        LookupError: the description is incomplete.
    """
    fields = data["fields"]
    outputs = [Channel(variable, level) for variable, level in fields["channels"]]
    states = outputs[: len(outputs) - fields["diagnostic"]]
    diagnostic = [channel.name for channel in outputs[len(states) :]]
    others = [*data["data.forcing"], *data["data.static"]]
    upper = list(dict.fromkeys(c.variable for c in states if c.level is not None))
    surface = [channel.name for channel in states if channel.level is None]
    frames = data["model.frames"]
    # A deterministic model's other inputs start a diffusion model.
    is_diffusion = data["model"]["kind"] == DiffusionConfig.name
    noisy = [f"noisy {channel.name}" for channel in outputs] if is_diffusion else []
    return {
        "input": [*names_of_frames([c.name for c in states], frames), *others, *noisy],
        "input single-level": [*names_of_frames(surface, frames), *others],
        "input on levels": names_of_frames(upper, frames),
        "output": [channel.name for channel in outputs],
        "output single-level": [*surface, *diagnostic],
        "output on levels": upper,
    }


def names_of_frames(names: Sequence[str], frames: int) -> list[str]:
    """Return the names of the input states, oldest first; the newest have plain names."""
    ages = reversed(range(frames))
    return [f"{name} {age} steps ago" if age else name for age in ages for name in names]


def channel_dims(
    config: ModelConfig, fields: Fields, grid: tuple[int, int], names: ChannelNames
) -> ChannelDims:
    """Return the dimensions that depend on the channels, of each saved tensor of a model.

    The model is built with one more channel of each kind: a dimension that grows depends on it.

    Raises:
        UserError: the model can't be built with one more channel.
    """
    shapes = state_dict_shapes(config, fields, grid)
    by_tensor: dict[str, dict[int, ChannelDim]] = {name: {} for name in shapes}
    for larger_fields, added_by_kind in fields_with_one_more(fields):
        for name, larger in state_dict_shapes(config, larger_fields, grid).items():
            for dim, (size, grown) in enumerate(zip(shapes.get(name, ()), larger, strict=False)):
                if grown != size and dim not in by_tensor[name]:
                    # Several kinds grow at once. The right one explains the size of the dimension:
                    # the entries added for one channel, times the number of channels.
                    entries = [(k, (grown - size) / added) for k, added in added_by_kind.items()]
                    fits = [ChannelDim(k, int(n)) for k, n in entries if n * len(names[k]) == size]
                    by_tensor[name][dim] = fits[0] if fits else ChannelDim("", 0)
    if type(config) in MODELS.values():
        return by_tensor
    # A plug-in's model may order several entries of a channel in any way: only a single entry is
    # sure to belong to its channel.
    return {
        name: {
            at: dim if dim.entries_per_channel == 1 else ChannelDim("", 0)
            for at, dim in dims.items()
        }
        for name, dims in by_tensor.items()
    }


def fields_with_one_more(fields: Fields) -> list[tuple[Fields, Mapping[str, int]]]:
    """Return fields with one channel more, and how many that adds to each kind, for all kinds."""
    states = fields.states
    new_variable = tuple(range(states, states + fields.levels))
    larger: list[tuple[Fields, Mapping[str, int]]] = [
        (replace(fields, others=fields.others + 1), {"input": 1, "input single-level": 1}),
        (
            replace(fields, diagnostic=fields.diagnostic + 1),
            {"output": 1, "output single-level": 1},
        ),
    ]
    if new_variable:
        kinds = {"input on levels": fields.frames, "output on levels": 1}
        larger.append((replace(fields, upper=(*fields.upper, new_variable)), kinds))
    return larger


def state_dict_shapes(
    config: ModelConfig, fields: Fields, grid: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's saved tensors, without allocating them."""
    with torch.random.fork_rng(devices=[]):
        model = build_on_meta(config, fields, grid)
    saved: dict[str, Any] = model.state_dict()
    return {name: tuple(x.shape) for name, x in saved.items() if isinstance(x, torch.Tensor)}


def match_tensor(
    name: str,
    shape: Shape,
    saved: Mapping[str, Shape],
    dims: Mapping[int, ChannelDim],
    names: tuple[ChannelNames, ChannelNames],
) -> TensorMatch:
    """Find the entries of a tensor that a checkpoint has.

    Averaged weights are preferred to those of the last step.

    Args:
        dims: the tensor's dimensions that depend on the channels; none if channels are the same.
        names: of the channels of the model, and of the checkpoint.
    """
    source = next((p + name for p in (AVERAGE_PREFIX, MODEL_PREFIX) if p + name in saved), "")
    if not source or len(saved[source]) != len(shape):
        return TensorMatch()
    model_entries: list[list[int] | None] = []
    source_entries: list[list[int] | None] = []
    notes = []
    for at, (size, source_size) in enumerate(zip(shape, saved[source], strict=True)):
        kind, per_channel = dims.get(at, ChannelDim("", 1))
        channels, source_channels = (names_by_kind.get(kind, []) for names_by_kind in names)
        if at not in dims or channels == source_channels != []:
            if size != source_size:
                return TensorMatch()
            model_entries.append(None)
            source_entries.append(None)
            continue
        common = [channel for channel in channels if channel in source_channels]
        if not common or source_size != per_channel * len(source_channels):
            return TensorMatch()
        model_entries.append(entry_indices(common, channels, per_channel))
        source_entries.append(entry_indices(common, source_channels, per_channel))
        missing = [channel for channel in channels if channel not in common]
        if missing:
            count = f"{len(common)} of {len(channels)} {kind.split()[0]} channels"
            notes.append(f"{count}, without {first_names(missing)}")
    return TensorMatch(source, tuple(model_entries), tuple(source_entries), " and ".join(notes))


def entry_indices(selected: list[str], channels: list[str], per_channel: int) -> list[int]:
    """Return the indices of the entries of the selected channels in a dimension of all channels."""
    return [
        channels.index(channel) * per_channel + entry
        for channel in selected
        for entry in range(per_channel)
    ]


def match_summary(
    folder: Path,
    matches: Mapping[str, TensorMatch],
    saved: Mapping[str, Shape],
    rescaled: list[str],
) -> str:
    """Summarise the matches in one line; `rescaled` are channels with another normalisation."""
    partial = [f"{name}: {match.note}" for name, match in sorted(matches.items()) if match.note]
    unmatched = [name for name, match in sorted(matches.items()) if not match.source]
    used = {
        match.source.removeprefix(AVERAGE_PREFIX).removeprefix(MODEL_PREFIX)
        for match in matches.values()
    }
    available = {name.removeprefix(MODEL_PREFIX) for name in saved if name.startswith(MODEL_PREFIX)}
    averages = any(match.source.startswith(AVERAGE_PREFIX) for match in matches.values())
    return (
        f"{len(matches) - len(unmatched)} of {len(matches)} tensors from {folder}"
        f"{' (averages)' if averages else ''}{count_and_names(partial, 'partly')}"
        f"{count_and_names(unmatched, 'newly initialised')}"
        f"{count_and_names(sorted(available - used), 'of the checkpoint not used')}"
        f"{count_and_names(rescaled, 'channels normalised with another mean or deviation')}"
    )


def count_and_names(names: list[str], label: str) -> str:
    """Return a clause with the number of names, the label and the first names."""
    return f"; {len(names)} {label} ({first_names(names)})" if names else ""


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def copy_matches(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], matches: dict[str, TensorMatch]
) -> None:
    """Fill tensors with the entries that a checkpoint has; collective."""
    matches = {name: match for name, match in matches.items() if match.source}
    saved = checkpoint.shapes
    # A tensor that matches partly is read unsharded on every rank: the shard that this rank would
    # read may have the entries of other channels.
    buffers = {
        match.source: torch.empty(saved[match.source], dtype=tensors[name].dtype)
        if match.is_reordered
        else tensors[name]
        for name, match in matches.items()
    }
    run_on_all_ranks(lambda: checkpoint.read(buffers))
    for name, match in matches.items():
        if match.is_reordered:
            copy_entries(tensors[name], buffers[match.source], match)


def copy_entries(target: Tensor, source: Tensor, match: TensorMatch) -> None:
    """Copy the matching entries of a checkpoint's tensor into a tensor, which may be sharded."""
    for dim, source_indices in enumerate(match.checkpoint_entries):
        if source_indices is not None:
            source = source.index_select(dim, torch.tensor(source_indices))
    indices = [
        torch.tensor(match.model_entries[dim])
        if match.model_entries[dim] is not None
        else torch.arange(target.shape[dim])
        for dim in range(source.ndim)
    ]
    at = torch.meshgrid(*indices, indexing="ij")
    # A sharded tensor can't be indexed by global entries. So values and a mask of the entries to
    # copy are laid out unsharded, and each rank cuts its shard from both.
    values = torch.zeros(target.shape, dtype=target.dtype)
    values[at] = source
    mask = torch.zeros(target.shape, dtype=torch.bool)
    mask[at] = True
    local = local_tensor(target)
    values, mask = (own_shard(x, target).to(local.device) for x in (values, mask))
    local.copy_(torch.where(mask, values, local))


ADVICE = "Leave the model group out, which comes with the checkpoint, or change checkpoint."


def load_valid_mask(checkpoint: Checkpoint) -> Tensor | None:
    """Load where the output fields had values in training; None if everywhere.

    Collective: all ranks of the run call it.

    Shapes:
        `(outputs, H, W)`, of the globe.
    """
    if VALID_KEY not in checkpoint.shapes:
        return None
    valid = torch.zeros(checkpoint.shapes[VALID_KEY], dtype=torch.uint8)
    run_on_all_ranks(lambda: checkpoint.read({VALID_KEY: valid}))
    return valid.bool()


def load_weights(checkpoint: Checkpoint, parts: tuple[nn.Module, ...]) -> None:
    """Load the weights of a checkpoint into this rank's parts of a model; averages, if there are.

    Collective: all ranks of the run call it.

    Raises:
        UserError: on all ranks, if the weights are of another model, or can't be read.
    """
    model = model_tensors(parts)
    shapes = TensorTable.gather(lambda: model).shapes
    where = f"{checkpoint.key}: {checkpoint.folder}"
    check_model_shapes(where, model_shapes(checkpoint.shapes), model_shapes(shapes), ADVICE)
    tensors = {}
    for name, tensor in model.items():
        average = AVERAGE_PREFIX + name.removeprefix(MODEL_PREFIX)
        tensors[average if average in checkpoint.shapes else name] = tensor
    run_on_all_ranks(lambda: checkpoint.read(tensors))
