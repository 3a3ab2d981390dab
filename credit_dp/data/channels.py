"""Which channels a sample has and in which order, expanded from the variables of the config."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from credit_dp.fields import Fields
from credit_dp.variable_names import possible_canonical_names


@dataclass(frozen=True)
class Channel:
    """One two-dimensional field of a variable. `level` is None off the levels."""

    variable: str
    level: int | None = None

    @property
    def name(self) -> str:
        """`geopotential_500`, or `2m_temperature` where there is no level."""
        return self.variable if self.level is None else f"{self.variable}_{self.level}"


@dataclass(frozen=True)
class Channels:
    """All channels of a model in the order in which it carries them.

    In go the prognostic ones, forcings and statics; out come the prognostic and diagnostic ones.
    """

    prognostic: tuple[Channel, ...]
    forcing: tuple[str, ...]
    static: tuple[str, ...]
    diagnostic: tuple[Channel, ...] = ()

    def fields(self, frames: int = 1) -> Fields:
        """What a model that takes `frames` states is told about its channels."""
        upper: dict[str, list[int]] = {}
        surface = []
        for place, channel in enumerate(self.prognostic):
            if channel.level is None:
                surface.append(place)
            else:
                upper.setdefault(channel.variable, []).append(place)
        others = len(self.forcing) + len(self.static)
        on_levels, at_surface = tuple(map(tuple, upper.values())), tuple(surface)
        if not self.diagnostic:
            return Fields(on_levels, at_surface, others, frames)
        return Fields(on_levels, at_surface, others, frames, diagnostic=len(self.diagnostic))

    @property
    def output_channels(self) -> tuple[Channel, ...]:
        """What comes out: the prognostic channels, then the diagnostic ones."""
        return self.prognostic + self.diagnostic

    @property
    def states(self) -> int:
        """Channels of a state: the prognostic ones."""
        return len(self.prognostic)

    @property
    def outputs(self) -> int:
        """Channels that come out: the prognostic and the diagnostic ones."""
        return len(self.prognostic) + len(self.diagnostic)

    @property
    def variables(self) -> tuple[str, ...]:
        """The prognostic variables, each once, in order."""
        return tuple(dict.fromkeys(channel.variable for channel in self.prognostic))

    def of(self, variable: str) -> slice:
        """Where the levels of one variable that comes out lie among the channels of `out`."""
        places = [
            i for i, channel in enumerate(self.output_channels) if channel.variable == variable
        ]
        return slice(places[0], places[-1] + 1)


def expand_channels(
    variables: Sequence[str], on_levels: set[str], levels: Sequence[int]
) -> list[Channel]:
    """One channel per level of each variable in `on_levels`, one for any other, in config order."""
    channels = []
    for variable in variables:
        wanted: Sequence[int | None] = levels if variable in on_levels else (None,)
        channels += [Channel(variable, level) for level in wanted]
    return channels


def suggest_names(wanted: str, available: Iterable[str]) -> str:
    """What a message offers instead of an unknown name: close matches, or else what there is.

    Names are close by themselves or by what they mean, which is said of short ones.
    """
    labels = {}
    for name in sorted(available):
        others = sorted(possible_canonical_names(name) - {name})
        labels[name] = f"{name} ({' or '.join(others)})" if others else name
    by_meaning = {
        long: text for name, text in labels.items() for long in possible_canonical_names(name)
    } | labels
    close = difflib.get_close_matches(wanted, by_meaning, n=3, cutoff=0.5)
    if close:
        return f"Nearest: {', '.join(dict.fromkeys(by_meaning[name] for name in close))}"
    names = list(labels.values())
    return f"There are: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
