"""One number that says how good the forecasts are while a run trains: the validation RMSE."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from credit_dp.config import Config
from credit_dp.data.prepare import Prepared
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.evaluate import last_forecast, shares
from credit_dp.evaluation.held_out import Dates, HeldOut
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.training.agreement import gather
from credit_dp.training.build import Training

MOST = 8  # initial times


@final
class Validation:
    """Scores forecasts on the validation dates, and leaves training as it would be without.

    At most 8 initial times, evenly spread over `data.dates.valid`, at the shortest of
    `trainer.evaluate_hours`. The state forecasts with the averages of its weights, if it has any.

    Raises:
        UserError: no forecast fits into the validation dates, or they have gaps.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        training: Training,
        manager: DomainParallelManager,
    ) -> None:
        self.every = config.trainer.validate_every
        self.batch_size = config.data.batch_size
        self.state = training.trainer.state
        self.rollout = training.forecast.rollout
        self.manager = manager
        hours = (min(config.trainer.evaluate_hours),)
        chosen = Dates("valid", hours, config.data.step_hours, MOST)
        self.dates = HeldOut(config, prepared, training.rows, training.like, chosen)

    def due(self, step: int) -> bool:
        """Whether to validate after this step."""
        return step % self.every == 0

    @torch.no_grad()
    def __call__(self) -> float:
        """The RMSE of each field in its own standard deviations, averaged over all fields.

        Collective; the same number on every rank.
        """
        dates = self.dates
        channels = dates.prepared.store.channels.outputs
        errors = RootMeanSquare((channels,), dates.area_weights, dates.points)
        ahead = dates.leads[-1] * dates.step
        with random_numbers_kept(dates.area_weights.device), self.state.forecasting():
            for times, counts in shares(dates, self.manager, self.batch_size):
                forecast = last_forecast(self.rollout, dates, times)
                if counts:
                    errors.add((), forecast - dates.fields(times + ahead))
        mean = float(errors.result(self.manager).mean())
        return gather(mean)[0]  # the best checkpoint is chosen by it: not one bit may differ


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Leave torch's random numbers where they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
