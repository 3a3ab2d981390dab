"""FSDP2: the size of its shards, its precision, and the models that it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.config import Config, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.models.segments import Segment, SegmentedModel
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters, shards_of
from credit_dp.training.replicas import check_replicas
from tests.ranks import RankError, on_processes
from tests.training.meshes import (
    CLIP,
    ONE,
    Mesh,
    assert_same_trajectory,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.runs import built, make_config, make_store, tiny_unet, train_on

FSDP = Mesh(1, 2, 1, "fsdp2")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    config = make_config(store, tmp_path_factory.mktemp("run"), tiny_unet(), steps=3)
    return replace(config, data=replace(config.data, batch_size=8))


def held_numbers(manager: DomainParallelManager, config: Config) -> tuple[int, int, int, int]:
    """Count this rank's shards, whole parameters and moments; list FSDP's modules."""
    training = built(config, manager)
    train_on(training)
    state = training.trainer.state
    parameters = list(state.parameters.values())
    assert all(isinstance(p, DTensor) for p in parameters)
    own = sum(p.to_local().numel() for p in parameters)
    moments = sum(state.optimizer.state[p]["exp_avg"].to_local().numel() for p in parameters)
    modules = sum(isinstance(m, FSDPModule) for m in state.parts[0].modules())
    return own, sum(p.numel() for p in parameters), moments, modules


def fsdp2(config: Config, **options: object) -> Config:
    parallel = ParallelConfig(data=2, data_mode="fsdp2", **options)
    return replace(config, parallel=parallel)


@pytest.mark.slow
def test_each_data_rank_holds_its_share(config):
    found = on_processes(2, held_numbers, fsdp2(config), domain=1)
    assert sum(own for own, *_ in found) == found[0][1]
    for own, total, moments, modules in found:
        assert moments == own
        # The first dimension is dealt out, and some are no multiple of two.
        assert own <= 0.55 * total
        assert modules == 6  # stem, three residual blocks, head, and the rest


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_data_and_domain_ranks_hold_a_share_each(config, data):
    sharded = replace(config, parallel=ParallelConfig(domain=2, data=data, data_mode="fsdp2"))
    found = on_processes(2 * data, held_numbers, sharded, domain=2)
    assert sum(own for own, *_ in found) == found[0][1]
    for own, total, moments, _ in found:
        assert moments == own
        assert own <= (0.55 if data == 1 else 0.3) * total


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(1, 1, 2, "fsdp2"),
        Mesh(1, 1, 3, "fsdp2"),
        Mesh(1, 2, 2, "fsdp2"),
        Mesh(2, 1, 2, "fsdp2"),
    ],
    ids=str,
)
def test_ten_steps_on_shards_over_the_domain_are_those_of_one_process(config, mesh):
    trainer = replace(config.trainer, steps=10, accumulate=2, gradient_clip=CLIP)
    config = replace(config, trainer=trainer)
    assert_same_trajectory(
        run_on_mesh(mesh, train_from_start, config, None),
        run_on_mesh(ONE, train_from_start, config, None),
    )


def offloaded(manager: DomainParallelManager, config: Config):
    parallel = replace(config.parallel, cpu_offload=True)
    return train_from_start(manager, replace(config, parallel=parallel), None)


@pytest.mark.slow
def test_offloaded_parameters_train_the_same(config):
    assert_same_trajectory(
        run_on_mesh(FSDP, offloaded, config), run_on_mesh(ONE, train_from_start, config, None)
    )


def with_one_kernel(manager: DomainParallelManager, config: Config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.training.optim.FUSED_DEVICES", {"cpu"})
        training = built(config, manager)
        assert all(group["fused"] for group in training.trainer.state.optimizer.param_groups)
        return record_trajectory(training)


def on_copies(manager: DomainParallelManager, config: Config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.training.parameter_shards.SHARDS", 2)
        training = built(config, manager)
    for parameter in training.trainer.state.parameters.values():
        assert parameter.device_mesh.shape == (2, 2)
    check_replicas(training.trainer.state.parameters, manager)
    return record_trajectory(training, Path(config.run.dir))


@pytest.mark.slow
def test_many_ranks_share_several_copies(config, tmp_path):
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    trajectory = run_on_mesh(Mesh(1, 2, 2, "fsdp2"), on_copies, config)
    assert_same_trajectory(trajectory, run_on_mesh(ONE, train_from_start, config, None))
    # Of two copies one is written.
    assert len(list(tmp_path.glob("step-*/*.safetensors"))) == 2
    resumed = run_on_mesh(ONE, train_from_checkpoint, config, tmp_path)
    assert np.array(resumed[0]) == pytest.approx(np.array(trajectory[0][-1:]), rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("replicas", "shards"),
    [(1, 1), (8, 8), (64, 64), (65, 65), (96, 48), (202, 101), (1001, 77), (1024, 64)],
)
def test_a_copy_has_about_64_shards(replicas, shards):
    assert shards_of(replicas) == shards


@pytest.mark.slow
def test_one_kernel_updates_shards_as_well(config):
    assert_same_trajectory(
        run_on_mesh(FSDP, with_one_kernel, config), run_on_mesh(ONE, train_from_start, config, None)
    )


class Reductions(TorchDispatchMode):
    """Counts the reductions of gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "c10d::_reduce_scatter_base_"
        return func(*args, **(kwargs or {}))


def count_reductions(manager: DomainParallelManager, config: Config) -> int:
    """Count the reductions of gradients in one step."""
    training = built(config, manager)
    with training.loader, Reductions() as reductions:
        training.trainer.train_step(next(training.loader))
    return reductions.count


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_several_micro_batches_are_reduced_once(config, recompute):
    trainer = replace(config.trainer, accumulate=4, checkpoint_activations=recompute)
    config = fsdp2(replace(config, trainer=trainer))
    # Once for each of FSDP's modules: stem, three residual blocks, head, and the rest.
    assert on_processes(2, count_reductions, config, domain=1) == [6, 6]


@pytest.mark.parametrize(("reduce_dtype", "times"), [(None, 2), ("float32", 1)])
def test_gradients_are_never_summed_in_a_lower_dtype(config, reduce_dtype, times):
    trainer = replace(config.trainer, accumulate=2, dtype="float32")
    config = replace(config, trainer=trainer)
    config = fsdp2(config, param_dtype="bfloat16", reduce_dtype=reduce_dtype)
    assert on_processes(2, count_reductions, config, domain=1) == [6 * times, 6 * times]


def in_bfloat16(manager: DomainParallelManager, config: Config):
    training = built(config, manager)
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    part = training.trainer.state.parts[0]
    block = part.get_submodule("encoder.1.0")
    block.register_forward_pre_hook(
        lambda module, args: seen.add((module.norm1.weight.dtype, args[0].dtype))
    )
    numbers = train_on(training)
    kept = {p.dtype for p in training.trainer.state.parameters.values()}
    return numbers, seen, kept


@pytest.mark.slow
def test_parameters_compute_in_the_configured_dtype_and_keep_their_own(config):
    config = replace(config, trainer=replace(config.trainer, dtype="float32"))
    (numbers, seen, kept), _ = on_processes(
        2, in_bfloat16, fsdp2(config, param_dtype="bfloat16", reduce_dtype="float32"), domain=1
    )
    exact, _, _ = on_processes(2, in_bfloat16, fsdp2(config), domain=1)[0]
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert kept == {torch.float32}
    for (loss, norm), (wanted, wanted_norm) in zip(numbers, exact, strict=True):
        assert loss == pytest.approx(wanted, rel=2e-2)
        assert norm == pytest.approx(wanted_norm, rel=0.2)
        assert loss != wanted


class WithRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 2, 12, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def shard_rows(manager: DomainParallelManager) -> None:
    model = convert_to_domain_parallel(WithRows(), manager, input_shape=(1, 2, 12, 8))
    parallel = ParallelConfig(domain=2, data_mode="fsdp2")
    mesh = fsdp_mesh(manager)
    assert mesh is not None
    shard_parameters(model, mesh, parallel, torch.float32)


def test_parameters_with_a_row_for_each_of_the_globes_are_refused():
    with pytest.raises(RankError, match=r"parallel.data_mode: fsdp2 can't shard bias"):
        on_processes(2, shard_rows)


class Tied(SegmentedModel):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.second.weight = self.first.weight

    def segments(self) -> list[Segment]:
        return [
            Segment(name, lambda state, name=name: (getattr(self, name)(*state),), (name,))
            for name in ("first", "second")
        ]


def shard_tied(manager: DomainParallelManager) -> None:
    mesh = fsdp_mesh(manager)
    assert mesh is not None
    parallel = ParallelConfig(data=2, data_mode="fsdp2")
    shard_parameters(Tied(), mesh, parallel, torch.float32)


def test_parameters_of_several_blocks_are_refused():
    with pytest.raises(RankError, match=r"can't shard second\.weight, which first has too"):
        on_processes(2, shard_tied, domain=1)
