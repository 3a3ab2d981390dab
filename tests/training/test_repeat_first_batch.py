"""`trainer.one_batch`: training on the first batch alone."""

import pytest
import torch

from credit_dp.training.monitoring import repeat_first_batch
from tests.training.runs import alone, built, make_config, make_store


@pytest.mark.slow
def test_it_is_the_first_batch_in_a_resumed_run_too(tmp_path):
    config = make_config(make_store(tmp_path, 12), tmp_path / "run")
    training = built(config, alone())
    with training.loader as loader:
        wanted = next(loader)
        next(loader)
        batches = repeat_first_batch(loader)
        for batch in (next(batches), next(batches)):
            assert torch.equal(batch.target, wanted.target)
        assert loader.state_dict()["position"] == 0
