"""A model to place, and a machine that seems to have GPUs."""

import pytest
import torch

from credit_dp.pipeline_parallel import module_placement
from tests.pipeline_parallel.encoder_decoder import Model


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def sent(monkeypatch):
    """Record moves on a machine that seems to have four GPUs; nothing really moves."""
    moves = []
    monkeypatch.setattr(module_placement, "count_devices", lambda kind: 4)
    monkeypatch.setattr(
        module_placement, "move_object", lambda thing, to: moves.append((thing, str(to))) or thing
    )
    return moves
