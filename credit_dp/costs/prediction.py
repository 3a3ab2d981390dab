"""What a step would take on a machine, mesh by mesh."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from credit_dp.config import Config
from credit_dp.costs.budget import ParameterBudget, domain_sizes, model_and_shape, replicated_budget
from credit_dp.costs.machine import Link, Machine
from credit_dp.domain_parallel.costs.work import StepWork, optimiser_step_work, step_work
from credit_dp.errors import UserError
from credit_dp.training.optim import moments_per_parameter

if TYPE_CHECKING:
    from credit_dp.domain_parallel.costs.work import OperationCost, StepWork
    from credit_dp.domain_parallel.count_transport import MessageSize


# In what is computed; tf32: convolutions of float32 on a GPU that has it, as torch's default is.


def check_predictable(config: Config, machine: Machine) -> None:
    """Refuse a config whose steps are not modelled.

    Raises:
        UserError: it has a pipeline, say.
    """
    parallel, trainer = config.parallel, config.trainer
    plain = {
        "parallel.pipeline": (parallel.pipeline, 1),
        "parallel.data_mode": (parallel.data_mode, "ddp"),
        "parallel.layout": (dict(parallel.layout), {}),
        "trainer.checkpoint_activations": (trainer.checkpoint_activations, False),
        "trainer.rollout": (trainer.longest_rollout, 1),
        "compile": (config.compile, False),
    }
    for key, (given, modelled) in plain.items():
        if given != modelled:
            raise UserError(f"--machine: models {key}={modelled} only, got {given}. Leave it out.")
    dtype = trainer.autocast or trainer.dtype
    if dtype not in machine.tflops:
        key = "trainer.autocast" if trainer.autocast else "trainer.dtype"
        raise UserError(
            f"--machine: {machine.name} has tflops of {', '.join(machine.tflops)}, and {key}="
            f"{dtype} needs its own. Add it to the file, or change {key}."
        )


BUCKET = 25 * 2**20  # bytes of gradients that torch's DistributedDataParallel sends at once


@final
@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, one part after the other."""

    compute: float
    exchange: float
    reduction: float

    @property
    def step(self) -> float:
        """Return the sum."""
        return self.compute + self.exchange + self.reduction


def compute_seconds(operations: Counter[OperationCost], machine: Machine, dtype: str) -> float:
    """Return what operations take on one rank, their multiplications in a dtype of `tflops`."""
    busy = 0.0
    for operation, times in operations.items():
        arithmetic = operation.flops / machine.flops_per_s(dtype, operation.is_convolution)
        busy += times * max(arithmetic, operation.bytes / machine.bytes_per_s)
    starting = operations.total() * machine.overhead_us * 1e-6
    return max(busy, starting) if machine.runs_ahead else busy + starting


def exchange_seconds(work: StepWork, machine: Machine, data: int) -> float:
    """Return what the messages and collectives of the slowest of `data` domains take."""
    return max(
        sum(
            times * round_seconds(messages, machine, first)
            for messages, times in work.exchanges.items()
        )
        + sum(
            times * collective_seconds(size, work.ranks, machine, first)
            for size, times in work.collectives.items()
        )
        for first in _first_ranks(work.ranks, data, machine)
    )


def round_seconds(messages: Iterable[MessageSize], machine: Machine, first: int) -> float:
    """Return what messages that are under way at once take.

    Args:
        first: rank of the world that is the first one of the domain.
    """
    latency: dict[int, float] = defaultdict(float)
    sending: dict[int, float] = defaultdict(float)
    receiving: dict[int, float] = defaultdict(float)
    for sender, receiver, size in messages:
        ends = {_node(first + rank, machine) for rank in (sender, receiver)}
        link = machine.link(between=len(ends) > 1)
        sending[sender] += link.seconds(size)
        receiving[receiver] += link.seconds(size)
        for rank in (sender, receiver):
            latency[rank] = max(latency[rank], link.latency)
    return max(latency[rank] + max(sending[rank], receiving[rank]) for rank in latency)


def collective_seconds(size: float, ranks: int, machine: Machine, first: int = 0) -> float:
    """Return what a ring takes in which each of `ranks` neighbours sends `size` bytes."""
    if ranks == 1:
        return 0.0
    link = ring_link(ranks, machine, first)
    return math.ceil(math.log2(ranks)) * link.latency + link.seconds(size)


def ring_link(ranks: int, machine: Machine, first: int = 0) -> Link:
    """Return the link that a collective goes over.

    As many rings as a node has members of the group run side by side, each over its own share of
    the node's way out; the node with the fewest members bounds them.
    """
    size = machine.ranks_per_node
    within, between = machine.link(between=False), machine.link(between=True)
    in_first = size - first % size
    if ranks <= in_first:
        return within
    in_last = (ranks - in_first) % size or size
    out = min(in_first, in_last) * between.gb_per_s
    return Link(between.latency_us, min(within.gb_per_s, out))


def reduction_seconds(gradients: int, ranks: int, machine: Machine) -> float:
    """Return what adding up `gradients` bytes over all ranks takes."""
    buckets = math.ceil(gradients / BUCKET)
    if ranks == 1 or not buckets:
        return 0.0
    size = 2 * (ranks - 1) / ranks * gradients
    return buckets * collective_seconds(size / buckets, ranks, machine)


def _node(rank: int, machine: Machine) -> int:
    return rank // machine.ranks_per_node


def _first_ranks(domain: int, data: int, machine: Machine) -> set[int]:
    """Return one first rank for each way in which domains may lie on nodes."""
    per_node = machine.ranks_per_node
    return {number * domain % per_node for number in range(min(data, per_node))}


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
        self._moments = moments_per_parameter(self.model, config)
        self._work: dict[int, StepWork] = {}
        self._update = compute_seconds(optimiser_step_work(self.model), machine, self.dtype)
        self._single_rank_seconds = self._time(1, 1).step

    def predict(self, data: int, domain: int) -> Prediction:
        """Predict a mesh.

        Raises:
            UserError: the model has no such domain.
        """
        time = self._time(data, domain)
        return Prediction(
            data,
            domain,
            self.held_bytes(domain),
            time,
            self._single_rank_seconds / (domain * time.step),
        )

    def held_bytes(self, domain: int) -> int:
        """Return what the fullest rank of a domain holds; all data ranks hold as much."""
        budget = self._budget(domain)
        kept = self._step_work(domain).saved_bytes
        return budget.weights + budget.gradients + budget.moments + kept

    def _budget(self, ranks: int) -> ParameterBudget:
        return replicated_budget(self.model, ranks, self._moments)

    def _step_work(self, domain: int) -> StepWork:
        if domain not in self._work:
            self._work[domain] = step_work(self.model, self.shape, domain)
        return self._work[domain]

    def _time(self, data: int, domain: int) -> StepTime:
        work, machine = self._step_work(domain), self.machine
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
    domains, refused = _usable_domains(predictor, config, up_to // (parallel.data or 1))
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


def _usable_domains(predictor: Predictor, config: Config, most: int) -> tuple[list[int], str]:
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
