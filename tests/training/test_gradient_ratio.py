"""Gradients of the ranks put together, over those of one process: exactly 1, for every loss.

A mean over own rows in place of the globe's, or one average too many, shows as a ratio that is the
number of ranks, which clipping and AdamW would hide from a look at the losses.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from credit_dp.config import Config, StandardLossConfig
from credit_dp.config.training import LOSSES
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.loss import build_loss
from tests.ranks import PROCESSES, on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.masked_stores import sea_config
from tests.training.meshes import (
    ONE,
    Gradients,
    Mesh,
    assert_same_gradients,
    first_gradients,
    on_mesh,
)
from tests.training.plugins import LogCoshConfig
from tests.training.runs import alone, built, make_config, make_store

ROWS, COLUMNS, SAMPLES = 13, 6, 4  # 13 rows: bands of 2, 3 and 4 ranks are uneven
LATITUDE = np.linspace(90, -90, ROWS)
GRID = Grid(LATITUDE, np.arange(8) * 45.0)
CHANNELS = Channels((Channel("temperature", 500), Channel("sea")), (), (), (Channel("rain"),))
SCALE = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)[:, None, None]
# Name, weight of the spectrum, points left out, ranks along the data axis.
KINDS = list(product((*LOSSES, "logcosh"), (0.0, 0.5), (False, True), (1, 2)))


def fields() -> tuple[Tensor, Tensor, Tensor]:
    """Input, target, and which points have values: none of the sea in the northern rows."""
    generator = torch.Generator().manual_seed(4)
    shape = (SAMPLES, 3, ROWS, COLUMNS)
    x, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    valid = torch.rand(shape[1:], generator=generator) < 0.7
    valid[1, :5] = False
    return x, target, valid


def gradients(manager: DomainParallelManager) -> list[Tensor]:
    """Return the gradients of each loss of this rank's rows by parameters that all ranks share.

    The ranks of the data axis come one after the other, and are averaged.
    """
    rows = manager.rows(ROWS)
    x, target, valid = fields()
    found = []
    for name, spectrum, masked, data in KINDS:
        points = ValidPoints(valid[:, rows], manager.transport.all_reduce) if masked else None
        kind = LogCoshConfig if name == "logcosh" else StandardLossConfig
        config = kind(name=name, spectrum=spectrum, level_weight=True, variable_weight={"sea": 3.0})
        loss = build_loss(config, CHANNELS, GRID, rows, SCALE, points)
        theta = torch.full((2, 3, 1, 1), 0.7, dtype=torch.float64, requires_grad=True)
        for part, wanted in zip(x.chunk(data), target.chunk(data), strict=True):
            own = part[:, :, rows] * theta[0] + theta[1]
            (loss(own, wanted[:, :, rows]) / data).backward()
        assert theta.grad is not None
        found.append(theta.grad.flatten())
    return found


@pytest.mark.parametrize("ranks", PROCESSES)
def test_shares_have_the_gradient_of_the_globe(ranks):
    whole = gradients(alone())
    by_rank = on_threads(ranks, gradients)
    for number, kind in enumerate(KINDS):
        ratio = sum(of_rank[number] for of_rank in by_rank) / whole[number]
        assert (ratio - 1).abs().max() <= 1e-12, kind


def test_a_mean_over_own_rows_is_off_by_the_number_of_ranks():
    x, target, _ = fields()
    config = StandardLossConfig(latitude_weight=False, level_weight=False, tendency=False)

    def of(rows: slice) -> tuple[Tensor, Tensor]:
        loss = build_loss(config, CHANNELS, Grid(LATITUDE[:12], GRID.longitude), rows, SCALE)
        here, there = x[:, :, rows], target[:, :, rows]
        return loss(here, there), functional.mse_loss(here, there)

    whole, plain = of(slice(0, 12))
    assert whole.item() == pytest.approx(plain.item(), rel=1e-13)
    shares = [of(slice(first, first + 4)) for first in (0, 4, 8)]
    assert sum(share for share, _ in shares).item() == pytest.approx(whole.item(), rel=1e-13)
    assert sum(mean for _, mean in shares).item() == pytest.approx(3 * whole.item(), rel=1e-13)


SLOW = [
    ("huber", False, Mesh(1, 2, 2, "fsdp2")),
    ("huber", True, Mesh(1, 1, 3, "ddp")),
    ("mae", False, Mesh(2, 1, 2, "ddp")),
]
EXHAUSTIVE = [
    ("huber", False, Mesh(1, 1, 3, "fsdp2")),
    ("mae", True, Mesh(1, 1, 4, "ddp")),
    ("mse", True, Mesh(1, 2, 2, "ddp")),
    ("huber", True, Mesh(2, 1, 2, "fsdp2")),
]
CASES = tiers([], SLOW, EXHAUSTIVE)


def of_first_batch(manager: DomainParallelManager, config: Config) -> Gradients:
    return first_gradients(built(config, manager))


@pytest.mark.parametrize(("name", "sea", "mesh"), CASES)
def test_a_step_of_training_has_the_gradient_of_one_process(tmp_path, name, sea, mesh):
    config = sea_config(tmp_path) if sea else make_config(make_store(tmp_path, ROWS), tmp_path)
    loss = StandardLossConfig(name=name, spectrum=0.5, huber_delta=0.5)
    config = on_mesh(replace(config, loss=loss), mesh)
    axes = {"domain": mesh.domain, "pipeline": mesh.pipeline}
    found = on_processes(mesh.ranks, of_first_batch, config, **axes)
    together = {name: grad for _, gradients in found for name, grad in gradients.items()}
    wanted = of_first_batch(alone(), on_mesh(config, ONE))
    for its_loss, _ in found:
        assert_same_gradients((its_loss, together), wanted, tolerance=1e-11)
