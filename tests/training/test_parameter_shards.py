"""FSDP2: the size of its shards, its precision, and the models that it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from credit_dp.config import Config, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.models.segments import Segment, SegmentedModel
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters
from tests.ranks import RankError, on_processes
from tests.training.meshes import ONE, Mesh, assert_same_trajectory, run_on_mesh, train_from_start
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


@pytest.mark.slow
def test_replicas_over_the_domain_hold_the_same_share(config):
    sharded = replace(config, parallel=ParallelConfig(domain=2, data=2, data_mode="fsdp2"))
    found = on_processes(4, held_numbers, sharded, domain=2)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][0] + found[2][0] == found[0][1]


def offloaded(manager: DomainParallelManager, config: Config):
    parallel = replace(config.parallel, cpu_offload=True)
    return train_from_start(manager, replace(config, parallel=parallel), None)


@pytest.mark.slow
def test_offloaded_parameters_train_the_same(config):
    assert_same_trajectory(
        run_on_mesh(FSDP, offloaded, config), run_on_mesh(ONE, train_from_start, config, None)
    )


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
