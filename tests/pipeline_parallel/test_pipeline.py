"""A pipeline computes what the model on one process computes, with every schedule."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.verify import relative_error
from credit_dp.errors import UserError
from credit_dp.pipeline_parallel.pipeline import Pipeline, Stopwatch, theoretical_bubble
from tests.pipeline_parallel.models import (
    SAMPLES,
    assert_pipeline_is_model,
    batch,
    squared,
    stages_of,
    train_step,
)
from tests.ranks import on_processes
from tests.tier_cases import tiers

NAMES_AND_SCHEDULES = [
    ("unet", "gpipe"), ("pangu", "interleaved"), ("swin", "gpipe"), ("crossformer", "1f1b"),
    ("sfno", "interleaved"), ("spectral norm", "1f1b"), ("globe", "gpipe"),
    ("unet with all", "interleaved"), ("unet with all", "gpipe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedule"),
    tiers(
        fast=[("unet with all", "1f1b"), ("computed again", "interleaved"), ("own", "gpipe")],
        slow=NAMES_AND_SCHEDULES[:2],
        exhaustive=NAMES_AND_SCHEDULES[2:],
    ),
)
def test_two_stages_are_the_model(name, schedule):
    on_processes(2, assert_pipeline_is_model, name, 16, schedule, 4, domain=1, pipeline=2)


@pytest.mark.parametrize(
    ("name", "schedule"),
    tiers(
        fast=[("own", "1f1b")],
        slow=[("unet with all", "1f1b"), ("globe", "interleaved"), ("crossformer", "gpipe")],
        exhaustive=[
            ("unet", "gpipe"), ("computed again", "interleaved"), ("pangu", "gpipe"),
            ("swin", "1f1b"), ("sfno", "1f1b"), ("globe", "gpipe"), ("globe", "1f1b"),
        ],
    ),
)  # fmt: skip
def test_stages_of_sharded_models_are_the_model(name, schedule):
    # 33 rows divide into no whole patches, windows or bands.
    on_processes(4, assert_pipeline_is_model, name, 33, schedule, 2, domain=2, pipeline=2)


@pytest.mark.parametrize(
    ("schedule", "micro"), tiers(fast=(), slow=[("1f1b", 4)], exhaustive=[("gpipe", 2)])
)
def test_three_ranks_are_the_model(schedule, micro):
    on_processes(3, assert_pipeline_is_model, "unet", 16, schedule, micro, domain=1, pipeline=3)


@pytest.mark.slow
def test_fewer_micro_batches_than_ranks():
    on_processes(2, assert_pipeline_is_model, "own", 16, "gpipe", 1, domain=1, pipeline=2)


def assert_shared_out(manager: DomainParallelManager, schedule: str) -> None:
    """Compare with FSDP2 on the data axis; a data rank has a share of the samples."""
    virtual = 2 if schedule == "interleaved" else 1
    whole, stages = stages_of(manager, "unet", 16, 2 * virtual)
    for stage in stages:
        for segment in stage.module.segments()[stage.module.active_segments]:
            fully_shard(stage.module.get_submodule(segment.name), mesh=manager.mesh["data"])
        fully_shard(stage.module, mesh=manager.mesh["data"])
    pipeline = Pipeline(stages, manager, schedule, 2)
    x, target = batch("unet", 16, 2 * SAMPLES)
    train_step(whole, x, target, 1)
    own = slice(manager.dp_rank * SAMPLES, (manager.dp_rank + 1) * SAMPLES)
    pipeline.forward_backward(x[own], target[own], squared)
    with torch.no_grad():
        assert relative_error(pipeline.forward(x[own]), whole(x[own])) < 1e-11
    largest = max(p.grad.abs().max() for p in whole.parameters()).item()
    for part in pipeline.stage_modules:
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor), name
            summed = parameter.grad.full_tensor() * manager.dp_world_size
            wanted = whole.get_parameter(name).grad
            assert relative_error(summed, wanted, 1e-3 * largest) < 1e-11, name


@pytest.mark.parametrize(
    "schedule", tiers(fast=(), slow=[("1f1b",)], exhaustive=[("gpipe",), ("interleaved",)])
)
def test_stages_may_be_shared_out_on_the_data_axis(schedule):
    on_processes(4, assert_shared_out, schedule, domain=1, pipeline=2)


def calls_of(manager: DomainParallelManager, schedule: str) -> list[tuple[str, int, int]]:
    virtual = 2 if schedule == "interleaved" else 1
    _, stages = stages_of(manager, "computed again", 16, 2 * virtual)
    pipeline = Pipeline(stages, manager, schedule, SAMPLES)
    found: list[tuple[str, int, int]] = []
    for number, part in enumerate(pipeline.stage_modules):
        part.register_forward_pre_hook(
            lambda part, x, number=number: found.append(("forward", number, len(x[0])))
        )
    x, target = batch("unet", 16)
    pipeline.forward_backward(
        x, target, squared, lambda part, micro: found.append(("begin", part, micro))
    )
    pipeline.forward_backward(x, target, squared)
    return found


@pytest.mark.parametrize(
    "schedule", tiers(fast=[("1f1b",)], slow=(), exhaustive=[("interleaved",)])
)
def test_each_micro_batch_is_announced_right_before_its_forward(schedule):
    for found in on_processes(2, calls_of, schedule, domain=1, pipeline=2):
        parts = {part for _, part, _ in found}
        reported, silent = found[: 2 * SAMPLES * len(parts)], found[2 * SAMPLES * len(parts) :]
        assert [kind for kind, *_ in reported] == ["begin", "forward"] * (SAMPLES * len(parts))
        assert {kind for kind, *_ in silent} == {"forward"}
        for (_, part, _), (_, same, samples) in zip(reported[::2], reported[1::2], strict=True):
            assert part == same
            assert samples == 1
        for part in parts:
            order = [micro for kind, of, micro in reported if kind == "begin" and of == part]
            assert order == list(range(SAMPLES))


def mistake_of(manager: DomainParallelManager) -> str:
    """The first rank fails in the second micro-batch, after the other rank got the first one."""
    _, stages = stages_of(manager, "unet", 16, 2)
    pipeline = Pipeline(stages, manager, "1f1b", 2)
    calls = []

    def stumble(part, x):
        calls.append(None)
        if len(calls) == 2 or manager.pipeline_rank == 1:
            raise UserError("key: needs this, got that")

    pipeline.stage_modules[0].register_forward_pre_hook(stumble)
    with pytest.raises(UserError) as error:
        pipeline.forward_backward(*batch("unet", 16), squared)
    return str(error.value)


def test_a_users_mistake_stays_one():
    found = on_processes(2, mistake_of, domain=1, pipeline=2)
    assert found == ["key: needs this, got that"] * 2


def refusals_of(manager: DomainParallelManager) -> list[str]:
    _, stages = stages_of(manager, "unet", 16, 2)
    x, target = batch("unet", 16)
    found = []
    with pytest.raises(UserError, match="1f1b needs at least one for each of the 2 ranks") as error:
        Pipeline(stages, manager, "1f1b", 1)
    found.append(str(error.value))
    with pytest.raises(ValueError, match="4 samples can't be split into 3") as cut:
        Pipeline(stages, manager, "gpipe", 3).forward_backward(x, target, squared)
    found.append(str(cut.value))
    return found


def test_what_does_not_divide_is_refused_on_all_ranks():
    first, second = on_processes(2, refusals_of, domain=1, pipeline=2)
    assert first == second
    assert first[0].startswith("parallel.microbatches: ")
    assert "\n" not in first[0]


def test_theoretical_bubble():
    for case, share in [((2, 2, 1), 1 / 3), ((4, 8, 1), 3 / 11), ((2, 4, 2), 1 / 9)]:
        assert theoretical_bubble(*case) == pytest.approx(share), case


def test_idle_share_is_what_is_not_busy():
    watch = Stopwatch(torch.device("cpu"))
    assert watch.idle_share() == 0
    for _ in range(2):  # the second measurement replaces the first
        with watch.measure():
            for _ in range(2):
                with watch.busy():
                    time.sleep(0.03)
            time.sleep(0.18)
        assert 0.55 < watch.idle_share() < 0.85
