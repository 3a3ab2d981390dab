"""No model makes the host wait for the GPU, forward or backward; needs a GPU."""

import pytest
import torch

from credit_dp.cli.compose import Composer
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.ranks import on_threads

GRID = (33, 64)
FIELDS = Fields(((0, 1), (2, 3)), (4,), others=1)


def _sharded_model(manager, name):
    model = build_model(Composer("train").compose_config([f"model={name}"]).model, FIELDS, GRID)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, (1, FIELDS.inputs, *GRID))
    return model.to("cuda"), len(range(GRID[0])[manager.rows(GRID[0])])


def _step(manager, models):
    model, rows = models[manager.rank]
    x = torch.zeros(1, FIELDS.inputs, rows, GRID[1], device="cuda")
    model(x).square().mean().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_of_a_model_does_not_wait():
    for name in ("unet", "pangu", "crossformer", "swin", "sfno"):
        for ranks in (1, 2):
            models = on_threads(ranks, _sharded_model, name)
            on_threads(ranks, _step, models)  # what is made once may wait
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                on_threads(ranks, _step, models)
            finally:
                torch.cuda.set_sync_debug_mode("default")
