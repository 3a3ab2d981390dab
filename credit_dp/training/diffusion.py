"""Diffusion of a forecast step: noisy targets to train on, and the sampler that forecasts.

What is denoised is the model's output, in units in which it has about unit variance: tendencies of
the states, divided by their standard deviation, and diagnostic fields. With y the noisy output,
`y = x + sigma n`, c the other inputs and F the network, the denoiser is

    D(y, c; sigma) = c_skip y + c_out F(c, c_in y; ln(sigma) / 4)

Its loss, weighted by `1 / c_out^2`, is the squared error of F against `(x - c_skip y) / c_out`. So
a training step is that of any other model, with other inputs and targets: `Denoising` makes them.
In forecasts `Sampler` stands for the network: from noise it integrates the probability flow to a
sample of the output. All noise is drawn row by row, from keys that do not depend on the mesh.

Source: Karras et al. 2022 (arXiv:2206.00364), "EDM"; for forecasts, with this distribution of noise
levels in training, Price et al. 2023 (arXiv:2312.15796), "GenCast".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from credit_dp.config import DiffusionConfig
from credit_dp.constants import constant_tensor
from credit_dp.data.loader import Batch
from credit_dp.data.valid_points import ValidPoints
from credit_dp.models.blocks import set_noise
from credit_dp.random_streams import random_seed, random_stream
from credit_dp.training.forecast_step import ForecastStep, Model, NoiseKeys

# Keys of the two streams of a sample in training, see `credit_dp.random_streams`.
LEVEL, FIELD = 3, 4
EMBEDDING_PERIOD = 16.0  # of the slowest wave of `level_embedding`, in ln(sigma)
MAX_CHURN = math.sqrt(2) - 1  # a noise level rises by at most this share


def preconditioning(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return c_skip, c_out and c_in: inputs and targets of the network then have unit variance.

    Source: Karras et al. 2022, table 1.
    """
    total = sigma**2 + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data / total.sqrt(), total.rsqrt()


def level_embedding(sigma: float, size: int) -> list[float]:
    """Return `size` cosines and sines of harmonics of `ln(sigma)`."""
    phase = 2 * math.pi * math.log(sigma) / EMBEDDING_PERIOD
    waves = range(1, size // 2 + 1)
    return [*(math.cos(k * phase) for k in waves), *(math.sin(k * phase) for k in waves)]


def level_at(config: DiffusionConfig, position: float) -> float:
    """Return the noise level at a position from 0, `sigma_max`, to 1, `sigma_min`.

    Source: Karras et al. 2022, eq. 5.
    """
    first, last = (s ** (1 / config.rho) for s in (config.sigma_max, config.sigma_min))
    return float((first + position * (last - first)) ** config.rho)


def sampling_levels(config: DiffusionConfig) -> list[float]:
    """Return the `sampling_steps` noise levels of the sampler, and 0 at the end."""
    intervals = max(1, config.sampling_steps - 1)
    return [*(level_at(config, i / intervals) for i in range(config.sampling_steps)), 0.0]


def set_level(part: nn.Module, levels: Sequence[float]) -> None:
    """Tell a model, or its part, the noise level of each sample of the coming forward pass."""
    set_noise(part, lambda size: [level_embedding(sigma, size) for sigma in levels])


def normal_rows(
    keys: NoiseKeys, suffix: int, rows: slice, shape: tuple[int, int], like: Tensor
) -> Tensor:
    """Return normal numbers for a band of rows, the same for a row on every mesh.

    On GPUs they are other numbers than on CPUs.

    Args:
        keys: of each sample; those of a row are followed by its number and `suffix`, above 0.
        shape: channels and columns.

    Shapes:
        -> `(B, C, h, W)`.
    """
    channels, columns = shape
    noise = like.new_empty(len(keys), channels, rows.stop - rows.start, columns)
    generator = torch.Generator(like.device)
    for sample, key in enumerate(keys):
        for index, row in enumerate(range(rows.start, rows.stop)):
            generator.manual_seed(random_seed(*key, row, suffix))
            noise[sample, :, index] = torch.randn(
                shape, generator=generator, dtype=like.dtype, device=like.device
            )
    return noise


@final
class Denoising:
    """Turns batches into those from which the network learns to denoise.

    Args:
        step: turns outputs into fields, without fixers: these are for forecasts.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        step: ForecastStep,
        rows: slice,
        seed: int,
        points: ValidPoints | None,
    ) -> None:
        self.config = config
        self.step = step
        self.rows = rows
        self.seed = seed
        self.points = points

    def levels(self, step: int, samples: Sequence[int]) -> list[float]:
        """Return the noise level of each sample: evenly distributed over positions of `level_at`.

        Args:
            samples: numbers of the samples in the global batch.
        """
        draws = (random_stream(self.seed, step, sample, LEVEL, 0, 1) for sample in samples)
        return [level_at(self.config, draw.random()) for draw in draws]

    def __call__(self, batch: Batch, step: int, samples: Sequence[int]) -> Batch:
        """Return the batch with the noisy output among its inputs, and the network's target.

        The arguments are those of `levels`. A stage of a pipeline that has no target, as it is
        neither the first nor the last one, gets the batch back.
        """
        if not batch.target.shape[1]:
            return batch
        last = batch.state[:, -self.step.states :]
        clean = self.step.output_from_fields(batch.target, last)
        levels = self.levels(step, samples)
        sigma = constant_tensor(levels, clean.device, clean.dtype)[:, None, None, None]
        keys = [(self.seed, step, sample, FIELD) for sample in samples]
        shape = (clean.shape[1], clean.shape[3])
        noisy = clean + sigma * normal_rows(keys, 1, self.rows, shape, clean)
        if self.points is not None:
            # As in the sampler, where nothing is known there.
            noisy = self.points.zero_invalid(noisy)
        c_skip, c_out, c_in = preconditioning(sigma, self.config.sigma_data)
        target = (clean - c_skip * noisy) / c_out
        # The model's inputs end with the static fields, then comes the noisy output. The loss
        # compares fields: the target becomes one as the network's output will.
        return replace(
            batch,
            static=torch.cat([batch.static, c_in * noisy], dim=1),
            target=self.step.fields_from_output(target, last),
        )


@final
class Sampler:
    """Draws a sample of the model's output, with the network called at several noise levels.

    Heun's method of second order for the probability flow, from `sigma_max` to 0; with `s_churn`
    noise is added again before each step.

    Args:
        points: the points with values, if not all have values; the others stay 0.

    Attributes:
        keys: of the random stream of each sample of the coming call.

    Shapes:
        the model's other inputs, `(B, C in, h, W)` -> `(B, channels, h, W)`.

    Source: Karras et al. 2022, algorithm 2, which without churn is algorithm 1.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        network: Model,
        parts: Sequence[nn.Module],
        channels: int,
        rows: slice,
        points: ValidPoints | None = None,
    ) -> None:
        self.config = config
        self.network = network
        self.parts = parts
        self.channels = channels
        self.rows = rows
        self.points = points
        self.keys: NoiseKeys = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the sample; the noise depends on `keys` alone.

        Raises:
            ValueError: `keys` are those of another number of samples.
        """
        if len(self.keys) != len(inputs):
            raise ValueError(f"Sampler: has keys of {len(self.keys)} samples, got {len(inputs)}")
        shape = (self.channels, inputs.shape[-1])

        def draw(number: int) -> Tensor:
            noise = normal_rows(self.keys, number + 1, self.rows, shape, inputs)
            return noise if self.points is None else self.points.zero_invalid(noise)

        def denoise(noisy: Tensor, sigma: float) -> Tensor:
            c_skip, c_out, c_in = preconditioning(
                torch.tensor(sigma, dtype=torch.float64), self.config.sigma_data
            )
            for part in self.parts:
                set_level(part, [sigma] * len(inputs))
            output = self.network(torch.cat([inputs, c_in * noisy], dim=1))
            denoised = c_skip * noisy + c_out * output
            return denoised if self.points is None else self.points.zero_invalid(denoised)

        return integrate(self.config, denoise, draw)


def integrate(
    config: DiffusionConfig,
    denoise: Callable[[Tensor, float], Tensor],
    draw: Callable[[int], Tensor],
) -> Tensor:
    """Return what the sampler makes of its first draw.

    Args:
        config: noise levels and churn.
        denoise: returns the expected clean sample, given a noisy one and its noise level.
        draw: returns normal numbers; 0 are those of the start, 1 and so on those of each step.
    """
    levels = sampling_levels(config)
    churn = min(config.s_churn / config.sampling_steps, MAX_CHURN)
    s_tmax = math.inf if config.s_tmax is None else config.s_tmax
    x = levels[0] * draw(0)
    for number, (level, following) in enumerate(pairwise(levels), start=1):
        sigma = level
        if churn and config.s_tmin <= level <= s_tmax:
            sigma = level * (1 + churn)
            x = x + math.sqrt(sigma**2 - level**2) * config.s_noise * draw(number)
        slope = (x - denoise(x, sigma)) / sigma
        ahead = x + (following - sigma) * slope
        if following:
            second = (ahead - denoise(ahead, following)) / following
            ahead = x + (following - sigma) * (slope + second) / 2
        x = ahead
    return x
