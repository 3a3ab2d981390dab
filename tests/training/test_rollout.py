"""Training through all steps of a rollout, on every mesh as on one process."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.config import Config, ParallelConfig
from credit_dp.data.grid import row_weights
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import TrainingData, prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.forward_backward import ActivationCheckpointWrapper
from credit_dp.training.loss import channel_weights
from tests.data import stores
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.masked_stores import sea_config
from tests.training.meshes import (
    ONE,
    Mesh,
    assert_same_gradients,
    first_gradients,
    on_mesh,
    run_on_mesh,
    train_from_start,
)
from tests.training.refusals import refusal
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    step_records,
    tiny_crossformer,
    tiny_unet,
)

ROWS = 13  # no multiple of 2 or 3
RIM = 5  # of three bands, the first and the last have no other rows
SCHEDULE = {0: 1, 2: 2, 4: 3}
STEP = np.timedelta64(6, "h")

Found = tuple[float, dict[str, float], dict[str, torch.Tensor]]  # loss, its parts, gradients


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), ROWS)


@pytest.fixture(scope="module")
def seas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sea")
    sea_config(folder)
    return folder


def box(folder: Path) -> Path:
    """A store of a region of as many rows."""
    path = folder / "box.zarr"
    if not path.exists():
        data = stores.dataset(ROWS, 16, 20)
        latitude, longitude = np.linspace(66, 30, ROWS), 350 + np.arange(16) * 2.0
        stores.write(data.assign_coords(latitude=latitude, longitude=longitude % 360), path)
    return path


def three_steps(store, seas, kind: str, **changes: Any) -> Config:
    """A run whose rollouts have three steps, on a store without gaps, with seas or of a region."""
    model = tiny_unet(frames=1 if kind == "plain" else 2)
    if kind == "sea":
        config = sea_config(seas, model)
    elif kind == "rim":
        config = make_config(box(store.parent), store.parent / "run", model)
        config = replace(config, data=replace(config.data, boundary=RIM, relaxation=1))
    else:
        config = make_config(store, store.parent / "run", model)
    return replace(config, trainer=replace(config.trainer, rollout={0: 3}, **changes))


def one_pass(manager: DomainParallelManager, config: Config) -> Found:
    """The first batch's loss and gradients, on the whole globe."""
    training = built(config, manager)
    loss, gradients = first_gradients(training)
    return loss, training.trainer.loss_by_field(), gradients


def by_hand(config: Config) -> Found:
    """Compute the same by definition: the store's fields, one step after the other."""
    training = built(config, alone())
    ready: TrainingData = prepare_training_data(config.data)
    store, normaliser = ready.store, Normaliser.of(ready, torch.float64)
    with training.loader:
        times = next(training.loader).times
    rows = slice(None)

    def at(read: Any, places: Any) -> torch.Tensor:
        return torch.stack([torch.from_numpy(read(time, rows)).double() for time in places])

    def fields(places: Any) -> torch.Tensor:
        return normaliser.normalise_outputs(store.read_outputs(places, rows))

    states = store.channels.num_states
    frames = config.model.frames
    now = [fields(times - back * STEP)[:, :states] for back in range(frames - 1, -1, -1)]
    static = normaliser.normalise_static(store.read_static(rows))[None].expand(
        len(times), -1, -1, -1
    )
    masks = store.valid_mask(rows)
    valid = torch.ones((), dtype=torch.bool) if masks is None else torch.from_numpy(masks)
    rim, given = torch.zeros((), dtype=torch.bool), torch.zeros((), dtype=torch.float64)
    if config.data.boundary:
        rim = torch.ones(store.grid, dtype=torch.bool)
        rim[RIM:-RIM, RIM:-RIM] = False
        given = rim.double()
        given[RIM:-RIM, RIM:-RIM] = 1 - np.tanh(0.5)  # one row or column beside the rim
        given[RIM + 1 : -RIM - 1, RIM + 1 : -RIM - 1] = 0
    scale = torch.ones(store.channels.num_outputs, 1, 1, dtype=torch.float64)
    scale[:states] = normaliser.tendency_scale[:states]
    # Rows of a region in equal steps have areas in proportion to the cosine.
    cosine = np.cos(np.deg2rad(store.latitude))
    area = row_weights(store.latitude) if store.grid.is_global else cosine
    area = torch.from_numpy(area)[:, None] * (valid & ~rim)
    weight = torch.from_numpy(channel_weights(config.loss, store.channels.output_channels))
    weight = weight / weight.sum()
    model = training.trainer.state.parts[0]
    total = torch.zeros((), dtype=torch.float64)
    for step in range(3):
        forcing = normaliser.normalise_forcing(store.read_forcing(times + step * STEP, rows))
        made = model(torch.cat([*now, forcing, static], dim=1))
        made = torch.cat([now[-1] + made[:, :states] * scale[:states], made[:, states:]], dim=1)
        truth = fields(times + (step + 1) * STEP)
        made = given * truth + (1 - given) * made
        error = (made - truth) / scale
        square = torch.where(valid & ~rim, error.square(), 0) * area
        points = (area * torch.ones_like(made[:1])).sum((0, 2, 3))
        total = total + (square.sum((0, 2, 3)) / points / len(times) * weight).sum() / 3
        if masks is not None:
            made = torch.where(valid, made, normaliser.fills)
        now = [*now[1:], made[:, :states]]
    total.backward()
    named = training.trainer.state.parameters
    return total.item(), {}, {name: p.grad for name, p in named.items() if p.grad is not None}


@pytest.mark.parametrize("kind", tiers([("sea",)], [("rim",)], [("plain",), ("frames",)]))
def test_the_gradient_is_that_of_the_definition(store, seas, kind):
    config = three_steps(store, seas, kind)
    wanted = by_hand(config)
    assert_same_gradients(one_pass(alone(), config)[::2], wanted[::2])
    parts = replace_trainer(config, accumulate=2)
    assert_same_gradients(one_pass(alone(), parts)[::2], wanted[::2])


def replace_trainer(config: Config, **changes: Any) -> Config:
    return replace(config, trainer=replace(config.trainer, **changes))


@pytest.mark.slow
def test_the_parts_of_the_loss_add_up_to_it(store, seas):
    config = three_steps(store, seas, "sea")
    loss, parts, _ = one_pass(alone(), config)
    leads = [parts.pop(f"loss/+{hours}h") for hours in (6, 12, 18)]
    out = prepare_training_data(config.data).store.channels.output_channels
    assert set(parts) == {f"loss/{channel.variable}" for channel in out}
    assert sum(parts.values()) == pytest.approx(loss, rel=1e-12)
    assert np.mean(leads) == pytest.approx(loss, rel=1e-12)
    assert len(set(leads)) == 3


@pytest.mark.slow
def test_a_pipeline_tells_of_the_parts_too(store):
    config = make_config(store, store.parent / "run", tiny_unet())
    _, wanted, _ = one_pass(alone(), config)
    assert not any(name.startswith("loss/+") for name in wanted)
    mesh = on_mesh(config, Mesh(2, 1, 1))
    for found in on_processes(2, parts_only, mesh, domain=1, pipeline=2):
        assert found == pytest.approx(wanted, rel=1e-10)


def parts_only(manager: DomainParallelManager, config: Config) -> dict[str, float]:
    return one_pass(manager, config)[1]


@pytest.mark.slow
def test_what_is_computed_again_is_the_same_bit_by_bit(store):
    model = tiny_unet(stochastic_depth=0.4, activation_checkpointing=True)
    config = make_config(store, store.parent / "run", model, steps=3, rollout={0: 1, 2: 2})
    numbers, weights = run_on_mesh(ONE, train_from_start, config, None)
    again = replace_trainer(config, checkpoint_activations=True)
    found = run_on_mesh(ONE, train_from_start, again, None)
    assert found[0] == numbers
    assert all(np.array_equal(found[1][name], weight) for name, weight in weights.items())


def forwards(store, seas, again: bool) -> tuple[int, int]:
    """Return the calls of the model in one pass, and the elements saved for backward."""
    training = built(three_steps(store, seas, "plain", checkpoint_activations=again), alone())
    gradients, calls, kept = training.trainer.forward_backward, [], set()
    handle = training.trainer.state.parts[0].register_forward_hook(lambda *made: calls.append(1))

    def keep(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept.add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        return x

    with training.loader:
        batch = next(training.loader)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        losses = gradients._compute_losses(batch, 0, lambda part, micro, step: None)
    losses.sum().backward()
    handle.remove()
    return len(calls), sum(size for _, size in kept)


@pytest.mark.slow
def test_each_step_is_computed_again_in_backward(store, seas):
    calls, kept = forwards(store, seas, again=False)
    calls_again, kept_again = forwards(store, seas, again=True)
    assert (calls, calls_again) == (3, 6)
    assert kept_again < kept / 3


@pytest.mark.parametrize(
    ("unit", "wanted"),
    tiers([], [("epoch", [1, 1, 2, 2, 2, 2])], [("step", [1, 2, 2, 2, 2, 2])]),
)
def test_lengths_follow_steps_or_epochs(store, tmp_path, unit, wanted):
    config = make_config(
        store, tmp_path, rollout={0: 1, 1: 2}, rollout_unit=unit, steps=6, log_every=1
    )
    training = built(config, alone())
    found = []
    with training.loader:
        for record in step_records(training):
            leads = [name for name in record.extra if name.startswith("loss/+")]
            found.append(max(1, len(leads)))
            assert len(training.trainer.forward_backward.channel_losses) == found[-1]
    # Of 10 samples that have two steps after them, an epoch takes two batches of four.
    assert found == wanted


def test_long_rollouts_and_what_cannot_be_computed_again_are_refused(store, tmp_path):
    longer = refusal(built, make_config(store, tmp_path, rollout={0: 1, 400: 12}), alone())
    assert re.search(r"13 dates of data\.dates\.train.*trainer\.rollout", longer)
    assert "model.frames" not in longer
    model = tiny_crossformer(spectral_norm=True)  # a forward changes it
    changing = make_config(store, tmp_path, model, checkpoint_activations=True)
    words = r"checkpoint_activations: .*changes .*_u,"
    assert re.search(words, refusal(one_pass, alone(), changing))
    again = make_config(store, tmp_path, checkpoint_activations=True)
    words = r"^trainer\.checkpoint_activations: .*pipeline=1, got 2"
    assert re.search(words, refusal(replace, again, parallel=ParallelConfig(pipeline=2)))


def test_forecasts_keep_nothing_to_compute_again():
    model = ActivationCheckpointWrapper(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert not model(x).requires_grad
    model.model.eval()
    assert "Checkpoint" not in str(model(x).grad_fn)
