"""Predicts the seconds of a training step on a machine, for meshes of data x domain ranks.

A roofline for each operation of the slowest rank, plus latency and bandwidth for each message and
collective, plus what ddp or fsdp2 sends. The host's time to start all of it is a lower bound.
Where the host runs ahead of the device, messages and gradients travel while it computes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from credit_dp.config import Config, TrainerConfig
from credit_dp.costs.budget import (
    FsdpUnit,
    ParameterBudget,
    domain_sizes,
    fsdp_units,
    model_and_shape,
    replicated_budget,
    ring_all_reduce_bytes,
    sharded_budget,
)
from credit_dp.costs.machine import Link, Machine
from credit_dp.domain_parallel.costs.work import (
    OperationCost,
    StepWork,
    optimiser_step_work,
    step_work,
)
from credit_dp.domain_parallel.count_transport import MessageSize
from credit_dp.errors import UserError
from credit_dp.training.forward_backward import recomputed_modules
from credit_dp.training.optim import moments_per_parameter, whole_state_bytes
from credit_dp.training.parameter_shards import shards_of


def check_predictable(config: Config, machine: Machine) -> None:
    """Refuse a config whose steps are not modelled.

    Raises:
        UserError: it sets a key that is not modelled, or the machine has no figure for its dtype.
    """
    parallel = config.parallel
    trainer = config.trainer
    supported: dict[str, tuple[Any, Any]] = {
        "parallel.pipeline": (parallel.pipeline, 1),
        "parallel.ensemble": (parallel.ensemble, 1),
        "parallel.param_dtype": (parallel.param_dtype or "null", "null"),
        "parallel.cpu_offload": (parallel.cpu_offload, False),
        "parallel.layout": (dict(parallel.layout), {}),
        "trainer.rollout": (trainer.longest_rollout, 1),
        "compile": (config.compile, False),
    }
    for key, (given, value) in supported.items():
        if given != value:
            raise UserError(f"--machine: supports {key}={value} only, got {given}. Leave it out.")
    dtype = trainer.autocast or trainer.dtype
    if dtype not in machine.tflops:
        key = "trainer.autocast" if trainer.autocast else "trainer.dtype"
        raise UserError(
            f"--machine: {machine.name} has tflops of {', '.join(machine.tflops)}, but {key}="
            f"{dtype} needs its own. Add it to the file, or change {key}."
        )


def product_dtype(trainer: TrainerConfig, machine: Machine) -> str:
    """Return the dtype, one of the machine's `tflops`, of convolutions and matrix products."""
    dtype = trainer.autocast or trainer.dtype
    uses_tf32 = dtype == "float32" and trainer.matmul != "highest" and "tf32" in machine.tflops
    return "tf32" if uses_tf32 else dtype


# The host's time for a view, and for starting an exchange or a collective, as shares of
# `overhead_us`: assumptions, as torch's dispatcher and its lists of messages take about as long.
VIEW_SHARE, MESSAGE_SHARE = 0.1, 3.0
CHECK_BYTES = 40  # of the sum over all ranks that checks a step: loss, norm and signals
# The share of a step's computing that is the backward pass, during which gradients travel.
BACKWARD_SHARE = 2 / 3

# Gradients that torch's DistributedDataParallel sends at once, by default.
DDP_BUCKET_BYTES = 25 * 2**20


@final
@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; the parts follow one after the other.

    Attributes:
        compute: on the slowest rank, or to start all that it computes if that takes longer.
        exchange: of rows and sums, without what overlaps with computing.
        reduction: of gradients, without what overlaps with the backward pass, and of the check;
            with fsdp2 also to gather weights, without what overlaps with forward and backward.
        starting: what the host needs to start operations, views and messages; part of `compute`.
        update: of the weights; part of `compute`.
    """

    compute: float
    exchange: float
    reduction: float
    starting: float = 0.0
    update: float = 0.0

    @property
    def step(self) -> float:
        """Return the sum of the parts."""
        return self.compute + self.exchange + self.reduction


def busy_seconds(operations: Counter[OperationCost], machine: Machine, dtype: str) -> float:
    """Return the seconds that one rank computes; `dtype` (of `tflops`) is that of its products."""
    busy = 0.0
    for operation, times in operations.items():
        arithmetic = operation.flops / machine.flops_per_s(dtype)
        # Roofline: an operation is bound by arithmetic or by memory, whichever takes longer.
        busy += times * max(arithmetic, operation.bytes / machine.bytes_per_s)
    return busy


def starting_seconds(operations: int, views: int, messages: int, machine: Machine) -> float:
    """Return the seconds that the host needs to start operations, views, and messages."""
    started = operations + VIEW_SHARE * views + MESSAGE_SHARE * messages
    return started * machine.overhead_us * 1e-6


def compute_seconds(busy: float, starting: float, machine: Machine) -> float:
    """Return the seconds of computing and starting."""
    # On a GPU the host starts operations while earlier ones compute, so the slower of the two
    # counts.
    return max(busy, starting) if machine.runs_ahead else busy + starting


def exchange_seconds(work: StepWork, machine: Machine, data: int, dtype: str) -> float:
    """Return the seconds of messages and collectives, for the slowest of `data` domains.

    What a rank computes between starting an exchange and waiting for it hides the messages, if the
    device computes by itself. Collectives hide nothing.
    """
    # Not on CPUs, where threads that send need the cores that compute.
    hidden = {
        overlap: busy_seconds(Counter(dict(overlap[1])), machine, dtype)
        if machine.runs_ahead
        else 0.0
        for overlap in work.overlaps
    }
    return max(
        sum(
            times * max(0.0, round_seconds(overlap[0], machine, first) - hidden[overlap])
            for overlap, times in work.overlaps.items()
        )
        + sum(
            times * collective_seconds(size, work.ranks, machine, first)
            for size, times in work.collectives.items()
        )
        for first in _first_ranks(work.ranks, data, machine)
    )


def round_seconds(messages: Iterable[MessageSize], machine: Machine, first: int) -> float:
    """Return the seconds of messages that are sent at the same time.

    Args:
        first: global rank of the first rank of the domain.
    """
    latency: dict[int, float] = defaultdict(float)
    sending: dict[int, float] = defaultdict(float)
    receiving: dict[int, float] = defaultdict(float)
    for sender, receiver, size in messages:
        nodes = {_node(first + rank, machine) for rank in (sender, receiver)}
        link = machine.link(between=len(nodes) > 1)
        sending[sender] += link.seconds(size)
        receiving[receiver] += link.seconds(size)
        for rank in (sender, receiver):
            latency[rank] = max(latency[rank], link.latency)
    # Links are full duplex: a rank sends while it receives.
    return max(latency[rank] + max(sending[rank], receiving[rank]) for rank in latency)


def collective_seconds(size: float, ranks: int, machine: Machine, first: int = 0) -> float:
    """Return the seconds of a ring in which each of `ranks` neighbours sends `size` bytes."""
    if ranks == 1:
        return 0.0
    link = ring_link(ranks, machine, first)
    return math.ceil(math.log2(ranks)) * link.latency + link.seconds(size)


def ring_link(ranks: int, machine: Machine, first: int = 0) -> Link:
    """Return the link that bounds a collective.

    If a node holds several ranks of the group, as many rings run side by side, each over one rank's
    share of the node's bandwidth; the node with the fewest ranks of the group is the bottleneck.
    """
    size = machine.ranks_per_node
    within, between = machine.link(between=False), machine.link(between=True)
    in_first = size - first % size
    if ranks <= in_first:
        return within
    in_last = (ranks - in_first) % size or size
    bandwidth = min(in_first, in_last) * between.gb_per_s
    return Link(between.latency_us, min(within.gb_per_s, bandwidth))


def reduction_seconds(gradients: int, ranks: int, machine: Machine, backward: float = 0.0) -> float:
    """Return the seconds to all-reduce `gradients` bytes over all ranks, and to check the step.

    Args:
        gradients: bytes.
        ranks: that reduce.
        machine: if its host runs ahead, all buckets but the last travel during backward.
        backward: seconds of the backward pass.
    """
    check = collective_seconds(CHECK_BYTES, ranks, machine)
    buckets = math.ceil(gradients / DDP_BUCKET_BYTES)
    if ranks == 1 or not buckets:
        return check
    size = 2 * (ranks - 1) / ranks * gradients
    bucket = collective_seconds(size / buckets, ranks, machine)
    hidden = min(backward, (buckets - 1) * bucket) if machine.runs_ahead else 0.0
    return buckets * bucket - hidden + check


def sharded_seconds(
    units: Sequence[FsdpUnit], replicas: int, machine: Machine, busy: float = 0.0
) -> float:
    """Return the seconds to gather weights and to reduce gradients (fsdp2), and to check the step.

    Args:
        units: blocks, and at last the parameters outside of them.
        replicas: ranks over which the parameters are sharded, maybe in several copies.
        machine: if its host runs ahead, blocks are gathered and reduced while others compute. What
            is outside of blocks is gathered before and reduced after everything else.
        busy: seconds of forward and backward.
    """
    shards = shards_of(replicas)
    copies = replicas // shards
    # The ranks that have the same shard of different copies lie as far apart as all ranks do.
    link = machine.link(between=replicas > machine.ranks_per_node)

    def seconds(unit: FsdpUnit) -> float:
        own = (shards - 1) / shards
        gather = collective_seconds(own * unit.gathered, shards, machine) if unit.gathered else 0.0
        if not unit.reduced:
            return unit.gathers * gather
        reduce = collective_seconds(own * unit.reduced, shards, machine)
        if copies > 1:
            size = ring_all_reduce_bytes(unit.reduced // shards, copies)
            reduce += math.ceil(math.log2(copies)) * link.latency + link.seconds(size)
        return unit.gathers * gather + reduce

    *blocks, rest = units
    in_blocks = sum(map(seconds, blocks))
    hidden = min(busy, in_blocks) if machine.runs_ahead else 0.0
    check = collective_seconds(CHECK_BYTES, replicas, machine)
    return in_blocks - hidden + seconds(rest) + check


def _node(rank: int, machine: Machine) -> int:
    return rank // machine.ranks_per_node


def _first_ranks(domain: int, data: int, machine: Machine) -> set[int]:
    """Return the first ranks of domains that lie differently on nodes."""
    per_node = machine.ranks_per_node
    return {index * domain % per_node for index in range(min(data, per_node))}


@final
@dataclass(frozen=True)
class Prediction:
    """A step on a mesh of `data` x `domain` ranks, with one sample for each data rank.

    Attributes:
        held_bytes: on the fullest rank.
        efficiency: samples per second and rank, relative to a single rank, even if a sample does
            not fit its memory: strong scaling along the domain axis, weak along data.
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
        """Return the samples per second of all ranks together."""
        return self.data / self.time.step

    def fits(self, machine: Machine) -> bool:
        """Return whether the fullest rank's bytes fit in the memory of a rank."""
        return self.held_bytes <= machine.memory_gib * 2**30


@final
@dataclass(frozen=True)
class Predictions:
    """The predicted meshes, fewer ranks first; `limit` says why no larger domain is among them."""

    up_to: int
    meshes: tuple[Prediction, ...]
    limit: str


@final
class Predictor:
    """Predicts steps of one model on one machine; traces each size of domain once.

    Raises:
        UserError: the config needs something that is not modelled.
    """

    def __init__(self, config: Config, machine: Machine) -> None:
        check_predictable(config, machine)
        self.machine = machine
        self.dtype = product_dtype(config.trainer, machine)
        self.model, (_, *field) = model_and_shape(config, config.data.batch_size)
        self.shape = (config.trainer.members, *field)
        self._parallel = config.parallel
        self._is_graph = config.trainer.cuda_graph and machine.runs_ahead
        self._moments = moments_per_parameter(self.model, config)
        self._whole = whole_state_bytes(self.model, config.optimizer)
        self._whole_ops = config.parallel.whole_ops
        self._recomputed = recomputed_modules(self.model, config)
        self._work: dict[int, StepWork] = {}
        update = optimiser_step_work(self.model)
        self._updated = update.total()
        self._update = busy_seconds(update, machine, self.dtype)
        # The reference of the efficiency: one sample on one rank, whether it fits or not.
        self._single_rank_seconds = self._time(1, 1).step

    def predict(self, data: int, domain: int) -> Prediction:
        """Predict a step on a mesh.

        Raises:
            UserError: the model can't be sharded over that many domain ranks.
        """
        time = self._time(data, domain)
        return Prediction(
            data=data,
            domain=domain,
            held_bytes=self.held_bytes(domain, data),
            time=time,
            efficiency=self._single_rank_seconds / (domain * time.step),
        )

    def held_bytes(self, domain: int, data: int = 1) -> int:
        """Return the bytes on the fullest rank of a mesh; with ddp `data` does not matter."""
        budget = self._budget(data * domain)
        saved = self._step_work(domain).saved_bytes
        held = budget.weights + budget.gradients + budget.moments + budget.gathered
        return held + self._whole + saved

    def _budget(self, ranks: int) -> ParameterBudget:
        if self._is_sharded(ranks):
            return sharded_budget(self.model, self._parallel, ranks, 1, moments=self._moments)
        return replicated_budget(self.model, ranks, self._moments)

    def _is_sharded(self, ranks: int) -> bool:
        return self._parallel.data_mode == "fsdp2" and ranks > 1

    def _step_work(self, domain: int) -> StepWork:
        if domain not in self._work:
            self._work[domain] = step_work(
                self.model, self.shape, domain, self._whole_ops, self._recomputed
            )
        return self._work[domain]

    def _time(self, data: int, domain: int) -> StepTime:
        work = self._step_work(domain)
        machine = self.machine
        ranks = data * domain
        is_sharded = self._is_sharded(ranks)
        units = fsdp_units(self.model, self._parallel, ranks) if is_sharded else []
        messages = work.overlaps.total() + work.collectives.total()
        messages += sum(unit.gathers + 1 for unit in units)
        busy = [busy_seconds(o, machine, self.dtype) for o in work.operations]
        starting = [
            starting_seconds(self._updated, 0, 0, machine)  # forward and backward start at once
            if self._is_graph
            else starting_seconds(o.total() + self._updated, views, messages, machine)
            for o, views in zip(work.operations, work.views, strict=True)
        ]
        # A rank updates its shards.
        update = self._update / shards_of(ranks) if is_sharded else self._update
        compute = max(
            compute_seconds(b + update, s, machine) for b, s in zip(busy, starting, strict=True)
        )
        if is_sharded:
            reduction = sharded_seconds(units, ranks, machine, max(busy))
        else:  # each rank has all gradients (ddp): they are reduced over data and domain ranks
            gradients = self._budget(1).gradients
            backward = BACKWARD_SHARE * max(busy)
            reduction = reduction_seconds(gradients, ranks, machine, backward)
        return StepTime(
            compute=compute,
            exchange=exchange_seconds(work, machine, data, self.dtype),
            reduction=reduction,
            starting=max(starting),
            update=update,
        )


def predict_meshes(config: Config, machine: Machine, up_to: int) -> Predictions:
    """Predict a step on the meshes that a user would compare, of at most `up_to` ranks.

    Raises:
        UserError: the config needs something that is not modelled, or more ranks than `up_to`.
    """
    parallel = config.parallel
    configured = parallel.domain * (parallel.data or 1)
    if up_to < configured:
        raise UserError(
            f"--up-to: needs at least the {configured} ranks of parallel.domain x parallel.data, "
            f"got {up_to}."
        )
    predictor = Predictor(config, machine)
    domains, limit = _usable_domains(predictor, config, up_to // (parallel.data or 1))
    if not domains:
        return Predictions(up_to, (), limit)
    if parallel.data is not None:
        meshes = {(parallel.data, domain) for domain in domains}
    else:
        memory = machine.memory_gib * 2**30
        fitting = (d for d in domains if predictor.held_bytes(d, up_to // d) <= memory)
        smallest = next(fitting, domains[-1])
        meshes = {(data, smallest) for data in domain_sizes(up_to // smallest, powers=64)}
        if parallel.domain == 1:  # the default: no domain is configured
            meshes |= {(data, domain) for domain in domains for data in (1, up_to // domain)}
    predictions = [predictor.predict(*mesh) for mesh in meshes]
    predictions.sort(key=lambda prediction: (prediction.ranks, prediction.domain))
    return Predictions(up_to, tuple(predictions), limit)


def _usable_domains(predictor: Predictor, config: Config, largest: int) -> tuple[list[int], str]:
    """Return the domains to compare, or the configured one, and why there is no larger one."""
    coarsest_rows = config.model.coarsest_rows(predictor.shape[-2])
    configured = config.parallel.domain
    usable: list[int] = []
    for domain in [configured] if configured > 1 else domain_sizes(min(coarsest_rows, largest)):
        try:
            predictor.held_bytes(domain)
        except UserError as error:
            return usable, str(error)
        usable.append(domain)
    return usable, ""
