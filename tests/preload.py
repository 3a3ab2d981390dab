"""Imports and plans in the fork server, so that forked ranks and commands need not.

Torch keeps what it learns: planning a model for the first time takes several times as long as
planning it again. Modules that a run imports late are imported here.
"""

import matplotlib.backends.backend_agg  # noqa: F401
import torch
import torch.distributed.checkpoint.hf_storage

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.training.meshes import MODELS, ROWS

COLUMNS = 16
FIELDS = Fields(((0, 1), (2, 3)), (4,), others=2)


def plan_and_train() -> None:
    """Plan each of the tiny models for two ranks, and take a step of it."""
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    for config in MODELS.values():
        model = build_model(config, FIELDS, (ROWS, COLUMNS)).double()
        x = torch.zeros(2, FIELDS.inputs, ROWS, COLUMNS, dtype=torch.float64)
        model(x).square().sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        shard_model(model, manager, x.shape)


with torch.random.fork_rng():
    plan_and_train()
