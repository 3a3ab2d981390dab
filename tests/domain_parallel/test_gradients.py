"""`global_mean` and `sum_gradients`: the loss and the gradients of users' training loops.

The loops of the README and of docs/own-training-loop.md run as they are, in float64.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_to_domain_parallel,
    global_mean,
    sum_gradients,
)
from tests.ranks import cpu_only, on_processes, on_threads
from tests.training.refusals import refusal

pytestmark = cpu_only("users' loops send over gloo")

ROOT = Path(__file__).parents[2]
SHAPE = (2, 3, 11, 6)  # 4, 4 and 3 rows
NORTH, SOUTH = 4, 8  # of the second rank's band


def globe(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def area() -> torch.Tensor:
    return torch.linspace(90, -90, SHAPE[-2], dtype=torch.float64).deg2rad().cos()[:, None]


def mean_and_gradient(manager, weighted):
    rows = manager.rows(SHAPE[-2])
    values = globe(1)[..., rows, :].requires_grad_()
    mean = global_mean(values, manager, area()[rows] if weighted else None)
    (3 * mean).backward()
    return mean.detach(), values.grad


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_is_that_of_the_globe_and_its_gradient_that_of_the_band(weighted):
    weights = area() if weighted else torch.ones(SHAPE[-2], 1, dtype=torch.float64)
    total = weights.sum() * 2 * 3 * 6
    means, gradients = zip(*on_threads(3, mean_and_gradient, weighted), strict=True)
    assert all(torch.equal(mean, means[0]) for mean in means)
    torch.testing.assert_close(means[0], (globe(1) * weights).sum() / total, rtol=1e-14, atol=0)
    share = (3 * weights / total).expand(SHAPE)
    torch.testing.assert_close(torch.cat(gradients, -2), share, rtol=1e-14, atol=0)


def half_and_integers(manager):
    rows = manager.rows(SHAPE[-2])
    half = (3000 * globe(1).abs()[..., rows, :]).half().requires_grad_()  # its sum is infinite
    mean = global_mean(half, manager)
    (60_000 * mean).backward()
    return mean.detach(), half.grad, global_mean(globe(1)[..., rows, :] > 0, manager)


def test_half_precision_does_not_overflow_and_integers_have_a_fraction():
    points = 2 * 3 * 11 * 6
    for mean, gradient, share in on_threads(3, half_and_integers):
        numbers = (3000 * globe(1).abs()).half().double().mean()
        torch.testing.assert_close(mean.double(), numbers, rtol=1e-6, atol=0)
        exact = torch.full_like(gradient, 60_000 / points)
        torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=0)
        assert float(share) == pytest.approx(int((globe(1) > 0).sum()) / points, rel=1e-6)


class Spare(nn.Module):
    """A layer, and parameters that one rank uses, that no rank uses, and that are frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).double()
        self.once = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def sums_of_two_backwards(manager, model):
    """Accumulate over two samples; the scale takes part on the second rank only."""
    model = copy.deepcopy(model)
    model.conv = convert_to_domain_parallel(model.conv, manager, input_shape=(1, *SHAPE[1:]))
    rows = manager.rows(SHAPE[-2])
    for sample in range(2):
        output = model.conv(globe(1)[sample : sample + 1, :, rows])
        if manager.rank == 1:
            output = output * model.once
        (global_mean(output**2, manager, area()[rows]) / 2).backward()
    before = manager.transport.traffic.collectives
    sum_gradients(model, manager)
    messages = manager.transport.traffic.collectives - before
    found = {name: p.grad for name, p in model.named_parameters()}
    again = refusal(sum_gradients, model, manager)
    model.zero_grad()
    sum_gradients(model, manager)  # nobody has a gradient
    return found, messages, again, [p.grad for p in model.parameters()]


def test_gradients_of_two_backwards_are_those_of_one_process():
    model = Spare()
    errors = (model.conv(globe(1)) ** 2 * area()) / (area().sum() * 2 * 3 * 6)
    errors.sum().backward()
    weight, bias = (p.grad for p in model.conv.parameters())
    # The output is proportional to the scale, its square has twice the derivative.
    once = 2 * errors[..., NORTH:SOUTH, :].sum().detach()
    results = on_threads(3, sums_of_two_backwards, Spare())
    for found, messages, again, left in results:
        assert list(found) == ["once", "never", "frozen", "conv.weight", "conv.bias"]
        assert found["never"] is found["frozen"] is None
        for name, expected in {"once": once, "conv.weight": weight, "conv.bias": bias}.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-15)
            assert torch.equal(found[name], results[0][0][name]), name
        assert messages == 3  # a bucket of float64, one of float32, and the rest
        assert "the gradient of once is summed over the ranks already. Call it once" in again
        assert left == [None] * 5


def over_two_axes(manager):
    """Gradients that are the number of a rank and of a parameter."""
    model = nn.Linear(2, 3).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 10.0 * number + manager.rank)
    sum_gradients(model, manager)
    return [p.grad.unique().tolist() for p in model.parameters()]


@pytest.mark.slow
def test_the_data_axis_is_averaged():
    # Ranks 0 and 1 share a globe, 2 and 3 another: the mean of 0 + 1 and 2 + 3.
    assert on_processes(4, over_two_axes, domain=2) == [[[3.0], [23.0]]] * 4


def refusals_of_wrapped_models(manager):
    sharded = nn.Linear(2, 3)
    fully_shard(sharded, mesh=manager.mesh["domain"])
    wrapped = DistributedDataParallel(nn.Linear(2, 3))
    return [refusal(sum_gradients, nn.Sequential(m), manager) for m in (sharded, wrapped)]


def test_models_whose_gradients_are_averaged_elsewhere_are_refused():
    for lines in on_processes(3, refusals_of_wrapped_models):
        for line in lines:
            assert "multiply the loss by manager.domain_parallel_size" in line


def test_one_rank_has_nothing_to_sum():
    model = nn.Linear(2, 3)
    model(torch.ones(2)).sum().backward()
    before = model.weight.grad.clone()
    for _ in range(2):
        sum_gradients(model, DomainParallelManager(1, 1))
    assert torch.equal(model.weight.grad, before)


# The loops of the docs


def python_block(page: str, name: str) -> str:
    """Return the block of a page that is a file of this name."""
    found = re.search(rf"^```python\n(# {name}\n.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    assert found, name
    return found[1]


def run_block(manager, source, folder, *arguments):
    """Run a program as torchrun would, in float64.

    Return the parameters that it leaves, unless they are shards, and the norms before clipping,
    which AdamW would not notice if they were too large.
    """
    norms, clip = [], nn.utils.clip_grad_norm_

    def recorded(parameters, limit):
        norm = clip(parameters, limit)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", recorded)
        patch.setenv("WORLD_SIZE", str(manager.world_size))
        patch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)  # it is there
        patch.setattr(sys, "argv", ["loop.py", *arguments])
        patch.chdir(folder)
        torch.set_default_dtype(torch.float64)
        try:
            names: dict = {}
            exec(compile(source, "loop.py", "exec"), names)  # noqa: S102
        finally:
            torch.set_default_dtype(torch.float32)
    model = names["model"]
    return None if isinstance(model, FSDPModule) else model.state_dict(), norms


def plain_loop(
    channels: int, draw: Callable[[int], list[tuple]], areas: torch.Tensor, steps: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on whole globes, and return the parameters and the norms of gradients.

    `draw` returns the samples of a step, each with the field later, after the model was built.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, channels, 3, padding=1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    norms = []
    for step in range(steps):
        now, later = (torch.cat(fields) for fields in zip(*draw(step), strict=True))
        errors = ((model(now) - later) ** 2).mean((0, 1, 3))
        optimizer.zero_grad()
        ((errors * areas).sum() / areas.sum()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return model.state_dict(), norms


def in_float64(call: Callable, *arguments):
    torch.set_default_dtype(torch.float64)
    try:
        return call(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def assert_trained_alike(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, parameter in expected.items():
        difference = (found[name] - parameter).abs().max() / parameter.abs().max()
        assert difference < 1e-10, (name, difference)


def small(source: str) -> str:
    """Return the README's loop on a globe that 2 and 3 ranks share unevenly."""
    assert source.count("181") == 4
    return source.replace("360", "12").replace("181", "19")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_loop_of_the_readme_trains_as_one_process(tmp_path, ranks):
    source = small(python_block("README.md", "loop.py"))

    def draw(step: int) -> list[tuple]:
        return [tuple(torch.randn(2, 1, 5, 19, 12))]

    areas = torch.linspace(90, -90, 19, dtype=torch.float64).deg2rad().cos()
    expected, expected_norms = in_float64(plain_loop, 5, draw, areas, 3)
    for found, norms in on_processes(ranks, run_block, source, str(tmp_path)):
        assert_trained_alike(found, expected)
        assert norms == pytest.approx(expected_norms, rel=1e-12)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder with the page's store, in float64."""
    import xarray as xr

    from tests.docs import era5

    folder = tmp_path_factory.mktemp("store")
    era5.write(folder / "float32.zarr")
    fields = xr.open_zarr(folder / "float32.zarr").astype("f8").drop_encoding()
    fields.to_zarr(folder / "era5.zarr", zarr_format=2)
    return folder


def plain_page(store: Path, data: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train as the page does with `data` samples at a time, two times in each step."""
    import xarray as xr

    fields = xr.open_zarr(store / "era5.zarr")[["2m_temperature", "mean_sea_level_pressure"]]
    arrays = [
        torch.tensor(fields[name].transpose("time", "latitude", ...).values) for name in fields
    ]
    globes = torch.stack(arrays, 1)
    std, mean = torch.std_mean(globes[:20], (0, 2, 3), keepdim=True)
    globes = (globes - mean) / std

    def draw(step: int) -> list[tuple]:
        times = range(2 * data * step, 2 * data * (step + 1))
        return [(globes[time, None], globes[time + 1, None]) for time in times]

    areas = torch.tensor(fields.latitude.values).deg2rad().cos()
    return plain_loop(2, draw, areas, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ranks"), [("bands", 2), ("bands", 3), ("ddp", 2), ("ddp", 4), ("fsdp2", 4)]
)
def test_the_loop_of_the_page_trains_and_resumes_as_one_process(store, tmp_path, mode, ranks):
    source = python_block("docs/own-training-loop.md", "era5_loop.py")
    assert source.count("range(first, 4)") == 1
    half = source.replace("range(first, 4)", "range(first, 2)")
    (tmp_path / "era5.zarr").symlink_to(store / "era5.zarr")
    norms = [
        [norms for _, norms in on_processes(ranks, run_block, text, str(tmp_path), mode)]
        for text in (half, source)
    ]
    saved = torch.load(tmp_path / f"{mode}.pt", weights_only=True)
    assert saved["step"] == 4
    samples = 1 if mode == "bands" else ranks // 2
    expected, expected_norms = in_float64(plain_page, store, samples)
    assert_trained_alike(saved["model"], expected)
    for first, second in zip(*norms, strict=True):
        assert first + second == pytest.approx(expected_norms, rel=1e-11)
    assert [path.name for path in tmp_path.glob("*.pt")] == [f"{mode}.pt"]
    assert not (tmp_path / "unfinished").exists()
