"""Compares `credit-dp plan` with what ranks hold and send in a step."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from credit_dp.cli.compose import Composer
from credit_dp.config import Config, DataConfig, OwnModelConfig, ParallelConfig
from credit_dp.costs import budget
from credit_dp.costs.budget import compare_meshes, plan_step
from credit_dp.data.setup import ExpectedData, expected_data, prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager, decide
from credit_dp.domain_parallel.decide import plan_layers
from credit_dp.pipeline_parallel.pipeline import StageAction, peak_saved_bytes, schedule_actions
from credit_dp.training.build_training import Training
from credit_dp.training.summary import estimate_run
from tests.cli.invocation import SMALL, assert_refused, plan
from tests.data import region_stores
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.runs import alone, built, make_config, make_store, step_records, tiny_unet

MICROS = {1: 2, 2: 4}  # of a step, by the ranks of the pipeline


class Mesh(NamedTuple):
    pipeline: int
    data: int
    domain: int
    mode: str
    schedule: str = "1f1b"


class Sends(TorchDispatchMode):
    """Counts the bytes of messages, and of collectives the larger of input and output.

    Those of process groups: rows and the sums of norms go through sockets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
            name = func.name().removeprefix("c10d::")
            self.bytes[name] += sum(sizes) if name == "send" else max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def nbytes(tensors: Any) -> int:
    return sum(local(x).nbytes for x in tensors)


def order_noted(parts: tuple[nn.Module, ...]) -> list[tuple[bool, int]]:
    """Return a list to which each forward and backward of a part is appended."""
    order: list[tuple[bool, int]] = []

    def forward(number: int, made: Any) -> None:
        order.append((True, number))
        first = next(x for x in tree_leaves(made) if x.requires_grad)
        first.register_hook(lambda _: order.append((False, number)))

    for number, part in enumerate(parts):
        part.register_forward_hook(lambda m, x, made, number=number: forward(number, made))
    return order


def step_of(manager: DomainParallelManager, config: Config, shards: int) -> dict[str, Any]:
    """Return what a rank holds after its second step, and what it sent in this step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.training.parameter_shards.SHARDS", shards)
        training: Training = built(config, manager)
    state = training.trainer.state
    gradients: list[int] = []
    state.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(nbytes(p.grad for p in state.parameters.values()))
    )
    with training.loader:
        steps = step_records(training)
        next(steps)
        rows, order = manager.transport.traffic.bytes, order_noted(state.parts)
        with Sends() as sends:
            next(steps)
    moments = (x for of in state.optimizer.state.values() for x in of.values() if x.ndim)
    return {
        "weights": nbytes(state.parameters.values()),
        "moments": nbytes(moments),
        "gradients": gradients[-1],
        "rows": manager.transport.traffic.bytes - rows,
        "sent": sends.bytes,
        "order": order,
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("store")
    made = make_config(
        make_store(folder, 9), folder / "run", tiny_unet(), steps=3, accumulate=2, log_every=100
    )
    return replace(made, data=replace(made.data, batch_size=8))


def both(
    config: Config, mesh: Mesh, shards: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what ranks hold and send, and the plan of the fullest rank of each stage."""
    pipeline, data, domain, mode, schedule = mesh
    parallel = ParallelConfig(
        pipeline=pipeline, data=data, domain=domain, data_mode=mode, schedule=schedule
    )
    config = replace(config, parallel=parallel)
    found = on_processes(
        pipeline * data * domain, step_of, config, shards, domain=domain, pipeline=pipeline
    )
    budgets = [budget for budget in plan_step(config).budgets if budget.mode == mode]
    return found, [{"held": budget.held, "sent": budget.sent} for budget in budgets]


MESHES = tiers(
    [],
    [(Mesh(1, 2, 2, "fsdp2"),), (Mesh(2, 1, 2, "ddp", "interleaved"),)],
    [
        (Mesh(2, 2, 1, "ddp"),),
        (Mesh(1, 2, 2, "ddp"),),
        (Mesh(2, 2, 1, "fsdp2", "interleaved"),),
        (Mesh(2, 2, 1, "fsdp2", "gpipe"),),
        (Mesh(2, 1, 2, "fsdp2"),),
    ],
)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_plan_is_what_ranks_hold_and_send(config: Config, mesh: Mesh) -> None:
    assert_planned(config, mesh, 64)


@pytest.mark.slow
def test_the_plan_of_several_copies_is_what_ranks_hold_and_send(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("credit_dp.training.parameter_shards.SHARDS", 2)
    assert_planned(config, Mesh(1, 2, 2, "fsdp2"), 2)


def assert_planned(config: Config, mesh: Mesh, most_shards: int) -> None:
    """Compare what ranks hold and send with the plan."""
    found, planned = both(config, mesh, most_shards)
    micros, shared = MICROS[mesh.pipeline], mesh.mode == "fsdp2"
    size = mesh.data * mesh.domain
    shards = min(size, most_shards)
    for stage, wanted in enumerate(planned):
        ranks = found[stage * size : (stage + 1) * size]
        held, sent = wanted["held"], wanted["sent"]
        for item in ("weights", "moments"):
            assert max(rank[item] for rank in ranks) == held[item]
        # In a pipeline gradients are whole until they are reduced.
        at_the_end = held["moments"] // 2 if shared else held["gradients"]
        assert max(rank["gradients"] for rank in ranks) == at_the_end
        rows = max(rank["rows"] for rank in ranks)
        assert max(rank["sent"]["send"] for rank in ranks) == sent["states"]
        assert (rows > 0) == (sent["rows"] > 0) == (mesh.domain > 1)
        for rank in ranks:
            gathered = rank["sent"]["_allgather_base_"] * (shards - 1) // shards
            assert gathered == sent["weights"]
            order = schedule_actions(
                mesh.schedule, stage, mesh.pipeline, micros, 1 + (mesh.schedule == "interleaved")
            )
            if mesh.pipeline > 1:
                assert rank["order"] == [tuple(work) for work in order]
        if shared:
            by_kind = ranks[0]["sent"]
            scattered, copies = by_kind["_reduce_scatter_base_"], size // shards
            if copies > 1:
                assert by_kind["allreduce_"] >= scattered // shards
            over_copies = 2 * (copies - 1) * (scattered // shards) // copies
            assert sent["gradients"] == (shards - 1) * scattered // shards + over_copies
        else:
            assert sent["gradients"] == 2 * (size - 1) * held["gradients"] // size


@pytest.mark.slow
def test_rows_are_those_of_all_micro_batches(config: Config) -> None:
    mesh = replace(config, parallel=ParallelConfig(data=2, domain=2))
    (once, _), (twice, _) = (
        plan_step(replace(mesh, trainer=replace(config.trainer, accumulate=n))).budgets
        for n in (2, 4)
    )
    assert once.sent["rows"] == pytest.approx(twice.sent["rows"], rel=0.1)
    assert once.held["activations"] == pytest.approx(2 * twice.held["activations"], rel=0.02)
    assert once.sent["gradients"] == twice.sent["gradients"]


def test_micro_batches_in_flight() -> None:
    for schedule, rank, virtual, most in (
        ("gpipe", 0, 1, 8 * 5),
        ("gpipe", 3, 1, 8 * 5),
        ("1f1b", 0, 1, 4 * 5),
        ("1f1b", 3, 1, 1 * 5),
        # Narayanan et al. 2021, figure 4: the first rank has run 4 + 6 forwards before a backward.
        ("interleaved", 0, 2, 7 * 5 + 4 * 7),
    ):
        order = schedule_actions(schedule, rank, 4, 8, virtual)
        assert Counter(order) == {
            StageAction(way, part): 8 for way in (True, False) for part in range(virtual)
        }
        assert peak_saved_bytes(order, [5, 7]) == most, (schedule, rank)


@pytest.mark.slow
def test_cuts_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (*SMALL, "parallel.pipeline=2", "data.batch_size=4")
    code, out, err = plan(monkeypatch, *keys, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    first, second = found["cuts"]
    assert (first["first"], first["state_bytes"]) == ("stem", 0)
    assert first["cost"] + second["cost"] == pytest.approx(1)
    assert second["state_bytes"] > 0
    assert found["bubble"] == pytest.approx(1 / 3)
    assert found["input_shapes"][0][0] == 2
    weights = [b["held"]["weights"] for b in found["budget"] if b["mode"] == "ddp"]
    assert sum(weights) == found["parameter_bytes"]
    code, out, _ = plan(monkeypatch, *keys, "parallel.stages=[head]")
    assert code == 0
    assert "\nhead " in out
    assert "waits 33.3% of a step" in out


@pytest.mark.slow
def test_meshes_up_to_so_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = plan(monkeypatch, *SMALL, "--up-to", "20", "--memory", "0.001", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    meshes = found["meshes"]
    assert [(m["domain"], m["data"], m["rows"]) for m in meshes] == [
        *((1, 20, 12), (2, 10, 6), (4, 5, 3), (8, 2, 1), (12, 1, 1))
    ]
    assert "Lower parallel.domain to 12 or less." in found["refused"]
    kept = [m["budgets"][0]["held"]["activations"] for m in meshes]
    assert kept == sorted(kept, reverse=True)
    for mesh in meshes:
        ddp, shared = mesh["budgets"]
        assert ddp["held"]["weights"] >= (mesh["data"] - 1) * shared["held"]["weights"] / 2
        fits = [b["mode"] for b in (ddp, shared) if sum(b["held"].values()) <= 0.001 * 2**30]
        assert mesh["fits"] == fits
    assert meshes[0]["fits"] == []
    code, out, _ = plan(monkeypatch, *SMALL, "--up-to", "4")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[3:6]] == [
        ["1", "4"],
        ["2", "2"],
        ["4", "1"],
    ]
    assert "No larger domain" not in out


class _ScaledConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _CoarseConfig(OwnModelConfig):
    def coarsest_rows(self, height: int) -> int:
        return height // 4


def test_no_domain_is_too_large_for_a_reason_that_only_concerns_layers(tmp_path: Path) -> None:
    config = make_config(make_store(tmp_path, 16), tmp_path, _CoarseConfig(name="custom"))
    model = _ScaledConv(3, 3, 3, padding=1)
    comparison = compare_meshes(model, (1, 3, 8, 16), config, 3)
    assert [mesh.domain for mesh in comparison.meshes] == [1, 2]
    assert comparison.limit == ""


class _Placed(nn.Module):
    """A convolution of 8 channels, and a parameter for each column of the globe."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 3, padding=1))
        self.place = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + self.place
        return y


def test_a_model_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(*args: Any) -> decide.Decision:
        planned.append(args[1].manager.domain_parallel_size)
        return plan_layers(*args)

    monkeypatch.setattr(decide, "plan_layers", counted)
    config = make_config(make_store(tmp_path, 16), tmp_path, _CoarseConfig(name="custom"))
    comparison = compare_meshes(_Placed(), (1, 3, 8, 16), config, 2)
    modes = [[each.mode for each in mesh.budgets] for mesh in comparison.meshes]
    assert modes == [["ddp", "fsdp2"]] * 2
    assert planned == [1, 2]


REFUSED = {
    "--up-to 0": "--up-to: needs at least 1 rank, got 0",
    "--up-to many": "argument --up-to: invalid int value: 'many'",
    "--up-to 8 parallel.domain=2": "--up-to: chooses the meshes of data x domain",
    "--up-to 8 parallel.data=2": "--up-to: gives every mesh as many data ranks",
    "--up-to 8 parallel.pipeline=2": "got parallel.pipeline=2",
    "--memory 40": "--memory: has no effect without --up-to. Add --up-to.",
    "--up-to 8 --memory 0": "more than 0 GiB, got 0",
    "parallel.data=2 trainer.accumulate=4": (
        "data.batch_size: each of 2 data ranks splits its 2 samples into 4 micro-batches"
    ),
    "parallel.pipeline=2 parallel.stages=[hed]": (
        "parallel.stages: the model has no segment 'hed'. Did you mean head?"
    ),
    "parallel.pipeline=2 parallel.microbatches=1": (
        "parallel.microbatches: parallel.schedule=1f1b needs at least parallel.pipeline (2), got 1"
    ),
}


@pytest.mark.slow
def test_one_line() -> None:
    assert_refused(REFUSED, "plan", *SMALL)


def test_a_plan_without_ensemble_ranks_reads_the_channels_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a store of a user, each time opens the store; the netCDF library has crashed at it."""
    calls: list[DataConfig] = []

    def counted(config: DataConfig) -> ExpectedData:
        calls.append(config)
        return expected_data(config)

    monkeypatch.setattr(budget, "expected_data", counted)
    plan_step(Composer("plan").compose_config(SMALL))
    assert len(calls) == 1


def test_a_plan_on_a_regional_store_is_of_the_model_of_a_region(tmp_path: Path) -> None:
    keys = region_stores.overrides(region_stores.write("box", tmp_path))
    model, shape = budget.model_and_shape(Composer("plan").compose_config(keys), 1)
    assert shape[-2:] == (region_stores.ROWS, region_stores.COLUMNS)
    assert model.stem.column_mode == "replicate"


def saved_bytes(call: Callable[[], Any], held: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that a call saves for backward and nothing else holds."""
    saved: dict[int, UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()
    del result
    addresses = {x.untyped_storage().data_ptr() for x in held}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in addresses)


def test_what_a_model_on_one_rank_computes_again_is_counted(config: Config) -> None:
    config = replace(config, model=tiny_unet(activation_checkpointing=True))
    training = built(config, alone())
    training.loader.close()
    (model,) = training.trainer.state.parts
    held, again = [*model.parameters(), *model.buffers()], []
    x = torch.randn(budget.model_and_shape(config, 2)[1], dtype=training.like.dtype)
    model.train()
    kept = saved_bytes(lambda: model(x), held)

    def measured(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        again.append(saved_bytes(lambda: forward(x), [*held, x]))
        return forward(x)

    whole = copy.deepcopy(model)
    whole.checkpointing = False
    held = [*whole.parameters(), *whole.buffers()]
    for segment in whole.segments():
        if segment.is_recomputed:
            block = whole.get_submodule(segment.name)
            block.forward = partial(measured, block.forward)
    whole(x)
    planned = plan_step(config).budgets[0].held
    assert (planned["activations"], planned["recomputed"]) == (kept, max(again))
    estimate = estimate_run(config, prepare_training_data(config.data), training, alone())
    assert estimate.memory["activations"] == kept + max(again)
    assert model.checkpointing
