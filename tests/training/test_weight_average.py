"""The moving average of weights: its formula, in forecasts, in checkpoints and in exports."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import credit_dp
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.optim import WeightAverage
from credit_dp.training.run_folder import resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.tier_cases import tiers
from tests.training.meshes import (
    HALF_WAY,
    ONE,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    full_arrays,
    record_trajectory,
    run_on_mesh,
    with_ema,
)
from tests.training.runs import alone, built, make_config, make_store, step_records


def test_the_average_is_that_of_the_formula():
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    average = WeightAverage({"w": weight}, 0.3)
    wanted = weight.detach().clone()
    for update in range(6):
        weight.data += torch.tensor([1.0, -0.5])
        decay = min(0.3, (1 + update) / (10 + update))
        wanted = decay * wanted + (1 - decay) * weight.detach()
        average.update()
        assert average.averages["w"] == pytest.approx(wanted, rel=1e-14)
    assert decay == 0.3  # the ramp has been left
    assert average.updates == 6
    frozen = WeightAverage({}, 0.5)  # of a stage
    frozen.update()
    assert frozen.updates == 1


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_an_update_is_one_operation_however_many_parameters_there_are():
    weights = {str(number): nn.Parameter(torch.ones(number)) for number in range(20)}
    average = WeightAverage(weights, 0.5)
    with Counting() as operations:
        average.update()
    assert operations.count == 1


def test_the_average_replaces_the_weights_and_restores_them():
    weight = nn.Parameter(torch.ones(3))
    average = WeightAverage({"w": weight}, 0.5)
    weight.data.zero_()
    with pytest.raises(RuntimeError, match=r"^\[1.0, 1.0, 1.0\]$"), average.swapped_in():
        raise RuntimeError(weight.tolist())
    assert weight.tolist() == [0, 0, 0]
    assert average.averages["w"].tolist() == [1, 1, 1]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    config = make_config(store, tmp_path_factory.mktemp("run"), steps=4)
    return with_ema(config, 0.8)


def of_forecasts(manager: DomainParallelManager, config, path: Path | None = None) -> Trajectory:
    """Return the averages at the end, which forecasts use; `path` is a checkpoint to resume."""
    training = built(config, manager)
    state = training.trainer.state
    if path is not None:
        load_checkpoint(path, state)
    numbers, weights = record_trajectory(training)
    predicted_with(training)  # FSDP2 keeps what it has gathered for this
    with state.eval_mode():
        assert not any(part.training for part in state.parts)
        averages = full_arrays(state.trainable_parameters)
        predicted_with(training)
        used = full_arrays(state.trainable_parameters)
        assert all(np.array_equal(used[name], averages[name]) for name in averages)
    assert all(part.training for part in state.parts)
    again = full_arrays(state.parameters)
    assert all(np.array_equal(again[name], weights[name]) for name in weights)
    return numbers, averages


def predicted_with(training):
    """Run the model once without backward."""
    state = training.trainer.state
    inputs = state.parameters["stem.conv.weight"].shape[1]
    rows = training.rows
    x = torch.ones(2, inputs, rows.stop - rows.start, 16, dtype=training.like.dtype)
    with torch.no_grad():
        training.forecast_step.model(x)


@pytest.fixture(scope="module")
def wanted(config):
    return run_on_mesh(ONE, of_forecasts, config)


def saved(manager: DomainParallelManager, config, path: Path) -> Trajectory:
    """Train to half way, save, train on; return the averages at the end."""
    training = built(config, manager)
    state = training.trainer.state
    numbers = []
    with training.loader:
        for record in step_records(training):
            numbers.append((record.loss, record.grad_norm))
            if record.step == HALF_WAY:
                save_checkpoint(path, state, "")
    with state.eval_mode():
        return numbers, full_arrays(state.trainable_parameters)


@pytest.mark.slow
def test_forecasts_are_made_with_averages(config, wanted):
    numbers, averages = wanted
    plain, weights = run_on_mesh(ONE, plainly, config)
    assert plain == numbers
    assert all(not np.array_equal(averages[name], weights[name]) for name in weights)


def plainly(manager: DomainParallelManager, config) -> Trajectory:
    return record_trajectory(built(with_ema(config, None), manager))


@pytest.mark.parametrize("mesh", tiers([], [(Mesh(1, 2, 1, "fsdp2"),)], [(Mesh(1, 1, 2),)]))
def test_averages_are_those_of_one_process(config, wanted, mesh, tmp_path):
    assert_same_trajectory(run_on_mesh(mesh, of_forecasts, config), wanted)
    assert_same_trajectory(run_on_mesh(mesh, saved, config, tmp_path), wanted)
    numbers, averages = run_on_mesh(ONE, of_forecasts, config, tmp_path)
    assert_same_trajectory((numbers, averages), (wanted[0][HALF_WAY:], wanted[1]))


@pytest.mark.exhaustive
def test_averages_of_offloaded_shares_are_the_same(config, wanted):
    assert_same_trajectory(run_on_mesh(Mesh(1, 2, 1, "fsdp2"), offloaded, config), wanted)


def offloaded(manager: DomainParallelManager, config) -> Trajectory:
    parallel = replace(config.parallel, cpu_offload=True)
    return of_forecasts(manager, replace(config, parallel=parallel))


@pytest.mark.exhaustive
def test_a_resumed_average_is_the_same_bit_for_bit(config, wanted, tmp_path):
    saved(alone(), config, tmp_path)
    numbers, averages = of_forecasts(alone(), config, tmp_path)
    assert numbers == wanted[0][HALF_WAY:]
    assert all(np.array_equal(averages[name], value) for name, value in wanted[1].items())


@pytest.mark.slow
def test_a_checkpoint_without_averages_starts_them_from_its_weights(config, tmp_path):
    saved_plainly = with_ema(config, None)
    training = built(saved_plainly, alone())
    record_trajectory(training)
    save_checkpoint(tmp_path, training.trainer.state, "")
    again = built(config, alone())
    load_checkpoint(tmp_path, again.trainer.state)
    average = again.trainer.state.average
    assert average is not None
    assert average.updates == 0
    trained = training.trainer.state.trainable_parameters
    assert all(torch.equal(average.averages[name], p) for name, p in trained.items())


@pytest.mark.slow
def test_averages_of_a_checkpoint_are_left_out_without_ema(config, tmp_path):
    saved(alone(), config, tmp_path)
    training = built(with_ema(config, None), alone())
    load_checkpoint(tmp_path, training.trainer.state)
    assert not [name for name in training.trainer.state.tensors() if name.startswith("average.")]
    assert training.trainer.state.step == HALF_WAY


@pytest.mark.slow
def test_an_export_has_the_averages(config, tmp_path):
    training = built(config, alone())
    record_trajectory(training)
    state = training.trainer.state
    save_checkpoint(tmp_path / "checkpoint", state, resolved_yaml(config))
    model = credit_dp.load(str(tmp_path)).model
    assert state.average is not None
    loaded = dict(model.named_parameters())
    assert loaded.keys() == state.average.averages.keys()
    for name, average in state.average.averages.items():
        assert torch.equal(loaded[name], average)
        assert not torch.equal(loaded[name], state.parameters[name])
