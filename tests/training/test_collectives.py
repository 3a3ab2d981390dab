"""The messages of all ranks in a training step, also of 1,024 ranks, of which only one is there."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from credit_dp.config import Config, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.run import Preemption
from tests.data import stores
from tests.ranks import on_processes
from tests.training.runs import built, make_config

# The name of the gather into one tensor depends on torch's version.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = [
    GATHER,
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather_object",
    "new_group",
]
WORLD = 1024
DOMAIN = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    """Return the config of a step of 128 samples, of which only some are read."""
    folder = tmp_path_factory.mktemp("store")
    chunks = {"time": 20, "latitude": 1}  # so that no rank reads for others
    path = stores.write(stores.dataset(17, 8, 140), folder / "store.zarr", chunks=chunks)
    # Messages that nobody sends leave memory as it was: such steps may not be finite.
    config = make_config(path, folder, steps=3, log_every=3, on_nonfinite="skip", exploding=None)
    data = stores.config(
        path,
        train=["2000-01-01", "2000-02-03"],
        valid=["2000-02-04T00", "2000-02-04T06"],
        test=["2000-02-04", "2000-02-04"],
        batch_size=WORLD // DOMAIN,
    )
    return replace(config, data=data)


@contextmanager
def counted_collectives(of_all: int) -> Iterator[Counter[str]]:
    """Count the collectives that Python calls between all ranks, and gathers into lists."""
    counts = Counter[str]()
    before = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        @wraps(before[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            every = name in ("new_group", "all_gather")
            if every or dist.get_world_size(group) == of_all:
                counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextmanager
def one_of_many(rank: int) -> Iterator[DomainParallelManager]:
    """Be one rank of many, whose messages are never sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield DomainParallelManager(WORLD, DOMAIN)
    finally:
        dist.destroy_process_group()


def keep_gradients(
    buckets: list[int], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Count the buckets of DDP; torch's fake process group can't reduce them."""
    buckets.append(bucket.buffer().nbytes)
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def counts_of_steps(manager: DomainParallelManager, config: Config) -> list[Counter[str]]:
    """Return the collectives between all ranks in three steps; the second one is not logged."""
    parallel = ParallelConfig(data=manager.dp_world_size, domain=manager.domain_world_size)
    training = built(replace(config, parallel=parallel), manager)
    trainer, buckets, found = training.trainer, list[int](), []
    trainer.forward_backward.model.register_comm_hook(buckets, keep_gradients)
    with training.loader, Preemption(manager) as preemption:
        trainer.start()
        for _ in range(3):
            batch = trainer.throughput.next_batch(training.loader)
            with counted_collectives(manager.world_size) as counts:
                trainer.train_step(batch, preemption.pending_signal)
            found.append(counts)
    assert len(buckets) == 3  # one for each step: the model is tiny
    return found


LEAST = Counter(all_reduce=1)
LOGGED = LEAST + Counter([GATHER])  # times and bytes of all ranks


@pytest.mark.parametrize("rank", [0, pytest.param(WORLD - 1, marks=pytest.mark.exhaustive)])
def test_a_step_of_many_ranks_has_one_message_of_all(config, rank):
    with one_of_many(rank) as manager:
        assert counts_of_steps(manager, config) == [LOGGED, LEAST, LOGGED]


@pytest.mark.slow
def test_a_step_of_real_ranks_has_one_message_of_all(config):
    for counts in on_processes(4, counts_of_steps, config, domain=2):
        assert counts == [LOGGED, LEAST, LOGGED]
