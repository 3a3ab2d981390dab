"""The RMSE against its definition, also summed over ranks."""

import numpy as np
import pytest
import torch

from credit_dp.data.grid import row_weights
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.metrics import RootMeanSquare
from tests.ranks import on_processes

LATITUDE = np.linspace(90, -90, 13)


def errors() -> torch.Tensor:
    """(initial times, channels, rows, columns)"""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 2, 13, 6, generator=generator, dtype=torch.float64)


def collected(manager: DomainParallelManager) -> torch.Tensor:
    rows = manager.rows(13)
    sums = RootMeanSquare((1, 2), torch.as_tensor(row_weights(LATITUDE)[rows].copy()))
    for sample in range(manager.dp_rank, 7, manager.dp_world_size):
        sums.add((0,), errors()[sample : sample + 1, :, rows])
    return sums.result(manager)


def by_definition() -> np.ndarray:
    """Return the RMSE: the mean over area and time, then the root."""
    squares = (errors().numpy() ** 2).mean(axis=(0, 3))
    return np.sqrt(np.average(squares, axis=1, weights=row_weights(LATITUDE)))


def test_the_root_is_taken_last():
    manager = DomainParallelManager(1, 1)
    assert collected(manager)[0].numpy() == pytest.approx(by_definition(), rel=1e-14)


@pytest.mark.parametrize(("ranks", "domain"), [(2, 2), (3, 3), (4, 2), (3, 1)])
def test_any_mesh_finds_the_same(ranks, domain):
    for found in on_processes(ranks, collected, domain=domain):
        assert found[0].numpy() == pytest.approx(by_definition(), rel=1e-13)
