"""Checks that sharding works on this machine; `credit-dp doctor` runs them on every rank.

All ranks of the mesh run the same checks in the same order, for each of them is collective.
"""

import copy
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import final

import torch
from torch import Tensor

from credit_dp.channel_parallel import channel_slice, channels_per_rank
from credit_dp.config import Config, UNetConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.domain_parallel import (
    DomainParallelManager,
    HaloExchange,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.verify import gradient_or_zeros
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training.loss import trade_members

PACKAGES = ("credit_dp", "torch", "numpy", "hydra-core", "omegaconf", "xarray", "zarr", "wandb")
COLUMNS, CHANNELS = 16, 4  # of the random field


@final
@dataclass(frozen=True)
class Check:
    """A comparison with a known answer: the largest error on any rank.

    `seconds` is the time of the second call: the first one sets up connections.
    """

    name: str
    error: float
    tolerance: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; False for NaN."""
        return self.error <= self.tolerance


def check(config: Config, ranks: RankInfo) -> int:
    """Print a report for people; return 1 if a check failed, otherwise 0."""
    return run_checks(config, ranks, as_text)


def check_json(config: Config, ranks: RankInfo) -> int:
    """Print the report as JSON; return 1 if a check failed, otherwise 0."""
    return run_checks(config, ranks, as_json)


def run_checks(
    config: Config, ranks: RankInfo, show: Callable[[dict[str, str], list[Check]], str]
) -> int:
    """Run all checks on all ranks, print the report on rank 0, and return the exit code."""
    device = rank_device(config, ranks)
    manager = build_manager(config.parallel, ranks)
    checks = [
        # Copies are exact; sums over bands are rounded in another order than on one rank.
        run_check("exchange", exchange_error, 0.0, manager, device),
        run_check("reduction", reduction_error, 1e-12, manager, device),
        run_check("converted step", step_error, 1e-11, manager, device),
    ]
    if manager.dp_world_size > 1:
        checks.append(run_check("data reduction", data_error, 0.0, manager, device))
    if manager.ensemble_parallel_size > 1:
        checks.append(run_check("members", members_error, 0.0, manager, device))
    if manager.pipeline_parallel_size > 1:
        checks.append(run_check("pipeline message", pipeline_error, 0.0, manager, device))
    if ranks.rank == 0:
        sys.stdout.write(show(describe_environment(device, ranks, manager), checks))
        sys.stdout.flush()
    return 0 if all(item.passed for item in checks) else 1


def run_check(
    name: str,
    measure: Callable[[DomainParallelManager, torch.device], float],
    tolerance: float,
    manager: DomainParallelManager,
    device: torch.device,
) -> Check:
    """Run a check twice and return the largest error on any rank."""
    # Not timed: the first messages set up connections.
    measure(manager, device)
    start = time.perf_counter()
    error = measure(manager, device)
    seconds = time.perf_counter() - start
    # Every rank gets the same error, so that all end with the same exit code.
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    if manager.world_size > 1:
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return Check(name, worst.item(), tolerance, seconds)


def random_globe(manager: DomainParallelManager, device: torch.device) -> Tensor:
    """Return the same random field on every rank; its bands differ in height.

    Shapes:
        `(1, CHANNELS, H, COLUMNS)`, with `H = 8 * domain ranks + 5`.
    """
    rows = 8 * manager.domain_parallel_size + 5
    generator = torch.Generator().manual_seed(0)
    shape = (1, CHANNELS, rows, COLUMNS)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def exchange_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of halos of two rows from each neighbour, and of the gathered globe."""
    field = random_globe(manager, device)
    width = 2
    band = shard_tensor(field, manager=manager)
    # Beyond the poles a halo is zero.
    padded = torch.nn.functional.pad(field, (0, 0, width, width))
    rows = manager.rows(field.shape[-2])
    expected = padded[..., rows.start : rows.stop + 2 * width, :]
    fetched = HaloExchange(width, manager=manager)(band)
    gathered = gather_tensor(band, manager=manager)
    return max(max_difference(fetched, expected), max_difference(gathered, field))


def reduction_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of the sum over all bands."""
    field = random_globe(manager, device)
    band = shard_tensor(field, manager=manager)
    total = manager.transport.all_reduce(band.sum(dim=(-2, -1)))
    return max_difference(total, field.sum(dim=(-2, -1)))


def data_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of an all-reduce of ranks over the data axis."""
    total = torch.tensor(float(manager.dp_rank), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total, group=manager.data_parallel_group)
    size = manager.dp_world_size
    return abs(total.item() - size * (size - 1) / 2)


def members_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of an exchange of members between the ranks that share them."""
    field, ranks = random_globe(manager, device), manager.ensemble_parallel_size
    own = (manager.ensemble_rank + 1) * field[:, None]
    traded = trade_members(own, manager.ensemble_transport)  # all members of some channels
    channels = channel_slice(channels_per_rank(CHANNELS, ranks), manager.ensemble_rank)
    expected = torch.stack([(rank + 1) * field[:, channels] for rank in range(ranks)], dim=1)
    return max_difference(traded, expected)


def pipeline_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of a field that each rank of the pipeline passes on to the next."""
    field = random_globe(manager, device)
    rank = manager.pipeline_rank
    group = manager.pipeline_group
    received = field if rank == 0 else torch.full_like(field, torch.nan)
    # Receive before sending: rank 0 starts the chain, so that no rank waits for another one's send.
    if rank > 0:
        torch.distributed.recv(received, group=group, group_src=rank - 1)
    if rank < manager.pipeline_parallel_size - 1:
        torch.distributed.send(received, group=group, group_dst=rank + 1)
    return max_difference(received, field)


def step_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Return the error of a sharded U-Net's forward and backward against the unsharded one."""
    field = random_globe(manager, device)
    torch.manual_seed(0)
    config = UNetConfig(channels=[8, 16], blocks=1, groups=4)
    grid = (field.shape[-2], COLUMNS)
    unsharded = build_model(config, Fields.flat(CHANNELS), grid).to(device, torch.float64)
    # A copy, because the conversion replaces layers in place.
    sharded = shard_model(copy.deepcopy(unsharded), manager, tuple(field.shape))
    output = unsharded(field)
    output.square().sum().backward()
    band = sharded(shard_tensor(field, manager=manager))
    band.square().sum().backward()
    errors = [relative_difference(gather_tensor(band, manager=manager), output)]
    largest_gradient = max(
        gradient_or_zeros(parameter).abs().max().item() for parameter in unsharded.parameters()
    )
    for local, expected in zip(sharded.parameters(), unsharded.parameters(), strict=True):
        # Each rank has the gradient of its band's loss; their sum is that of the globe's loss.
        summed = manager.transport.all_reduce(gradient_or_zeros(local))
        errors.append(
            # The floor: a gradient that is zero but for rounding has no digits to compare.
            relative_difference(summed, gradient_or_zeros(expected), 1e-3 * largest_gradient)
        )
    return max(errors)


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return (actual - expected).abs().max().item()


def relative_difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest entry, or over `floor` if that is larger."""
    return max_difference(actual, expected) / max(expected.abs().max().item(), floor)


def describe_environment(
    device: torch.device, ranks: RankInfo, manager: DomainParallelManager
) -> dict[str, str]:
    """Return versions, hardware and mesh, as a bug report needs them."""
    cuda = device.type == "cuda"
    result = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = "not installed"
    result["system"] = platform.platform()
    result["device"] = torch.cuda.get_device_name(device) if cuda else "cpu"
    result["GPUs"] = str(torch.cuda.device_count())
    result["cores"] = str(os.cpu_count())
    result["ranks"] = str(ranks.world_size)
    several = manager.ensemble_parallel_size > 1
    result["mesh"] = (
        f"pipeline {manager.pipeline_parallel_size} x data {manager.dp_world_size} x "
        + (f"ensemble {manager.ensemble_parallel_size} x " if several else "")
        + f"domain {manager.domain_world_size}"
    )
    result["ranks per node"] = str(ranks.local_world_size)
    is_distributed = ranks.world_size > 1
    result["backend"] = torch.distributed.get_backend() if is_distributed else "none (one process)"
    result["threads per rank"] = str(torch.get_num_threads())
    return result


def as_text(facts: dict[str, str], checks: list[Check]) -> str:
    """Return one line for each fact and each check."""
    lines = [f"{name:<18}{value}" for name, value in facts.items()]
    for item in checks:
        state = "ok" if item.passed else "FAILED"
        lines.append(
            f"{item.name:<18}{state}  error {item.error:.1e} (at most {item.tolerance:.0e})"
            f"  {1e3 * item.seconds:.1f} ms"
        )
    return "\n".join([*lines, ""])


def as_json(facts: dict[str, str], checks: list[Check]) -> str:
    """Return the report as JSON.

    `{"facts": {...}, "checks": [{"name", "error", "tolerance", "seconds", "passed"}]}`.
    """
    results = [{**asdict(item), "passed": item.passed} for item in checks]
    return json.dumps({"facts": facts, "checks": results}, indent=2) + "\n"
