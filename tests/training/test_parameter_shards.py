"""FSDP2: the size of its shards, its precision, and the models that it refuses."""

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.config import Config, OwnModelConfig, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.models.segments import Segment, SegmentedModel
from credit_dp.training.model_parts import check_has_values
from credit_dp.training.parameter_shards import fsdp_mesh, shard_parameters, shards_of
from credit_dp.training.replicas import check_replicas
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.meshes import (
    MODELS,
    ONE,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    full_arrays,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.refusals import refusal
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    tiny_crossformer,
    tiny_unet,
    train_on,
)

FSDP = Mesh(1, 2, 1, "fsdp2")
LONG = ["2000-01-01", "2000-01-17"]  # has samples for 64 ranks


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


@pytest.mark.parametrize(("domain", "data"), tiers([(3, 1)], [], [(2, 2), (1, 2)]))
def test_data_and_domain_ranks_hold_a_share_each(config, domain, data):
    parallel = ParallelConfig(domain=domain, data=data, data_mode="fsdp2")
    given = replace(config, parallel=parallel)
    found = on_processes(domain * data, held_numbers, given, domain=domain)
    assert sum(own for own, *_ in found) == found[0][1]
    for own, total, moments, modules in found:
        assert moments == own
        assert own <= (1 / (domain * data) + 0.05) * total
        # Three residual blocks, head, the rest, and the stem if it needs no rows of others.
        assert modules == 5 + (domain == 1)


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


def test_a_copy_has_about_64_shards():
    wanted = {1: 1, 8: 8, 64: 64, 65: 65, 96: 48, 202: 101, 1001: 77, 1024: 64}
    assert {replicas: shards_of(replicas) for replicas in wanted} == wanted


@pytest.mark.exhaustive
def test_one_kernel_updates_shards_as_well(config):
    assert_same_trajectory(
        run_on_mesh(FSDP, with_one_kernel, config), run_on_mesh(ONE, train_from_start, config, None)
    )


class Reductions(TorchDispatchMode):
    """Remembers the dtypes of reductions of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_reduce_scatter_base_":
            self.dtypes.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


def reductions_of(manager: DomainParallelManager, configs: list[Config]) -> list[list[torch.dtype]]:
    """Return the dtypes of the reductions of gradients in one step of each run."""
    found = []
    for config in configs:
        training = built(config, manager)
        with training.loader, Reductions() as reductions:
            training.trainer.train_step(next(training.loader))
        found.append(reductions.dtypes)
    return found


@pytest.mark.slow
def test_gradients_are_reduced_once_and_never_summed_in_a_lower_dtype(config):
    four = replace(config.trainer, accumulate=4, checkpoint_activations=True)
    two = replace(config.trainer, accumulate=2, dtype="float32")
    sharded = ParallelConfig(domain=3, data_mode="fsdp2")
    half = replace(sharded, param_dtype="bfloat16")
    mixed = replace(half, reduce_dtype="float32")
    cases = ((four, sharded), (two, half), (two, mixed))
    configs = [replace(config, trainer=trainer, parallel=parallel) for trainer, parallel in cases]
    # Once for each of FSDP's modules, and with low precision once for each micro-batch.
    wanted = [[torch.float64] * 5, [torch.bfloat16] * 10, [torch.float32] * 5]
    assert on_processes(3, reductions_of, configs) == [wanted] * 3


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


def shard_odd(manager: DomainParallelManager, parameter: torch.Tensor) -> torch.Tensor:
    """Shard a model with this parameter beside others, and return the whole of it."""
    model = nn.Linear(2, 3)
    model.odd = nn.Parameter(parameter)
    shard(model, manager)
    assert isinstance(model.odd, DTensor)
    return model.odd.detach().full_tensor()


def shard(model: nn.Module, manager: DomainParallelManager) -> None:
    mesh = fsdp_mesh(manager)
    assert mesh is not None
    shard_parameters(model, mesh, ParallelConfig(domain=3, data_mode="fsdp2"), torch.float32)


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


def refused_shards(manager: DomainParallelManager) -> list[str]:
    complex_weight = torch.zeros(3, dtype=torch.complex64)
    return [
        refusal(shard_odd, manager, torch.tensor(1.0)),
        refusal(shard_odd, manager, complex_weight),
        refusal(shard, Tied(), manager),
    ]


def test_parameters_that_cannot_be_sharded_are_refused():
    wanted = [
        "odd, a single number without a dimension. Give it one, as ",
        "odd, whose numbers are complex. Use ",
        "can't shard second.weight, which first has too",
    ]
    for lines in on_processes(3, refused_shards):
        for line, words in zip(lines, wanted, strict=True):
            assert line.startswith("parallel.data_mode: fsdp2 can't "), line
            assert words in line
    # Another order of memory is none.
    parameter = torch.arange(15.0).view(3, 5).t()
    for whole in on_processes(3, shard_odd, parameter):
        assert torch.equal(whole, parameter)


@dataclass
class CuriousConfig(OwnModelConfig):
    """A model whose constructor reads weights, and draws by what it has read."""

    name: str = "curious"

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> nn.Module:
        first, last = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Conv2d(8, out_channels, 1)
        nn.init.orthogonal_(first.weight)
        nn.init.trunc_normal_(last.weight, std=0.5, a=-0.5, b=0.5)  # which draws until all fit
        if first.weight.max() > last.weight.max():
            last.bias = nn.Parameter(0.1 * torch.randn(out_channels))
        with torch.no_grad():
            first.bias.copy_(torch.from_numpy(first.weight.detach().numpy().mean((1, 2, 3))))
            first.weight[3:].mul_(first.bias.norm())
        return nn.Sequential(
            first, nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)), last
        )


def initial_weights(manager: DomainParallelManager, config: Config) -> Trajectory:
    """Return the weights before the first step, and a number for the state of the random ones."""
    training = built(config, manager)
    state = training.trainer.state
    # Frozen or not, each is a parameter on this device, of which the optimizer updates the shards.
    assert all(not p.is_meta for p in state.parameters.values())
    return [(float(torch.get_rng_state().double().sum()), 0.0)], full_arrays(state.parameters)


MODELS_TO_START = {
    **{name: MODELS[name] for name in ("unet", "pangu", "crossformer")},
    "spectral norm": tiny_crossformer(spectral_norm=True),
    "plug-in": CuriousConfig(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"),
    tiers(
        fast=[("plug-in", Mesh(1, 1, 3, "fsdp2"))],
        slow=[("pangu", Mesh(1, 1, 2, "fsdp2"))],
        exhaustive=[
            ("unet", Mesh(2, 1, 2, "fsdp2")),
            ("unet", Mesh(1, 2, 1, "fsdp2")),
            ("crossformer", Mesh(1, 1, 3, "fsdp2")),
            ("spectral norm", Mesh(1, 1, 2, "fsdp2")),
            ("plug-in", Mesh(1, 2, 2, "fsdp2")),
        ],
    ),
)
def test_shards_start_with_the_bits_of_one_process(tmp_path, config, model, mesh):
    config = replace(config, model=MODELS_TO_START[model])
    if model != "unet":
        config = replace(config, data=replace(config.data, store=str(make_store(tmp_path, 33))))
    numbers, weights = run_on_mesh(mesh, initial_weights, config)
    wanted_numbers, wanted = initial_weights(alone(), replace(config, parallel=ParallelConfig()))
    assert numbers == wanted_numbers
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        assert np.array_equal(weight, wanted[name]), name


def test_parameters_without_values_are_refused():
    for last in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):

        def model(last: nn.Module = last) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 2), copy.deepcopy(last))

        line = refusal(check_has_values, model())
        assert re.match("model: 1.weight has no values: .* Give it its size", line)
    check_has_values(nn.Linear(2, 2))
