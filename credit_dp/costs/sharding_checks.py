"""Checks on this very machine that sharding works: what `credit-dp doctor` runs on every rank."""

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

from credit_dp.config import Config, UNetConfig
from credit_dp.distributed import RankInfo
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.domain_parallel import (
    DomainParallelManager,
    HaloExchange,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.build import shard_model
from credit_dp.fields import Fields
from credit_dp.models import build_model

PACKAGES = ("credit_dp", "torch", "numpy", "hydra-core", "omegaconf", "xarray", "zarr", "wandb")
COLUMNS = 16
CHANNELS = 4


@final
@dataclass(frozen=True)
class Check:
    """One comparison with a known answer: the largest error of any rank, and how it went.

    `seconds` is the second call's time: the first pays for connecting.
    """

    name: str
    error: float
    tolerance: float
    seconds: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.tolerance


def check(config: Config, ranks: RankInfo) -> int:
    """Print a report for people; 1 if a check failed."""
    return run_checks(config, ranks, as_text)


def check_json(config: Config, ranks: RankInfo) -> int:
    """Print the report as JSON; 1 if a check failed."""
    return run_checks(config, ranks, as_json)


def run_checks(
    config: Config, ranks: RankInfo, show: Callable[[dict[str, str], list[Check]], str]
) -> int:
    """Run all checks on all ranks; rank 0 prints."""
    device = rank_device(config, ranks)
    manager = build_manager(config.parallel, ranks)
    checks = [
        run_check("exchange", exchange_error, 0.0, manager, device),
        run_check("reduction", reduction_error, 1e-12, manager, device),
        run_check("converted step", step_error, 1e-11, manager, device),
    ]
    if manager.dp_world_size > 1:
        checks.append(run_check("data reduction", data_error, 0.0, manager, device))
    if manager.pipeline_parallel_size > 1:
        checks.append(run_check("pipeline message", pipeline_error, 0.0, manager, device))
    if ranks.rank == 0:
        sys.stdout.write(show(describe_environment(device, ranks, manager), checks))
        sys.stdout.flush()
    return 0 if all(item.passed for item in checks) else 1


def run_check(
    name: str,
    error_of: Callable[[DomainParallelManager, torch.device], float],
    tolerance: float,
    manager: DomainParallelManager,
    device: torch.device,
) -> Check:
    """Do it twice, and let every rank know the worst error of any."""
    error_of(manager, device)
    began = time.perf_counter()
    error = error_of(manager, device)
    seconds = time.perf_counter() - began
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    if manager.world_size > 1:
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return Check(name, worst.item(), tolerance, seconds)


def random_globe(manager: DomainParallelManager, device: torch.device) -> Tensor:
    """The same field on every rank, with bands of different height: `(1, CHANNELS, H, COLUMNS)`."""
    rows = 8 * manager.domain_parallel_size + 5
    generator = torch.Generator().manual_seed(0)
    shape = (1, CHANNELS, rows, COLUMNS)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def exchange_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Fetch two rows from each neighbour, and the whole globe, and compare with the field."""
    field, width = random_globe(manager, device), 2
    band = shard_tensor(field, manager=manager)
    padded = torch.nn.functional.pad(field, (0, 0, width, width))
    rows = manager.rows(field.shape[-2])
    expected = padded[..., rows.start : rows.stop + 2 * width, :]
    fetched = HaloExchange(width, manager=manager)(band)
    whole = gather_tensor(band, manager=manager)
    return max(max_difference(fetched, expected), max_difference(whole, field))


def reduction_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Add up the bands and compare with the field's sum."""
    field = random_globe(manager, device)
    band = shard_tensor(field, manager=manager)
    total = manager.transport.sum(band.sum(dim=(-2, -1)))
    return max_difference(total, field.sum(dim=(-2, -1)))


def data_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Add up the ranks' places on the data axis."""
    total = torch.tensor(float(manager.dp_rank), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total, group=manager.data_parallel_group)
    size = manager.dp_world_size
    return abs(total.item() - size * (size - 1) / 2)


def pipeline_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Send a field from the first to the last place of the pipeline, and compare it there."""
    field, place, group = (
        random_globe(manager, device),
        manager.pipeline_rank,
        manager.pipeline_group,
    )
    passed = field if place == 0 else torch.full_like(field, torch.nan)
    if place > 0:
        torch.distributed.recv(passed, group=group, group_src=place - 1)
    if place < manager.pipeline_parallel_size - 1:
        torch.distributed.send(passed, group=group, group_dst=place + 1)
    return max_difference(passed, field)


def step_error(manager: DomainParallelManager, device: torch.device) -> float:
    """Forward and backward through a sharded U-Net and its unsharded twin: output and gradients."""
    field = random_globe(manager, device)
    torch.manual_seed(0)
    config = UNetConfig(channels=[8, 16], blocks=1, groups=4)
    grid = (field.shape[-2], COLUMNS)
    plain = build_model(config, Fields.flat(CHANNELS), grid).to(device, torch.float64)
    sharded = shard_model(copy.deepcopy(plain), manager, tuple(field.shape))
    output = plain(field)
    output.square().sum().backward()
    band = sharded(shard_tensor(field, manager=manager))
    band.square().sum().backward()
    errors = [relative_difference(gather_tensor(band, manager=manager), output)]
    largest = max(grad_of(parameter).abs().max().item() for parameter in plain.parameters())
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        summed = manager.transport.sum(grad_of(ours))
        errors.append(relative_difference(summed, grad_of(theirs), 1e-3 * largest))
    return max(errors)


def grad_of(parameter: Tensor) -> Tensor:
    """The gradient; zeros where nothing reached the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def max_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite if the shapes differ."""
    return (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")


def relative_difference(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry, or to `floor` if that is larger."""
    return max_difference(ours, theirs) / max(theirs.abs().max().item(), floor)


def describe_environment(
    device: torch.device, ranks: RankInfo, manager: DomainParallelManager
) -> dict[str, str]:
    """Versions and hardware, as a bug report needs them."""
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
    result["mesh"] = (
        f"pipeline {manager.pipeline_parallel_size} x data {manager.dp_world_size} x "
        f"domain {manager.domain_world_size}"
    )
    result["ranks per node"] = str(ranks.local_world_size)
    alone = "none (one process)"
    result["backend"] = torch.distributed.get_backend() if ranks.world_size > 1 else alone
    result["threads per rank"] = str(torch.get_num_threads())
    return result


def as_text(known: dict[str, str], checks: list[Check]) -> str:
    """One line for each fact and each check."""
    lines = [f"{name:<18}{value}" for name, value in known.items()]
    for item in checks:
        state = "ok" if item.passed else "FAILED"
        lines.append(
            f"{item.name:<18}{state}  error {item.error:.1e} (at most {item.tolerance:.0e})"
            f"  {1e3 * item.seconds:.1f} ms"
        )
    return "\n".join([*lines, ""])


def as_json(known: dict[str, str], checks: list[Check]) -> str:
    """`{"facts": {...}, "checks": [{"name", "error", "tolerance", "seconds", "passed"}]}`."""
    found = [{**asdict(item), "passed": item.passed} for item in checks]
    return json.dumps({"facts": known, "checks": found}, indent=2) + "\n"
