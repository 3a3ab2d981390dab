"""What of a model's weights a checkpoint has, tensor by tensor and channel by channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from credit_dp.training.channel_dims import ChannelDim, Names
from credit_dp.training.shards import Shape
from credit_dp.training.state import AVERAGE, MODEL

NAMED = 3  # so many tensors are named, further ones are counted


@final
@dataclass(frozen=True)
class Match:
    """What of a tensor is in the checkpoint.

    Attributes:
        source: its name there; empty if there is nothing.
        own, saved: for each dimension that goes by channels, the entries here and there that
            belong together, where these are not all in the same order.
        note: which channels, for people.
    """

    source: str = ""
    own: tuple[list[int] | None, ...] = ()
    saved: tuple[list[int] | None, ...] = ()
    note: str = ""


def find(
    name: str,
    shape: Shape,
    saved: Mapping[str, Shape],
    dims: Mapping[int, ChannelDim],
    names: tuple[Names, Names],
) -> Match:
    """What a checkpoint has of a tensor.

    Args:
        name: in the model.
        shape: of all of it.
        saved: shapes of the checkpoint's tensors.
        dims: those of the tensor that go by channels, where channels are not the same.
        names: of the channels, here and in the checkpoint.
    """
    source = next((p + name for p in (AVERAGE, MODEL) if p + name in saved), "")
    if not source or len(saved[source]) != len(shape):
        return Match()
    own: list[list[int] | None] = []
    there: list[list[int] | None] = []
    notes = []
    for at, (size, size_there) in enumerate(zip(shape, saved[source], strict=True)):
        kind, each = dims.get(at, ChannelDim("", 1))
        here, before = (of_kind.get(kind, []) for of_kind in names)
        if at not in dims or here == before != []:
            if size != size_there:
                return Match()
            own.append(None)
            there.append(None)
            continue
        common = [channel for channel in here if channel in before]
        if not common or size_there != each * len(before):
            return Match()
        own.append(entries(common, here, each))
        there.append(entries(common, before, each))
        notes.append(f"{len(common)} of {len(here)} {kind.split()[0]} channels")
    return Match(source, tuple(own), tuple(there), " and ".join(notes))


def entries(channels: list[str], among: list[str], each: int) -> list[int]:
    """The numbers of the entries of some channels, `each` for every one of them."""
    return [among.index(channel) * each + entry for channel in channels for entry in range(each)]


def report(
    folder: Path,
    matches: Mapping[str, Match],
    saved: Mapping[str, Shape],
    otherwise: list[str],
) -> str:
    """What was found, in one line; `otherwise` are channels that are normalised differently."""
    parts = [f"{name}: {match.note}" for name, match in sorted(matches.items()) if match.note]
    fresh = [name for name, match in sorted(matches.items()) if not match.source]
    used = {match.source.removeprefix(AVERAGE).removeprefix(MODEL) for match in matches.values()}
    there = {name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)}
    found = len(matches) - len(fresh)
    averages = any(match.source.startswith(AVERAGE) for match in matches.values())
    return (
        f"{found} of {len(matches)} tensors from {folder}"
        f"{' (averages)' if averages else ''}{told(parts, 'in part')}"
        f"{told(fresh, 'fresh')}{told(sorted(there - used), 'of the checkpoint not used')}"
        f"{told(otherwise, 'channels normalised by another mean or deviation')}"
    )


def told(names: list[str], what: str) -> str:
    """How many they are, and the first ones."""
    if not names:
        return ""
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"; {len(names)} {what} ({', '.join(names[:NAMED])}{more})"
