"""Non-finite or exploding losses and gradients: the message, and the state that stays as it was."""

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from credit_dp.config import Config, MuonConfig, OwnOptimizerConfig, ParallelConfig, TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.build_training import Training
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.optim import build_optimizer
from credit_dp.training.trainer import MAX_CONSECUTIVE_SKIPS, MIN_NORMS, reduce_step
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.meshes import Mesh, on_mesh
from tests.training.refusals import assert_refused
from tests.training.runs import alone, built, make_config, make_store, step_records, weights

BAD = 3  # the step that goes wrong
WEIGHT = "encoder.0.0.norm2.weight"  # in the middle of the model
NAN = float("nan")
VARIABLE = "geopotential_1000"
CHECKPOINT = Path("run/checkpoint/step-00000002")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 16)
    config = make_config(store, tmp_path_factory.mktemp("run"), steps=5)
    return replace(config, optimizer=replace(config.optimizer, ema=0.9))


def batches_with_fault(batches: Iterator[Batch], training: Training, how: str) -> Iterator[Batch]:
    """Yield batches, with a fault at step `BAD`; `how` is empty on ranks without one."""
    for step, batch in enumerate(batches, 1):
        if step == BAD and how == "weight":
            spoil_weight(training)
        if step != BAD or not how or how == "weight":
            yield batch
            continue
        target, now = batch.target.clone(), batch.state.clone()
        if how == "input":
            now[1, 2, -1, 0] = NAN  # where no other band needs it
        elif how == "target":
            target[1, 2] = NAN
        elif how == "overflow":
            target[:, 2] = 1e200  # whose square is too large
        yield replace(batch, state=now, target=target)


def spoil_weight(training: Training) -> None:
    """Put a NaN into a weight in the middle of the model, if this rank has it."""
    for name, parameter in training.trainer.state.parameters.items():
        if name == WEIGHT:
            local(parameter).view(-1)[0] = NAN


def run_to_error(manager: DomainParallelManager, config: Config, how: str) -> tuple[str, bool, int]:
    """Return the run's last line, whether the weights are unchanged, and the last step.

    Things go wrong on one rank alone: the last one, or the first where only that has the input.
    """
    training = built(config, manager)
    trainer, pipeline = training.trainer, manager.pipeline_parallel_size > 1
    spoiler = 0 if pipeline and how == "input" else manager.world_size - 1
    batches = batches_with_fault(training.loader, training, how if manager.rank == spoiler else "")
    before: list[torch.Tensor] = []

    def train() -> None:
        for _ in step_records(training, batches, newest_checkpoint=lambda: CHECKPOINT):
            before[:] = [local(p).clone() for p in trainer.state.parameters.values()]

    with training.loader, pytest.raises(UserError) as error:
        train()
    after = [local(p) for p in trainer.state.parameters.values()]
    kept = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return str(error.value), kept, trainer.state.step


def numbers(loss: float, norm: float) -> torch.Tensor:
    """Return what a step of one process has to check."""
    return reduce_step(torch.tensor(loss), torch.tensor(norm).double(), 0, alone())


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    data = value.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def line_on(mesh: Mesh, config: Config, how: str) -> str:
    """Return the line, equal on all ranks; check that the step was not taken."""
    on = on_mesh(config, mesh)
    sizes = {"domain": mesh.domain, "pipeline": mesh.pipeline}
    found = (
        [run_to_error(alone(), on, how)]
        if mesh.ranks == 1
        else on_processes(mesh.ranks, run_to_error, on, how, **sizes)
    )
    lines, kept, steps = zip(*found, strict=True)
    assert set(steps) == {BAD - 1}
    assert all(kept) or how == "weight"
    assert set(lines) == {lines[0]}
    assert "\n" not in lines[0]
    assert f"at step {BAD}. " in lines[0]
    assert f"The last checkpoint is {CHECKPOINT}. Lower optimizer.lr (now " in lines[0]
    return str(lines[0])


ONE, BANDS, DATA, SHARDS = Mesh(1, 1, 1), Mesh(1, 1, 3), Mesh(1, 2, 1), Mesh(1, 1, 2, "fsdp2")
FAULTS = tiers(
    fast=[("input", BANDS)],
    slow=[("weight", SHARDS), ("target", DATA), ("overflow", ONE)],
    exhaustive=[
        *((how, ONE) for how in ("weight", "input", "target")),
        *((how, BANDS) for how in ("weight", "target", "overflow")),
        *((how, DATA) for how in ("weight", "input", "overflow")),
        *((how, SHARDS) for how in ("input", "target", "overflow")),
    ],
)


@pytest.mark.parametrize(("how", "mesh"), FAULTS)
def test_the_line_names_what_went_wrong_first(config, how, mesh):
    line = line_on(mesh, config, how)
    places = {ONE: (0, 0, 0), BANDS: (2, 0, 2), DATA: (1, 1, 0), SHARDS: (1, 0, 1)}
    # Where FSDP2 gathers a weight on all ranks, the first one is named.
    number, data, domain = (0, 0, 0) if (how, mesh) == ("weight", SHARDS) else places[mesh]
    rank = f"rank {number} (pipeline 0, data {data}, domain {domain})"
    if how == "weight":
        assert f" The first non-finite output comes from encoder.0.0.norm2, on {rank}. " in line
        assert "is nan with gradient norm nan" in line
    elif how == "input":
        assert f" comes from stem.conv, on {rank}. " in line
        words = rf" Variable {VARIABLE} is not finite in the input of 2000-01-0\dT\d\d\. "
        assert re.search(words, line)
    elif how == "target":
        assert " the non-finite gradient nearest to the loss is that of head." in line
        assert f" Variable {VARIABLE} is not finite in the target of 2000-01-0" in line
    else:
        assert "is inf with gradient norm inf" in line
        assert f" Variable {VARIABLE} is not finite in the forecast, or in its error. " in line


@pytest.mark.parametrize("how", tiers([], [("input",)], [("target",)]))
def test_stages_of_a_pipeline_end_alike(config, how):
    words = {
        "input": "comes from stem.conv, on rank 0 (pipeline 0, data 0, domain 0). Variable",
        "target": "nearest to the loss is that of head.",
    }
    assert words[how] in line_on(Mesh(2, 1, 1), replace(config, trainer=accumulated(config)), how)


def accumulated(config: Config) -> TrainerConfig:
    """Return the config with two micro-batches, as a pipeline needs."""
    return replace(config.trainer, accumulate=2)


def skipping(config: Config) -> Config:
    return replace(config, trainer=replace(config.trainer, on_nonfinite="skip"))


def all_tensors(training: Training) -> dict[str, torch.Tensor]:
    """Weights, moments and averages."""
    state = training.trainer.state
    assert state.average is not None
    averages = {f"average.{name}": value for name, value in state.average.averages.items()}
    return {name: local(value).clone() for name, value in (state.tensors() | averages).items()}


def left_out(manager: DomainParallelManager, config: Config) -> dict[str, torch.Tensor]:
    """Return the state where the bad step is never computed; schedule and sampler advance."""
    training = built(config, manager)
    state = training.trainer.state
    state.train()
    with training.loader:
        for step, batch in zip(range(1, config.trainer.steps + 1), training.loader, strict=False):
            if step == BAD:
                state.schedule.step()
                state.step += 1
            else:
                training.trainer.train_step(batch)
    return all_tensors(training)


def skipped(
    manager: DomainParallelManager, config: Config, how: str
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the state where the bad step is skipped, and the number skipped after each step."""
    training = built(config, manager)
    wrong = how if manager.rank == manager.world_size - 1 else ""
    with training.loader:
        records = list(step_records(training, batches_with_fault(training.loader, training, wrong)))
    return all_tensors(training), [record.metrics()["skipped"] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", tiers([(ONE,)], [], [(BANDS,)]))
def test_a_step_that_is_skipped_leaves_no_trace(config, mesh):
    on = skipping(on_mesh(config, mesh))
    if mesh.ranks == 1:
        wanted, found = [left_out(alone(), on)], [skipped(alone(), on, "input")]
    else:
        wanted = on_processes(mesh.ranks, left_out, on)
        found = on_processes(mesh.ranks, skipped, on, "input")
    for (left, counts), other in zip(found, wanted, strict=True):
        assert counts == [0, 0, 1, 1, 1]
        assert left.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in left.items())


@pytest.mark.slow
def test_the_first_step_can_be_skipped_and_too_many_in_a_row_can_not(config):
    training = built(skipping(config), alone())
    guard, schedule = training.trainer.guard, training.trainer.state.schedule
    (part,) = training.trainer.state.parts
    part.register_buffer("samples_seen", torch.zeros(()))
    before = weights(training)
    for count in range(1, MAX_CONSECUTIVE_SKIPS):
        guard.save_buffers()
        part.samples_seen += 4
        assert guard.decide(numbers(NAN, 1.0), lambda: "").skip
        schedule.step()
        assert guard.metrics() == {"skipped": count}
    assert torch.equal(weights(training), before)
    assert part.samples_seen == 0
    with pytest.raises(
        UserError, match=rf"at step 1, {MAX_CONSECUTIVE_SKIPS} times in a row\. There it is\. The"
    ):
        guard.decide(numbers(NAN, 1.0), lambda: "There it is. ")


def test_gradients_explode_in_comparison(config):
    guard = built(
        replace(config, trainer=replace(config.trainer, exploding=5.0)), alone()
    ).trainer.guard

    def accepts(norm: float) -> bool:
        return not guard.decide(numbers(1.0, norm), lambda: "never called").skip

    assert accepts(50.0)  # too few to compare with
    for size in np.linspace(0.5, 1.5, MIN_NORMS - 1):
        assert accepts(size)
    assert accepts(4.9)
    with pytest.raises(
        UserError, match=r"the gradient norm is 6 at step 1, .* trainer\.exploding=5"
    ):
        accepts(6.0)
    guard.config = replace(guard.config, exploding=None)
    assert accepts(1e9)


@pytest.mark.slow
def test_what_was_seen_is_in_checkpoints(config, tmp_path):
    on = replace(config, trainer=replace(skipping(config).trainer, exploding=5.0))
    state = built(on, alone()).trainer.state
    state.history.norms.extend([1.0] * MIN_NORMS)
    state.history.skipped, state.history.in_a_row = 3, MAX_CONSECUTIVE_SKIPS - 2
    save_checkpoint(tmp_path, state, "")
    guard = built(on, alone()).trainer.guard
    load_checkpoint(tmp_path, guard.state)
    assert guard.decide(numbers(1.0, 6.0), lambda: "").skip
    assert guard.metrics() == {"skipped": 4}
    with pytest.raises(UserError, match=f"{MAX_CONSECUTIVE_SKIPS} times in a row"):
        guard.decide(numbers(1.0, 6.0), lambda: "")


def test_numbers_that_are_only_sometimes_bad_are_reported(config):
    training = built(config, alone())
    batch = next(iter(training.loader))
    training.loader.close()
    assert "faulty hardware" in training.trainer.diagnose(batch)


@pytest.mark.slow
def test_a_compiled_model_names_its_modules_too(config):
    training = built(config, alone())
    batch = next(iter(training.loader))
    training.loader.close()
    training.trainer.state.parts[0].compile(backend="eager")
    training.trainer.train_step(batch)
    spoil_weight(training)
    assert "comes from encoder.0.0.norm2, on rank 0" in training.trainer.diagnose(batch)


def checked(config: Config, check_finite: str, **changes: Any) -> Config:
    """Return the config with checks of this kind, and a log of the first and last step only."""
    keys = {"log_every": 100, "checkpoint_every": 100, "check_finite": check_finite, **changes}
    return replace(config, trainer=replace(config.trainer, **keys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mesh"),
    tiers(
        fast=[("target", ONE)],
        slow=[("target", BANDS)],
        exhaustive=[
            ("weight", ONE),
            ("target", Mesh(1, 2, 1, "fsdp2")),
            ("target", Mesh(2, 1, 1)),
        ],
    ),
)
def test_a_late_check_ends_with_the_line_of_the_step_that_went_wrong(config, how, mesh):
    if mesh.pipeline > 1:
        config = replace(config, trainer=accumulated(config))
    line = line_on(mesh, checked(config, "late"), how)
    assert line == line_on(mesh, checked(config, "step"), how)


def tensors_of_fused(
    manager: DomainParallelManager, config: Config
) -> tuple[dict[str, torch.Tensor], list[int], dict[str, Any]]:
    """Return all tensors, steps whose check was left for later, and numbers of the state.

    On CPUs, too, one kernel updates the weights, as it does on GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.training.optim.FUSED_DEVICES", {"cpu"})
        training = built(config, manager)
    trainer = training.trainer
    wrong = "input" if manager.rank == manager.world_size - 1 else ""
    with training.loader:
        batches = batches_with_fault(training.loader, training, wrong)
        late = [r.step for r in step_records(training, batches) if trainer.guard.unread is not None]
    assert trainer.state.average is not None
    counts = {**trainer.state.history.state_dict(), "averaged": trainer.state.average.updates}
    return all_tensors(training), late, counts


@pytest.mark.slow
@pytest.mark.parametrize("mesh", tiers([(ONE,)], [(Mesh(1, 2, 1, "fsdp2"),)], [(BANDS,)]))
def test_a_step_that_is_skipped_late_leaves_the_same_state(config, mesh):
    found = []
    for check_finite in ("step", "late"):
        on = skipping(on_mesh(checked(config, check_finite), mesh))
        one = mesh.ranks == 1
        found.append(
            [tensors_of_fused(alone(), on)]
            if one
            else on_processes(mesh.ranks, tensors_of_fused, on, domain=mesh.domain)
        )
    for (wanted, read, numbers), (tensors, late, others) in zip(*found, strict=True):
        assert (read, late) == ([], [2, BAD, 4])
        assert others == numbers
        assert numbers["skipped"] == 1
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in tensors.items())


def test_a_late_check_restores_buffers_and_finds_exploding_gradients(config):
    on = checked(config, "late", on_nonfinite="skip", exploding=5.0)
    trainer = built(on, alone()).trainer
    (part,) = trainer.state.parts
    part.register_buffer("samples_seen", torch.zeros(()))

    def skipped(size: float) -> bool:
        trainer.guard.save_buffers()
        part.samples_seen += 1
        decision = trainer.guard.decide(numbers(1.0, size), lambda: "", on_device=True)
        trainer.state.step += 1
        assert decision.loss is None
        return bool(decision.skip_on_device)

    assert not any(skipped(1.0) for _ in range(MIN_NORMS))  # the last of them is not read yet
    assert not skipped(4.9)
    assert skipped(6.0)
    assert skipped(NAN)
    assert part.samples_seen == MIN_NORMS + 1
    assert trainer.guard.metrics() == {"skipped": 1}  # the NaN is not read yet
    trainer.guard.config = replace(on.trainer, on_nonfinite="stop")
    with pytest.raises(
        UserError, match=rf"but is 1\.0 with gradient norm nan at step {MIN_NORMS + 3}"
    ):
        trainer.guard.decide(numbers(1.0, 1.0), lambda: "")
    assert trainer.state.step == MIN_NORMS + 2


def test_a_signal_stops_one_step_later_with_every_check_read(config):
    training = built(checked(config, "late"), alone())
    trainer = training.trainer
    signals = {2: signal.SIGUSR1}  # by the number of steps before

    def pending() -> int:
        return signals.get(trainer.state.step, 0)

    with training.loader:
        records = list(step_records(training, pending_signal=pending))[:4]
    assert [record.stop_signal for record in records] == [0, 0, 0, signal.SIGUSR1]
    assert trainer.guard.unread is None


NOT_EXACT: list[tuple[dict[str, Any], str]] = [
    ({"parallel": ParallelConfig(data_mode="fsdp2", cpu_offload=True)}, "cpu_offload=false"),
    ({"optimizer": OwnOptimizerConfig(name="mine")}, "optimizer=adamw, .* got mine"),
    ({"optimizer": MuonConfig()}, "optimizer=adamw, .* got muon"),
]


def test_a_late_check_is_refused_where_it_is_not_exact(config):
    late = checked(config, "late")
    assert_refused(
        (partial(replace, late, **changes), rf"^trainer\.check_finite: late needs .*{wanted}")
        for changes, wanted in NOT_EXACT
    )
    complex_weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"needs real parameters, but w is torch\.complex64"):
        build_optimizer({"w": complex_weight}, config.optimizer, skips_on_device=True)
