"""The training loss: an error weighted by area, pressure level and variable."""

from collections.abc import Callable
from functools import partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from credit_dp.config import LossConfig, OwnLossConfig, StandardLossConfig
from credit_dp.data.channels import Channel, Channels, suggest_names
from credit_dp.data.grid import row_weights
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import ValidPoints
from credit_dp.plugins import report_plugin_errors

# Added to the power of a wavenumber, which makes the amplitude smooth where there is none: its
# gradient is 0 there, and nowhere above 1.
FLOOR = 1e-8


def amplitudes(rows: Tensor) -> Tensor:
    """How strong each zonal wavenumber is: `A_k = sqrt(n_k |F_k|^2 / W^2 + FLOOR)`.

    `F_k = sum over j of x_j exp(-2 pi i j k / W)`. `n_k` is 2 where the wavenumber -k is another
    one, 1 for k = 0 and k = W / 2. The powers, without their floor, thus add up to the mean of
    `x_j^2` (Parseval's theorem).

    Shapes:
        `(..., W)` -> `(..., W // 2 + 1)`.

    Units:
        Those of `rows`.
    """
    width = rows.shape[-1]
    waves = torch.view_as_real(torch.fft.rfft(rows, norm="forward"))
    power = waves.square().sum(dim=-1)
    times = power.new_full(power.shape[-1:], 2.0)
    times[0] = 1.0
    if width % 2 == 0:
        times[-1] = 1.0
    return (power * times + FLOOR).sqrt()


def spectrum_error(forecast: Tensor, target: Tensor) -> Tensor:
    """Squared difference of amplitudes, added up over all zonal wavenumbers.

    It is never more than the mean squared difference of the rows themselves, and equals it where
    the waves of both lie at the same places and differ in strength alone.

    Shapes:
        `(..., W)` -> `(...)`.

    Source: Subich et al. 2025 (arXiv:2501.19374), the part of their loss that amplitudes have,
    here with one spectrum for each row in place of one for the sphere.
    """
    return (amplitudes(forecast) - amplitudes(target)).square().sum(dim=-1)


def huber(difference: Tensor, delta: float) -> Tensor:
    """`d^2 / 2` up to `delta`, beyond it `delta (|d| - delta / 2)`.

    Source: Huber 1964, Robust estimation of a location parameter.
    """
    return functional.huber_loss(
        difference, torch.zeros_like(difference), reduction="none", delta=delta
    )


def build_difference_error(config: StandardLossConfig) -> Callable[[Tensor], Tensor]:
    """Return the error at a point as a function of the difference there."""
    errors: dict[str, Callable[[Tensor], Tensor]] = {
        "mse": torch.square,
        "mae": torch.abs,
        "huber": partial(huber, delta=config.huber_delta),
    }
    return errors[config.name]


def build_plugin_error(config: OwnLossConfig, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the error at a point as a function of forecast and truth, as a plug-in builds it.

    It is tried on small random tensors of the device and dtype of `like`.

    Raises:
        UserError: it can't be built, or is not one error for each point from that point alone:
            bands would then not add up to the loss of the globe.
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
    forecast[0, 0, 0, :2] = truth[0, 0, 0, :2]
    forecast[0, 0, 0, 0] = truth[0, 0, 0, 0] = 0  # as where there are no values
    with report_plugin_errors(where):
        check_gradient(where, error, forecast, truth)
        check_pointwise(where, error, forecast, truth)
    return error


def check_gradient(
    where: str, error: Callable[[Tensor, Tensor], Tensor], forecast: Tensor, truth: Tensor
) -> None:
    """Refuse a function that does not return a finite error for each point, with a gradient.

    Raises:
        UserError: beginning with `where`.
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
    """Refuse a function whose error at a point depends on other points.

    Raises:
        UserError: beginning with `where`.
    """
    errors = error(forecast.clone(), truth.clone())
    near = 1000 * torch.finfo(errors.dtype).eps  # vectorised operations may round otherwise
    for dim, name in enumerate(("samples", "channels", "rows", "columns")):
        for part in (slice(0, 1), slice(1, None)):
            cut = (slice(None),) * dim + (part,)
            alone = error(forecast[cut].clone(), truth[cut].clone())
            same = alone.shape == errors[cut].shape
            if not same or not torch.allclose(alone, errors[cut], rtol=near, atol=near):
                raise UserError(
                    f"{where} needs errors that depend on their own point alone, but those of some "
                    f"{name} change without the others. Leave out means and weights: they are "
                    "taken afterwards."
                )


@final
class WeightedLoss:
    """This rank's share of the weighted mean error, in units of each channel's `scale`.

    Shapes:
        forecast and target `(B, C, h, W)`, both normalised -> scalar.

    Args:
        config: which error it is; its weights are in `rows` and `channels` already.
        rows: weight of each own row, `(h,)`, scaled so that the globe's weights have mean 1.
        channels: weight of each channel, `(C,)`: they sum to 1 if all points have values.
        scale: what differences are divided by, `(C, 1, 1)`.
        height: rows of the whole globe.
        points: those with values, if not all have them.
    """

    def __init__(
        self,
        config: LossConfig,
        rows: Tensor,
        channels: Tensor,
        scale: Tensor,
        height: int,
        points: ValidPoints | None = None,
    ) -> None:
        self.spectrum = config.spectrum
        self.scale = scale
        self.points = points
        self.pointwise = self._pointwise(config)
        self.weight = rows[:, None] * channels[:, None, None] / height

    def __call__(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Own rows' weighted error over the weight of the globe and of the batch given."""
        return self.by_channel(forecast, target).sum()

    def by_channel(self, forecast: Tensor, target: Tensor) -> Tensor:
        """What each channel adds to the loss, with its spectrum if that counts: `(C,)`."""
        error = self.pointwise(forecast, target)
        batch, _, _, width = error.shape
        total = (error * self.weight).sum((0, 2, 3)) / (batch * width)
        if self.spectrum:
            error = spectrum_error(self.scaled(forecast), self.scaled(target))
            total = total + self.spectrum * (error * self.weight[..., 0]).sum((0, 2)) / batch
        return total

    def _pointwise(self, config: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the error at each point, 0 where there are no values."""
        if isinstance(config, StandardLossConfig):
            error = build_difference_error(config)
            return lambda forecast, target: error(self.scaled(forecast - target))
        if not isinstance(config, OwnLossConfig):
            raise TypeError(f"{type(config).__name__} is the config of no loss")
        own = build_plugin_error(config, self.scale)

        def of_both(forecast: Tensor, target: Tensor) -> Tensor:
            errors = own(self.scaled(forecast), self.scaled(target))
            return errors if self.points is None else self.points.zero_invalid(errors)

        return of_both

    def scaled(self, fields: Tensor) -> Tensor:
        """In units of the loss; 0 where there are no values, in forecast and target alike."""
        fields = fields / self.scale
        return fields if self.points is None else self.points.zero_invalid(fields)


def build_loss(
    config: LossConfig,
    channels: Channels,
    latitude: NDArray[np.float64],
    rows: slice,
    scale: Tensor,
    points: ValidPoints | None = None,
) -> WeightedLoss:
    """The loss that the config asks for, on these rows of the globe.

    Collective where points are left out: all ranks of the domain call it.

    Args:
        config: of the loss.
        channels: of the model.
        latitude: of all rows.
        rows: the rank's own.
        scale: `(C, 1, 1)`, of normalised changes over one step, 1 for what only comes out; its
            device and dtype become the loss's. It counts with `loss.tendency` only.
        points: those with values, if not all have them.

    Raises:
        UserError: `loss.variable_weight` names no variable that comes out, all weights are 0, or a
            channel has no values at all; on all ranks alike.
    """
    weights = row_weights(latitude) if config.latitude_weight else np.ones(len(latitude))
    own = torch.as_tensor(np.asarray(weights[rows], dtype=np.float64)).to(scale.device)
    shares = torch.as_tensor(channel_weights(config, channels.output_channels)).to(scale)
    shares = shares / shares.sum()
    if points is not None:
        covered = points.globe_weight(own)
        check_channels_have_values(channels, covered)
        # What divides by all points of the globe is to divide by those with values.
        shares = shares * (len(latitude) * points.columns / covered).to(scale)
    if not config.tendency:
        scale = torch.ones_like(scale)
    return WeightedLoss(config, own.to(scale), shares, scale, len(latitude), points)


def check_channels_have_values(channels: Channels, covered: Tensor) -> None:
    """Refuse a channel whose weight is 0 all over the globe.

    Raises:
        UserError: naming the first.
    """
    for channel, weight in zip(channels.output_channels, covered.tolist(), strict=True):
        if not weight > 0:
            role = "prognostic" if channel in channels.prognostic else "diagnostic"
            raise UserError(
                f"data.variables.{channel.variable}.fill: needs a field with values on some "
                f"points, but {channel.name} has none on the globe. Leave it out of data.{role}, "
                "or choose another first date of data.dates.train."
            )


def channel_weights(config: LossConfig, channels: tuple[Channel, ...]) -> NDArray[np.float64]:
    """Weight of each channel that comes out, `(C,)`: its level's times its variable's.

    A level weighs as its pressure, with mean 1 over all channels that have a level; a surface
    variable weighs 1.

    Raises:
        UserError: `loss.variable_weight` names no variable that comes out, or all weights are 0.
    """
    variables = {channel.variable for channel in channels}
    unknown = next((name for name in config.variable_weight if name not in variables), None)
    if unknown is not None:
        raise UserError(
            "loss.variable_weight: needs names from data.prognostic or data.diagnostic, got "
            f"{unknown!r}. {suggest_names(unknown, variables)}. Change the name in "
            "loss.variable_weight."
        )
    levels = [channel.level for channel in channels if channel.level is not None]
    mean_level = sum(levels) / len(levels) if levels else 1.0

    def weight(channel: Channel) -> float:
        by_level = config.level_weight and channel.level is not None
        level = channel.level / mean_level if by_level and channel.level is not None else 1.0
        return level * config.variable_weight.get(channel.variable, 1.0)

    weights = np.array([weight(channel) for channel in channels])
    if not weights.sum() > 0:
        raise UserError(
            "loss.variable_weight: at least one variable needs a weight above 0, all are 0."
        )
    return weights
