"""Which dimensions of a model's tensors go by channels of the data, and by which.

Found by asking for the same model with one more of each kind of channel: what grows goes by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import nn

from credit_dp.config import ModelConfig
from credit_dp.data.schema import Channel
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training.data_description import KINDS, Description

Names = dict[str, list[str]]  # of the channels of each kind, in order


@final
class ChannelDim(NamedTuple):
    """A dimension with `each` neighbouring entries for each channel of a kind.

    `kind` is empty where no kind accounts for its size.
    """

    kind: str
    each: int


ChannelDims = Mapping[str, Mapping[int, ChannelDim]]  # by tensor and dimension


def channel_names(data: Description) -> Names:
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
        "input": [*of_frames([c.name for c in states], frames), *others],
        "input off levels": [*of_frames(surface, frames), *others],
        "input on levels": of_frames(upper, frames),
        "output": [channel.name for channel in out],
        "output off levels": [*surface, *diagnostic],
        "output on levels": upper,
    }


def of_frames(names: Sequence[str], frames: int) -> list[str]:
    """Names of the states that go in, the oldest first; the newest have their own."""
    ages = reversed(range(frames))
    return [f"{name} {age} steps ago" if age else name for age in ages for name in names]


def channel_dims(
    config: ModelConfig, fields: Fields, grid: tuple[int, int], names: Names
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
    shapes = shapes_of(config, fields, grid)
    found: dict[str, dict[int, ChannelDim]] = {name: {} for name in shapes}
    for more, kinds in more_fields(fields):
        for name, larger in shapes_of(config, more, grid).items():
            for dim, (size, grown) in enumerate(zip(shapes.get(name, ()), larger, strict=False)):
                if grown != size and dim not in found[name]:
                    each = [(k, (grown - size) / added) for k, added in kinds.items()]
                    fits = [ChannelDim(k, int(n)) for k, n in each if n * len(names[k]) == size]
                    found[name][dim] = fits[0] if fits else ChannelDim("", 0)
    if type(config) in KINDS.values():
        return found
    # Of another's model nobody knows how the entries of a channel lie if there are several.
    return {
        name: {at: dim if dim.each == 1 else ChannelDim("", 0) for at, dim in dims.items()}
        for name, dims in found.items()
    }


def more_fields(fields: Fields) -> list[tuple[Fields, Mapping[str, int]]]:
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


def shapes_of(
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
