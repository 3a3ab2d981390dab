"""What a step of the configured model would take on a machine, mesh by mesh, without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from credit_dp.command.machine import Machine
from credit_dp.command.meshes import domain_sizes
from credit_dp.command.parameter_budget import ParameterBudget, of_all
from credit_dp.command.planned import model_and_shape
from credit_dp.command.predictable import check_predictable
from credit_dp.command.step_time import (
    StepTime,
    compute_seconds,
    exchange_seconds,
    reduction_seconds,
)
from credit_dp.config import Config
from credit_dp.domain_parallel.step_work import StepWork, step_work, update_work
from credit_dp.errors import UserError
from credit_dp.training.optimisation import moments_of


@final
@dataclass(frozen=True)
class Prediction:
    """A step on a mesh of `data` x `domain` ranks, one sample for each data rank.

    Attributes:
        held_bytes: of the fullest rank.
        efficiency: samples per second of a rank, over those of one rank alone, whether these fit
            its memory or not: strong scaling along the domain axis, weak along data.
    """

    data: int
    domain: int
    held_bytes: int
    time: StepTime
    efficiency: float

    @property
    def ranks(self) -> int:
        """Return the size of the mesh."""
        return self.data * self.domain

    @property
    def samples_per_s(self) -> float:
        """Return those of all ranks together."""
        return self.data / self.time.step

    def fits(self, machine: Machine) -> bool:
        """Return whether what is held fits in the memory of a rank."""
        return self.held_bytes <= machine.memory_gib * 2**30


@final
@dataclass(frozen=True)
class Predictions:
    """All lines, fewer ranks first, and why the domain can't be larger."""

    up_to: int
    lines: tuple[Prediction, ...]
    refused: str


@final
class Predictor:
    """Predicts steps of one model on one machine; follows each size of domain once.

    Raises:
        UserError: the config asks for what is not modelled.
    """

    def __init__(self, config: Config, machine: Machine) -> None:
        check_predictable(config, machine)
        self.machine = machine
        self.dtype = config.trainer.autocast or config.trainer.dtype
        self.model, (_, *field) = model_and_shape(config, config.data.batch_size)
        self.shape = (1, *field)
        self._moments = moments_of(self.model, config)
        self._work: dict[int, StepWork] = {}
        self._update = compute_seconds(update_work(self.model), machine, self.dtype)
        self._alone = self._time(1, 1).step

    def predict(self, data: int, domain: int) -> Prediction:
        """Predict a mesh.

        Raises:
            UserError: the model has no such domain.
        """
        time = self._time(data, domain)
        return Prediction(
            data, domain, self.held_bytes(domain), time, self._alone / (domain * time.step)
        )

    def held_bytes(self, domain: int) -> int:
        """Return what the fullest rank of a domain holds; all data ranks hold as much."""
        budget = self._budget(domain)
        kept = self._of(domain).kept_bytes
        return budget.weights + budget.gradients + budget.moments + kept

    def _budget(self, ranks: int) -> ParameterBudget:
        return of_all(self.model, ranks, self._moments)

    def _of(self, domain: int) -> StepWork:
        if domain not in self._work:
            self._work[domain] = step_work(self.model, self.shape, domain)
        return self._work[domain]

    def _time(self, data: int, domain: int) -> StepTime:
        work, machine = self._of(domain), self.machine
        computing = (compute_seconds(of, machine, self.dtype) for of in work.operations)
        return StepTime(
            max(computing) + self._update,
            exchange_seconds(work, machine, data),
            reduction_seconds(self._budget(1).gradients, data * domain, machine),
        )


def predict_meshes(config: Config, machine: Machine, up_to: int) -> Predictions:
    """Predict the meshes that a user would compare, of at most `up_to` ranks.

    Raises:
        UserError: the config asks for what is not modelled, or for more ranks than `up_to`.
    """
    parallel = config.parallel
    asked = parallel.domain * (parallel.data or 1)
    if up_to < asked:
        raise UserError(
            f"--up-to: needs at least the {asked} ranks of parallel.domain x parallel.data, got "
            f"{up_to}."
        )
    predictor = Predictor(config, machine)
    domains, refused = _usable(predictor, config, up_to // (parallel.data or 1))
    if not domains:
        return Predictions(up_to, (), refused)
    if parallel.data is not None:
        meshes = {(parallel.data, domain) for domain in domains}
    else:
        fits = (d for d in domains if predictor.held_bytes(d) <= machine.memory_gib * 2**30)
        smallest = next(fits, domains[-1])
        meshes = {(data, smallest) for data in domain_sizes(up_to // smallest, powers=64)}
        meshes |= {(data, d) for d in domains for data in (1, up_to // d) if parallel.domain == 1}
    lines = [predictor.predict(*mesh) for mesh in meshes]
    lines.sort(key=lambda line: (line.ranks, line.domain))
    return Predictions(up_to, tuple(lines), refused)


def _usable(predictor: Predictor, config: Config, most: int) -> tuple[list[int], str]:
    """Return the domains to compare, or the one that is configured, and what refuses more."""
    allowed = config.model.coarsest_rows(predictor.shape[-2])
    given = config.parallel.domain
    found: list[int] = []
    for domain in [given] if given > 1 else domain_sizes(min(allowed, most)):
        try:
            predictor.held_bytes(domain)
        except UserError as error:
            return found, str(error)
        found.append(domain)
    return found, ""
