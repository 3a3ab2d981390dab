"""The training loss: an error weighted by area, pressure level and variable.

`build_loss` makes a `WeightedLoss` from the config. Its error at a grid point is a function of the
forecast, or its members, and the truth at that point: one of this package, or one of a plug-in,
which is tried before training. Optionally adds a spectral error of each row, with the same weights,
and errors of whole fields (`field_errors`). Every rank computes the part of its band; the parts add
up to the loss of the globe. Ranks that share the members of a sample exchange them
(`trade_members`): each scores all members of some channels. With `loss.scales` the members are
scored as means over neighbourhoods, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from credit_dp.channel_parallel import channel_slice, channels_per_rank, rows_to_channels
from credit_dp.config import LossConfig, OwnLossConfig, StandardLossConfig
from credit_dp.data.channels import Channel, Channels, suggest_names
from credit_dp.data.grid import Grid
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import SingleRankTransport, Transport
from credit_dp.errors import UserError
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.field_errors import (
    FLOOR,
    FieldError,
    build_area_means,
    build_field_errors,
    loss_quadrature,
)


@final
class WeightedLoss:
    """Computes this rank's part of the weighted mean error, in units of each channel's `scale`.

    Shapes:
        forecast `(B * M, C, h, W)` and target `(B, C, h, W)`, both normalised -> scalar. The M
        members of a sample that this rank has are neighbours; M is 1 unless the error is that of
        ensembles.

    Args:
        config: the kind of error; its weights are already part of `rows` and `channels`.
        rows: weight of each row of this rank, `(h,)`, or of each point, `(h, W)`; those of the
            whole grid have mean 1.
        channels: weight of each channel, `(C,)`: they sum to 1 if all points have values.
        scale: the divisor of differences, `(C, 1, 1)`.
        kinds: name of each channel's error, if not all have that of the config.
        field_errors: errors of whole fields, with their weights.
        means: averages errors of some channels over each neighbourhood, if the error is that of
            ensembles: it is the mean of their errors. Empty: the errors of points.
        ensemble: connects the ranks that have the other members of the same samples. Then the part
            of the loss is that of this rank's channels, too; all of these ranks call it together.
    """

    def __init__(
        self,
        config: LossConfig,
        rows: Tensor,
        channels: Tensor,
        scale: Tensor,
        height: int,
        points: ValidPoints | None = None,
        kinds: Sequence[str] = (),
        field_errors: Sequence[FieldError] = (),
        means: Sequence[Callable[[Tensor, slice], Tensor]] = (),
        ensemble: Transport | None = None,
    ) -> None:
        self.spectrum = config.spectrum
        self.kinds = kinds
        self.field_errors = field_errors
        self.means = means or (lambda errors, channels: errors,)
        self.scale = scale
        self.points = points
        self.ensemble = ensemble or SingleRankTransport()
        shares = channels_per_rank(len(scale), self.ensemble.size)
        self.own_channels = channel_slice(shares, self.ensemble.rank)
        self.plugin_error: Callable[[Tensor, Tensor], Tensor] | None = None  # the user's
        self.pointwise = self._pointwise(config)
        self.weight = rows.reshape(len(rows), -1) * channels[:, None, None] / height

    def __call__(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Return this rank's part of the weighted error of the globe and batch."""
        return self.by_channel(forecast, target).sum()

    def by_channel(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Return the part of the loss that each channel adds, `(C,)`, its spectrum included."""
        batch, channels, _, width = target.shape
        own = self.own_channels
        error = self.pointwise(forecast, target)
        total = (error * self.weight[own]).sum((0, 2, 3)) / (batch * width)
        if self.ensemble.size > 1:  # other ranks score the other channels
            total = functional.pad(total, (own.start, channels - own.stop))
        if not self.spectrum and not self.field_errors:
            return total
        # Each member should have the truth's spectrum, which their mean has not: no rank needs the
        # members of others.
        members = len(forecast) // batch
        forecast, truth = self.scaled(forecast), self.scaled(target).repeat_interleave(members, 0)
        if self.spectrum:
            error = spectrum_error(forecast, truth)
            error = (error * self.weight[..., 0]).sum((0, 2)) / (batch * members)
            error = error / self.ensemble.size
            total = total + self.spectrum * error
        for field_error in self.field_errors:
            total = total + field_error(forecast, truth) / self.ensemble.size
        return total

    def _pointwise(self, config: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the error at each point of this rank's channels, 0 where there are no values."""
        if isinstance(config, StandardLossConfig) and config.name == "crps":
            alpha = config.alpha

            def ensemble_error(forecast: Tensor, target: Tensor) -> Tensor:
                members = forecast.view(len(target), -1, *target.shape[1:])
                errors = self.scaled(members - target[:, None])
                errors = trade_members(errors, self.ensemble)
                # The mean over a neighbourhood is linear: errors of means are means of errors.
                averaged = [mean(errors, self.own_channels) for mean in self.means]
                scores = [almost_fair_crps(each, alpha) for each in averaged]
                return torch.stack(scores).mean(0) if len(scores) > 1 else scores[0]

            return ensemble_error
        if isinstance(config, StandardLossConfig):
            error = build_difference_error(config, self.kinds)
            return lambda forecast, target: error(self.scaled(forecast - target))
        if not isinstance(config, OwnLossConfig):
            raise TypeError(f"{type(config).__name__} is the config of no loss")
        self.plugin_error = plugin_error = build_plugin_error(config, self.scale)

        def masked_error(forecast: Tensor, target: Tensor) -> Tensor:
            errors = plugin_error(self.scaled(forecast), self.scaled(target))
            # A plug-in's error of two zeros need not be zero.
            return errors if self.points is None else self.points.zero_invalid(errors)

        return masked_error

    def scaled(self, fields: Tensor) -> Tensor:
        """Divide fields by the scale, and set points without values to 0."""
        fields = fields / self.scale
        return fields if self.points is None else self.points.zero_invalid(fields)


def build_loss(
    config: LossConfig,
    channels: Channels,
    grid: Grid,
    rows: slice,
    scale: Tensor,
    points: ValidPoints | None = None,
    manager: DomainParallelManager | None = None,
    pressures: Mapping[int, float] | None = None,
) -> WeightedLoss:
    """Build the loss of the config for one band of rows.

    Collective if points are left out: all ranks of the domain call it.

    Args:
        channels: of the model.
        grid: of all ranks together.
        scale: `(C, 1, 1)`, standard deviation of normalised changes over one step, 1 for
            diagnostic channels; used with `loss.tendency` only. Has the loss's device and dtype.
        manager: knows the ranks that have the other rows, or other members; None: there are none.
        pressures: see `channel_weights`.

    Raises:
        UserError: on all ranks, if `loss.variable_weight` or `loss.variable_error` names no output
            variable, all weights are 0, a channel has no values at all, the rows do not fit
            `loss.sphere_spectrum`, or a region has a loss of spectra.
    """
    check_spectra(config, grid)
    weights = grid.weights if config.latitude_weight else np.ones(grid[0])
    band_weights = torch.as_tensor(np.asarray(weights[rows], dtype=np.float64)).to(scale.device)
    channel_weight = channel_weights(config, channels.output_channels, pressures)
    by_channel = torch.as_tensor(channel_weight).to(scale)
    by_channel = by_channel / by_channel.sum()
    if points is not None:
        valid_weight = points.globe_weight(band_weights)
        check_channels_have_values(channels, valid_weight)
        # `WeightedLoss` divides by the number of all points of the globe. This factor replaces it
        # by the weight of the points with values, which differs between channels.
        by_channel = by_channel * (grid[0] * points.columns / valid_weight).to(scale)
    if not config.tendency:
        scale = torch.ones_like(scale)
    manager = manager or DomainParallelManager(1, 1)
    return WeightedLoss(
        config,
        band_weights.to(scale),
        by_channel,
        scale,
        grid[0],
        points,
        channel_errors(config, channels.output_channels),
        build_field_errors(config, grid, weights, by_channel, manager, points),
        [
            build_area_means(radius, grid, manager, points, by_channel)
            for radius in scales_of(config)
        ],
        manager.ensemble_transport,
    )


def scales_of(config: LossConfig) -> list[float]:
    """Return the radii, in km, of the neighbourhoods whose means the loss scores; 0: points."""
    return config.scales if isinstance(config, StandardLossConfig) else [0.0]


def check_spectra(config: LossConfig, grid: Grid) -> None:
    """Refuse spectra and area means in the loss of a region, and spectra of unusual rows.

    Raises:
        UserError: names the key.
    """
    for key, fits in (("spectrum", grid.is_periodic), ("sphere_spectrum", grid.is_global)):
        if getattr(config, key) and not fits:
            grid.check_global(f"loss.{key}", f"Set loss.{key}=0.")
    if scales_of(config) != [0.0]:
        grid.check_global("loss.scales", "Set loss.scales=[0].")
    if config.sphere_spectrum:
        loss_quadrature(np.sin(np.deg2rad(grid.latitude)))


def check_channels_have_values(channels: Channels, weights: Tensor) -> None:
    """Check that every channel has values somewhere on the globe.

    Args:
        channels: of the model.
        weights: total weight of the points with values, `(C,)`, of the globe.
    """
    for channel, weight in zip(channels.output_channels, weights.tolist(), strict=True):
        if not weight > 0:
            role = "prognostic" if channel in channels.prognostic else "diagnostic"
            raise UserError(
                f"data.variables.{channel.variable}.fill: needs a field with values on some "
                f"points, but {channel.name} has none on the globe. Leave it out of data.{role}, "
                "or choose another first date of data.dates.train."
            )


def channel_weights(
    config: LossConfig,
    channels: tuple[Channel, ...],
    pressures: Mapping[int, float] | None = None,
) -> NDArray[np.float64]:
    """Return the weight of each output channel, `(C,)`: its level's times its variable's.

    The weight of a level is proportional to its pressure, or to the number of a model level whose
    pressure is unknown, with mean 1 over all channels that have a level; that of a surface variable
    is 1. A channel that `loss.variable_weight` names, such as `temperature_500`, has that weight in
    place of its variable's.

    Args:
        channels: of the output.
        pressures: of each model level; None on pressure levels, or if they are unknown.

    Raises:
        UserError: `loss.variable_weight` names no output, or all weights are 0.
    """
    named = {channel.name for channel in channels}
    variables = [name for name in config.variable_weight if name not in named]
    check_variables("loss.variable_weight", variables, channels)

    def pressure(level: int) -> float:
        return level if pressures is None else pressures[level]

    levels = [pressure(channel.level) for channel in channels if channel.level is not None]
    mean_pressure = sum(levels) / len(levels) if levels else 1.0

    def weight(channel: Channel) -> float:
        by_level = 1.0
        if config.level_weight and channel.level is not None:
            by_level = pressure(channel.level) / mean_pressure
        weight = config.variable_weight.get(channel.variable, 1.0)
        return by_level * config.variable_weight.get(channel.name, weight)

    weights = np.array([weight(channel) for channel in channels])
    if not weights.sum() > 0:
        raise UserError(
            "loss.variable_weight: at least one variable needs a weight above 0, all are 0."
        )
    return weights


def check_variables(key: str, names: Collection[str], channels: Sequence[Channel]) -> None:
    """Check that a key of the loss names output variables only.

    Raises:
        UserError: it names another.
    """
    variables = {channel.variable for channel in channels}
    unknown = next((name for name in names if name not in variables), None)
    if unknown is not None:
        raise UserError(
            f"{key}: needs names from data.prognostic or data.diagnostic, got {unknown!r}. "
            f"{suggest_names(unknown, variables)}. Change the name in {key}."
        )


def channel_errors(config: LossConfig, channels: Sequence[Channel]) -> tuple[str, ...]:
    """Return the name of each channel's error; empty if all have that of the config.

    Raises:
        UserError: `loss.variable_error` names no output variable.
    """
    if not isinstance(config, StandardLossConfig) or not config.variable_error:
        return ()
    check_variables("loss.variable_error", config.variable_error, channels)
    return tuple(config.variable_error.get(c.variable, config.name) for c in channels)


def amplitudes(rows: Tensor) -> Tensor:
    """Return the amplitude of each zonal wavenumber: `A_k = sqrt(n_k |F_k|^2 / W^2 + FLOOR)`.

    `F_k = sum over j of x_j exp(-2 pi i j k / W)`. `n_k` is 1 for k = 0 and k = W / 2, and 2 for
    all others, which stand for the wavenumber -k as well. The powers without `FLOOR` therefore add
    up to the mean of `x_j^2` (Parseval's theorem).

    Shapes:
        `(..., W)` -> `(..., W // 2 + 1)`.

    Units:
        Those of `rows`.
    """
    width = rows.shape[-1]
    waves = torch.view_as_real(torch.fft.rfft(rows, norm="forward"))
    power = waves.square().sum(dim=-1)
    multiplicity = power.new_full(power.shape[-1:], 2.0)
    # Torch would copy an assigned number from the host, which makes it wait for a GPU.
    multiplicity[0].fill_(1.0)
    if width % 2 == 0:
        multiplicity[-1].fill_(1.0)
    return (power * multiplicity + FLOOR).sqrt()


def spectrum_error(forecast: Tensor, target: Tensor) -> Tensor:
    """Return the squared difference of amplitudes, summed over all zonal wavenumbers.

    It is at most the mean squared difference of the rows, and equals it if the waves of both have
    the same phases and differ in amplitude only.

    Shapes:
        `(..., W)` -> `(...)`.

    Source: Subich et al. 2025 (arXiv:2501.19374), the amplitude term of their loss, with one
    spectrum for each row instead of one for the sphere.
    """
    return (amplitudes(forecast) - amplitudes(target)).square().sum(dim=-1)


def huber(difference: Tensor, delta: float) -> Tensor:
    """Return `d^2 / 2` up to `|d| = delta`, and `delta (|d| - delta / 2)` beyond.

    Source: Huber 1964, Robust estimation of a location parameter.
    """
    return functional.huber_loss(
        difference, torch.zeros_like(difference), reduction="none", delta=delta
    )


def almost_fair_crps(errors: Tensor, alpha: float) -> Tensor:
    """Return `alpha` times the fair CRPS plus `1 - alpha` times that of the members as they are.

    With x_j the errors of M members and `eps = (1 - alpha) / M` this is the mean over all pairs of

        (|x_j| + |x_k| - (1 - eps) |x_j - x_k|) / 2

    No pair is negative, so that no digits cancel. The expectation of the fair score (alpha = 1)
    does not depend on M. But with alpha = 1 one member costs nothing, wherever it is, if all
    others are exact. For one member the score is the absolute error.

    Shapes:
        `(B, M, ...)` -> `(B, ...)`.

    Source: Zamo & Naveau 2018; Lang et al. 2024 (arXiv:2412.15832).
    """
    members = errors.shape[1]
    if members == 1:
        return errors[:, 0].abs()
    shrink = 1 - (1 - alpha) / members
    # A loop over pairs, not a sort: where members are equal the distance then has the gradient 0,
    # instead of one that depends on their order in the batch.
    total = torch.zeros_like(errors[:, 0])
    for j, k in combinations(range(members), 2):
        first, second = errors[:, j], errors[:, k]
        total = total + first.abs() + second.abs() - shrink * (first - second).abs()
    return total / (members * (members - 1))


def trade_members(x: Tensor, ensemble: Transport) -> Tensor:
    """Exchange some members of all channels for all members of this rank's channels.

    Differentiable: gradients go back the same way. Called by all ranks of an ensemble together.
    Each sends every other one a message, unless that one has no channel. The score of a point needs
    all members there, so that fewer values can't be sent; a gather of all members on all ranks
    sends as many to two ranks, and more to three and more.

    Shapes:
        `(B, M_own, C, h, W)` -> `(B, M, C_own, h, W)`, members in the order of the ranks.
    """
    if ensemble.size == 1:
        return x
    by_channel = x.flatten(-2).transpose(1, 2)  # members where a transpose has rows
    members = rows_to_channels(by_channel, [x.shape[1]] * ensemble.size, ensemble)
    # No -1 among the sizes: a rank without channels has no entries to find it from.
    return members.transpose(1, 2).reshape(
        len(x), members.shape[2], members.shape[1], *x.shape[-2:]
    )


def members_sent(
    samples: int, members: int, channels: int, points: int, rank: int, ranks: int
) -> int:
    """Return how many values a rank sends in `trade_members`, there and back.

    Args:
        samples: of this rank.
        members: of each sample, on all ranks together.
        channels: of a field.
        points: of this rank's band.
        rank: of the ensemble.
        ranks: of the ensemble.
    """
    own = channels_per_rank(channels, ranks)[rank]
    there, back = (channels - own) * members // ranks, own * (members - members // ranks)
    return samples * points * (there + back)


def build_difference_error(
    config: StandardLossConfig, kinds: Sequence[str] = ()
) -> Callable[[Tensor], Tensor]:
    """Return the error at a point as a function of the difference there, `(B, C, h, W)`.

    Args:
        kinds: name of each channel's error; empty: all have that of the config.
    """
    errors: dict[str, Callable[[Tensor], Tensor]] = {
        "mse": torch.square,
        "mae": torch.abs,
        "huber": partial(huber, delta=config.huber_delta),
    }
    if not kinds:
        return errors[config.name]
    # Channels of one kind at once, then back into their order.
    groups = [[c for c, kind in enumerate(kinds) if kind == name] for name in dict.fromkeys(kinds)]
    order = np.argsort(np.concatenate(groups)).tolist()

    def error(difference: Tensor) -> Tensor:
        parts = [errors[kinds[group[0]]](difference[:, group]) for group in groups]
        return torch.cat(parts, dim=1)[:, order]

    return error


def build_plugin_error(config: OwnLossConfig, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a plug-in's error at a point as a function of forecast and truth.

    The function is tried on small random tensors with the device and dtype of `like`.

    Raises:
        UserError: it can't be built, or its error at a point depends on other points: the losses
            of the bands would then not add up to the loss of the globe.
    """
    where = f"loss: {type(config).__name__}.build"
    if type(config).build is OwnLossConfig.build:
        raise UserError(
            f"loss: {type(config).__name__} has no build. It needs a method build(self) that "
            "returns a function of (forecast, truth)."
        )
    with report_plugin_errors(where):
        error = config.build()
    if not callable(error):
        raise UserError(
            f"{where} has to return a function of (forecast, truth), got {type(error).__name__}."
        )
    where = f"{where}: its function"
    draw = torch.Generator().manual_seed(0)
    forecast, truth = (torch.randn(3, 2, 4, 5, generator=draw).to(like) for _ in range(2))
    # Equal values: the gradient of some errors, such as a square root, is not finite there.
    forecast[0, 0, 0, :2] = truth[0, 0, 0, :2]
    forecast[0, 0, 0, 0] = truth[0, 0, 0, 0] = 0  # like points without values
    with report_plugin_errors(where):
        check_gradient(where, error, forecast, truth)
        check_pointwise(where, error, forecast, truth)
    return error


def check_gradient(
    where: str, error: Callable[[Tensor, Tensor], Tensor], forecast: Tensor, truth: Tensor
) -> None:
    """Check that a function returns a finite error for each point, with a finite gradient.

    Raises:
        UserError: it does not; the message begins with `where`.
    """
    forecast = forecast.clone().requires_grad_()
    errors = error(forecast, truth)
    if not isinstance(errors, Tensor):
        raise UserError(f"{where} has to return a tensor, got {type(errors).__name__}.")
    if errors.shape != truth.shape or errors.dtype != truth.dtype:
        raise UserError(
            f"{where} has to return an error for each point, {tuple(truth.shape)} of {truth.dtype} "
            f"for tensors of that shape, got {tuple(errors.shape)} of {errors.dtype}."
        )
    gradient = None
    if errors.requires_grad:
        (gradient,) = torch.autograd.grad(errors.sum(), forecast, allow_unused=True)
    if gradient is None or not (errors.isfinite().all() and gradient.isfinite().all()):
        raise UserError(
            f"{where} needs finite errors and a finite gradient with respect to the forecast, also "
            "where forecast and truth are equal."
        )


def check_pointwise(
    where: str, error: Callable[[Tensor, Tensor], Tensor], forecast: Tensor, truth: Tensor
) -> None:
    """Check that the error at a point does not depend on other points.

    Parts of the tensors are passed to the function alone; their errors must stay the same.

    Raises:
        UserError: the errors change; the message begins with `where`.
    """
    errors = error(forecast.clone(), truth.clone())
    # Vectorised kernels may round the same point differently in tensors of another shape.
    tolerance = 1000 * torch.finfo(errors.dtype).eps
    for dim, name in enumerate(("samples", "channels", "rows", "columns")):
        for part in (slice(0, 1), slice(1, None)):
            cut = (slice(None),) * dim + (part,)
            alone = error(forecast[cut].clone(), truth[cut].clone())
            same_shape = alone.shape == errors[cut].shape
            if not same_shape or not torch.allclose(
                alone, errors[cut], rtol=tolerance, atol=tolerance
            ):
                raise UserError(
                    f"{where} needs errors that depend only on their own point, but those of some "
                    f"{name} change without the others. Leave out means and weights: they are "
                    "applied afterwards."
                )
