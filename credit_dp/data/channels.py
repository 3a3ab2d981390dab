"""The channels of a sample and their order, expanded from the variables of the config."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from credit_dp.fields import Fields
from credit_dp.variable_names import possible_canonical_names


@dataclass(frozen=True)
class Channel:
    """One two-dimensional field of a variable; `level` is None for a surface variable."""

    variable: str
    level: int | None = None

    @property
    def name(self) -> str:
        """The name with its level, as `geopotential_500`; `2m_temperature` has none."""
        return self.variable if self.level is None else f"{self.variable}_{self.level}"


@dataclass(frozen=True)
class Channels:
    """The channels of a model, in the order of its tensors.

    Its input has the prognostic channels, the forcings and the statics, its output the prognostic
    and the diagnostic channels.
    """

    prognostic: tuple[Channel, ...]
    forcing: tuple[str, ...]
    static: tuple[str, ...]
    diagnostic: tuple[Channel, ...] = ()

    def fields(self, frames: int = 1, denoises: bool = False) -> Fields:
        """Return the channel layout of a model.

        Args:
            frames: states in its input.
            denoises: whether a noisy output is among its inputs.
        """
        upper_air: dict[str, list[int]] = {}
        surface = []
        for index, channel in enumerate(self.prognostic):
            if channel.level is None:
                surface.append(index)
            else:
                upper_air.setdefault(channel.variable, []).append(index)
        inputs_only = len(self.forcing) + len(self.static)
        return Fields(
            upper=tuple(map(tuple, upper_air.values())),
            surface=tuple(surface),
            others=inputs_only,
            frames=frames,
            diagnostic=len(self.diagnostic),
            noisy=self.num_outputs if denoises else 0,
        )

    @property
    def output_channels(self) -> tuple[Channel, ...]:
        """The channels of the output: prognostic, then diagnostic."""
        return self.prognostic + self.diagnostic

    @property
    def num_states(self) -> int:
        """The number of channels of a state, which are the prognostic ones."""
        return len(self.prognostic)

    @property
    def num_outputs(self) -> int:
        """The number of output channels, prognostic and diagnostic."""
        return len(self.prognostic) + len(self.diagnostic)

    @property
    def variables(self) -> tuple[str, ...]:
        """The prognostic variables in order, each once."""
        return tuple(dict.fromkeys(channel.variable for channel in self.prognostic))

    def slice_of(self, variable: str) -> slice:
        """Return the slice of `output_channels` that holds the levels of one variable."""
        indices = [
            i for i, channel in enumerate(self.output_channels) if channel.variable == variable
        ]
        return slice(indices[0], indices[-1] + 1)


def expand_channels(
    variables: Sequence[str], on_levels: set[str], levels: Sequence[int]
) -> list[Channel]:
    """Return the channels of variables in config order: one per level, or one if on no level."""
    channels = []
    for variable in variables:
        variable_levels: Sequence[int | None] = levels if variable in on_levels else (None,)
        channels += [Channel(variable, level) for level in variable_levels]
    return channels


def suggest_names(name: str, available: Iterable[str]) -> str:
    """Return the hint of an error message about an unknown name: close matches, or all names.

    A name also matches by its long name: `t` for `temperature`. The hint shows both.
    """
    labels = {}
    for candidate in sorted(available):
        long_names = sorted(possible_canonical_names(candidate) - {candidate})
        labels[candidate] = f"{candidate} ({' or '.join(long_names)})" if long_names else candidate
    # Own names come last, so that they replace the same long name of another candidate.
    by_meaning = {
        long_name: label
        for candidate, label in labels.items()
        for long_name in possible_canonical_names(candidate)
    } | labels
    matches = difflib.get_close_matches(name, by_meaning, n=3, cutoff=0.5)
    if matches:
        nearest = dict.fromkeys(by_meaning[match] for match in matches)
        return f"Nearest: {', '.join(nearest)}"
    all_labels = list(labels.values())
    return f"There are: {', '.join(all_labels[:12])}{', ...' if len(all_labels) > 12 else ''}"
