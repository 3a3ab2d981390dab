"""Compiled models train like uncompiled ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from credit_dp.config import AdamWConfig, Config, DiffusionConfig, StandardLossConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from tests.physics.atmospheres import atmosphere_config
from tests.ranks import close_pools, on_processes
from tests.tier_cases import tiers
from tests.training.meshes import (
    HALF_WAY,
    ONE,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    on_mesh,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.plugins import InterpolatingConfig
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    tiny_crossformer,
    tiny_pangu,
    tiny_swin,
    tiny_unet,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    model = replace(tiny_unet(), channels=[8])  # compiling takes minutes
    config = make_config(store, tmp_path_factory.mktemp("run"), model, steps=2)
    return replace(config, compile=True)


def compiled(manager: DomainParallelManager, config: Config) -> Trajectory:
    training = built(replace(config, compile=True), manager)
    model = training.trainer.state.parts[0]
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    if isinstance(model, FSDPModule):
        assert len(blocks) == 2
        assert all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in blocks)
    else:
        assert model._compiled_call_impl is not None
    return record_trajectory(training)


def plain(manager: DomainParallelManager, config: Config) -> Trajectory:
    return record_trajectory(built(replace(config, compile=False), manager))


@pytest.fixture
def new_ranks():
    """Ranks that no test has used: torch can't compile where tensors of the globe were used."""
    close_pools()
    yield
    close_pools()


def uncompiled_by_torch_2_11(manager: DomainParallelManager, config: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
        training = built(config, manager)
    assert training.trainer.state.parts[0]._compiled_call_impl is None


@pytest.mark.slow
def test_a_sharded_model_runs_uncompiled_on_torch_2_11(config):
    on_mesh = replace(config, parallel=replace(config.parallel, domain=2))
    on_processes(2, uncompiled_by_torch_2_11, on_mesh)


def in_whole_graphs(manager: DomainParallelManager, config: Config) -> None:
    """Train two steps; a graph that is cut, or a block that is not compiled, is an error."""
    compile_whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_whole)
        patch.setattr(torch._dynamo.config, "recompile_limit", 8)
        record_trajectory(built(config, manager))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("new_ranks")
@pytest.mark.parametrize("model", ["unet", "crossformer", "pangu", "swin"])
def test_blocks_of_shards_are_whole_graphs(config, tmp_path, model):
    many = {
        "unet": replace(tiny_unet(), channels=[8], blocks=10),
        "crossformer": tiny_crossformer(),
        "pangu": tiny_pangu(),
        "swin": tiny_swin(),
    }
    config = replace(config, model=many[model])
    if model != "unet":
        config = replace(config, data=replace(config.data, store=str(make_store(tmp_path, 33))))
    on_processes(2, in_whole_graphs, on_mesh(config, Mesh(1, 1, 2, "fsdp2")))


def compiled_and_recomputed(manager: DomainParallelManager, config: Config) -> Trajectory:
    """Train with compiled steps that backward computes again; they send what a plain run sends."""
    transport = manager.transport
    before = transport.calls
    plain(manager, config)
    calls = transport.calls - before
    before = transport.calls
    trainer = replace(config.trainer, checkpoint_activations="step")
    trajectory = compiled(manager, replace(config, trainer=trainer))
    assert transport.calls - before == calls
    return trajectory


def compiled_with_aot_eager(
    manager: DomainParallelManager, config: Config, backend: str = "aot_eager"
) -> Trajectory:
    """Train with the compiler's graphs, but without its code for the CPU, which takes minutes."""
    from torch._dynamo.utils import counters  # takes seconds

    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        return record_trajectory(built(replace(config, compile=True), manager))


def compiled_to_whole_graphs(manager: DomainParallelManager, config: Config) -> Trajectory:
    """Train, and check that no graph is cut."""
    from torch._dynamo.utils import counters

    trajectory = compiled_with_aot_eager(manager, config)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] > 0
    return trajectory


def compiled_in_all_versions(manager: DomainParallelManager, config: Config) -> Trajectory:
    """Train; a module that runs uncompiled as it has too many versions of its code is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
        patch.setattr(torch._dynamo.config, "recompile_limit", 8)
        return compiled_with_aot_eager(manager, config, "eager")


def compiled_in_parts(manager: DomainParallelManager, config: Config) -> Trajectory:
    """Train with graphs that are cut where DDP sends gradients.

    The backend, like torch's default, does not pass the order on as tensors: "aot_eager" does, and
    torch 2.13 takes these for outputs of the parts.
    """
    return compiled_with_aot_eager(manager, config, "aot_eager_decomp_partition")


def resumed_uncompiled_and_back(
    manager: DomainParallelManager, config: Config, folder: Path
) -> list[Trajectory]:
    """Save half way with and without compiled code, and train the rest without and with it."""
    torch._dynamo.reset()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        for first, then in ((True, False), (False, True)):
            path = folder / str(first)
            train_from_start(manager, replace(config, compile=first), path)
            found.append(train_from_checkpoint(manager, replace(config, compile=then), path))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("new_ranks")
def test_checkpoints_are_the_same_compiled_or_not(config, tmp_path):
    config = replace(config, trainer=replace(config.trainer, steps=HALF_WAY + 1), compile=False)
    numbers, weights = run_on_mesh(ONE, plain, config)
    mesh = on_mesh(config, Mesh(1, 1, 2))
    for of_rank in on_processes(2, resumed_uncompiled_and_back, mesh, tmp_path):
        for found in of_rank:
            assert_same_trajectory(found, (numbers[HALF_WAY:], weights))


ENSEMBLE = {
    "model": replace(tiny_unet(noise=4), channels=[8]),
    "loss": StandardLossConfig(name="crps", level_weight=True),
}
Run = Callable[[DomainParallelManager, Config], Trajectory]
IN_STEPS = {"rollout": {0: 2}, "checkpoint_activations": "step"}
# How to train, the mesh, and keys of the trainer and of the config.
COMPILED: dict[str, tuple[Run, Mesh, dict[str, Any], dict[str, Any]]] = {
    "whole model": (compiled, Mesh(1, 1, 2), {}, {}),
    "rollouts": (
        compiled_to_whole_graphs,
        Mesh(1, 2, 2, "fsdp2"),
        {"rollout": {0: 1, 1: 2}, "accumulate": 2},
        {},
    ),
    "blocks": (compiled, Mesh(1, 1, 2, "fsdp2"), {}, {}),
    "computed again": (compiled_and_recomputed, Mesh(1, 1, 2), {}, {}),
    # Blocks share code, but not what is compiled: their layers have plans of their own.
    "cut graphs": (compiled_in_all_versions, Mesh(1, 1, 2), {}, {"model": InterpolatingConfig()}),
    # Each block finds again what was compiled for its own size.
    "sizes on bands": (
        compiled_with_aot_eager, Mesh(1, 1, 2, "fsdp2"), IN_STEPS, {"model": tiny_unet()}
    ),
    "sizes": (compiled_with_aot_eager, Mesh(1, 2, 1, "fsdp2"), IN_STEPS, {"model": tiny_unet()}),
    # The first bucket of DDP has 1 MB. Exchanges keep their order over the parts of the graph.
    "parts": (
        compiled_in_parts, Mesh(1, 1, 2), {}, {"model": replace(tiny_unet(), channels=[96])}
    ),
    "diffusion": (
        compiled_to_whole_graphs,
        Mesh(1, 1, 2),
        {},
        {"model": DiffusionConfig(channels=[8], groups=4, noise=4)},
    ),
    "ensemble": (
        compiled_to_whole_graphs,
        Mesh(1, 1, 2, "fsdp2", ensemble=2),
        {"members": 2, "checkpoint_activations": "step"},
        ENSEMBLE,
    ),
    "ensemble of crossformers": (
        compiled_to_whole_graphs,
        Mesh(1, 1, 2),
        {"members": 2},
        {**ENSEMBLE, "model": tiny_crossformer(noise=4)},
    ),
    "stochastic depth": (
        compiled_to_whole_graphs,
        Mesh(1, 1, 2, "fsdp2"),
        {"accumulate": 2},
        {"model": tiny_pangu(patch=[2, 3, 4], stochastic_depth=0.4)},
    ),
    "tall kernels": (
        compiled_to_whole_graphs,
        Mesh(1, 1, 3),
        {},
        {"model": tiny_unet(block="global_depthwise", kernel=[25, 3])},
    ),
    "average": (
        compiled_to_whole_graphs,
        Mesh(1, 2, 1, "fsdp2"),
        {"freeze": ["stem.*"]},
        {"optimizer": AdamWConfig(lr=1e-2, warmup_steps=1, ema=0.9)},
    ),
}  # fmt: skip
SLOW = ("rollouts",)


@pytest.mark.usefixtures("new_ranks")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's compiler
@pytest.mark.parametrize(
    "name", tiers([], [(x,) for x in SLOW], [(x,) for x in COMPILED if x not in SLOW])
)
def test_a_compiled_model_trains_the_same(config, name):
    train, mesh, trainer, changes = COMPILED[name]
    changes = {**changes, "trainer": replace(config.trainer, **trainer), "compile": False}
    config = replace(config, **changes)
    assert_same_trajectory(run_on_mesh(mesh, train, config), run_on_mesh(ONE, plain, config))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("new_ranks")
def test_compiled_models_with_fixers_train_the_same(tmp_path):
    fixers = ["nonnegative", "dry_air", "water", "energy"]
    config = atmosphere_config(tmp_path, "model", fixers, steps=2, rollout={0: 2})
    found = run_on_mesh(Mesh(1, 1, 3, "fsdp2"), compiled_to_whole_graphs, config)
    assert_same_trajectory(found, run_on_mesh(ONE, plain, config))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("new_ranks")
def test_compiled_blocks_round_gradients_as_uncompiled_ones(config, tmp_path):
    """Backward runs without autocast. In it, weights would differ by 1e-3 after two steps."""
    trainer = replace(config.trainer, dtype="float32", autocast="bfloat16")
    data = replace(config.data, store=str(make_store(tmp_path, 33)))
    config = replace(config, model=tiny_pangu(), data=data, trainer=trainer, compile=False)
    mesh = Mesh(1, 1, 2, "fsdp2")
    numbers, weights = run_on_mesh(mesh, compiled_with_aot_eager, config)
    wanted_numbers, wanted_weights = run_on_mesh(mesh, plain, config)
    assert np.array(numbers) == pytest.approx(np.array(wanted_numbers), rel=1e-6)
    for name, wanted in wanted_weights.items():
        assert np.linalg.norm(weights[name] - wanted) <= 1e-6 * np.linalg.norm(wanted), name


def _is_compiled(manager: DomainParallelManager, config: Config) -> bool:
    return built(config, manager).trainer.state.parts[0]._compiled_call_impl is not None


@pytest.mark.exhaustive
def test_a_sharded_model_that_recomputes_blocks_runs_uncompiled(config):
    recomputing = replace(config, model=replace(config.model, activation_checkpointing=True))
    mesh = on_mesh(recomputing, Mesh(1, 1, 2))
    assert on_processes(2, _is_compiled, mesh) == [False, False]


@pytest.mark.slow
def test_a_missing_compiler_is_one_line(config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UserError, match=r"compile: needs a C\+\+ compiler .*no-such-compiler is not"
    ):
        built(config, alone())
