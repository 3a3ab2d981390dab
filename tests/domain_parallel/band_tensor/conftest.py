"""Functions of the view's tables compute on tensors of the globe in these tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from torch import nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from tests.domain_parallel.band_tensor import functions


def compute_below_autograd(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[tuple[int, ...]]
) -> Mapping[str, int]:
    return attach_domain(model, manager, shapes).whole_calls


@pytest.fixture(autouse=True)
def below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "compute_on_bands", compute_below_autograd)
