"""Diagnostic variables come out of a model, are trained and scored, and never go in."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

import credit_dp
from credit_dp.cli.export import checkpoint
from credit_dp.config import Config, ModelConfig, StandardLossConfig
from credit_dp.data.channels import Channel
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training.build_training import Training
from credit_dp.training.data_description import check_data, describe_data
from credit_dp.training.forecast_step import ForecastStep
from credit_dp.training.loss import channel_weights
from credit_dp.training.run_folder import resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.training.masked_stores import COLUMNS, RAIN, ROWS, SEA, SOIL, sea, sea_config
from tests.training.runs import (
    alone,
    built,
    tiny_crossformer,
    tiny_pangu,
    tiny_swin,
    tiny_unet,
    train_on,
)

FIELDS = Fields(((0, 1, 2), (4, 5, 6)), (3,), others=2, frames=2, diagnostic=3)
MODELS: dict[str, ModelConfig] = {
    "unet": tiny_unet(frames=2),
    "pangu": tiny_pangu(patch=[2, 2, 2], frames=2),
    "crossformer": tiny_crossformer(frames=2),
    "swin": tiny_swin(frames=2),
}


def model_of(name: str, rows: int) -> torch.nn.Module:
    return build_model(MODELS[name], FIELDS, (rows, 16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(MODELS))
def test_sharded_equals_whole(name):
    case = (model_of, (name, 19), (1, FIELDS.inputs, 19, 16), MODEL)
    on_threads(2, assert_same_as_whole_globe, *case)


def test_pangu_makes_them_with_or_without_a_surface():
    for surface in ((), (2,)):
        fields = Fields(((0, 1),), surface, diagnostic=2)
        model = build_model(replace(MODELS["pangu"], frames=1), fields, (12, 12))
        x = torch.randn(1, fields.inputs, 12, 12)
        made = model(x)
        assert made.shape == (1, fields.inputs + 2, 12, 12)
        assert made[:, -2:].abs().sum(dim=(2, 3)).min() > 0
        # The states are those that this model would make without the others.
        head = model.recovery.surface[0]
        with torch.no_grad():
            head.weight[:, -2:] += 1
        changed = (model(x) - made).abs().amax(dim=(0, 2, 3))
        assert changed[:-2].max() == 0, surface
        assert changed[-2:].min() > 0, surface


def test_only_the_state_is_added_to_and_goes_in_again():
    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.flatten().tolist())
        return torch.tensor([1.0, 2.0, 5.0]).view(1, 3, 1, 1)

    seen: list[list[float]] = []
    step = ForecastStep(model, torch.tensor([1.0, 10.0]).view(2, 1, 1))
    forcings = [torch.full((1, 1, 1, 1), 8.0 + lead) for lead in (0, 1)]
    start = torch.tensor([-1.0, -2.0, 0.0, 0.0]).view(1, 4, 1, 1)  # two states
    first, second = step.rollout(start, forcings, torch.zeros(1, 0, 1, 1))
    assert first.flatten().tolist() == [1, 20, 5]
    assert second.flatten().tolist() == [2, 40, 5]
    assert seen == [[-1, -2, 0, 0, 8], [0, 0, 1, 20, 9]]


def test_diagnostic_variables_have_weights_of_level_and_variable():
    channels = (Channel("temperature", 500), Channel("cloud", 1000), Channel(RAIN))
    config = StandardLossConfig(level_weight=True, variable_weight={RAIN: 2.0, "cloud": 3.0})
    found = channel_weights(config, channels)
    assert found == pytest.approx([500 / 750, 3 * 1000 / 750, 2])
    with pytest.raises(UserError, match=r"data\.prognostic or data\.diagnostic, got 'rane'"):
        channel_weights(StandardLossConfig(variable_weight={"rane": 1.0}), channels)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = sea_config(tmp_path_factory.mktemp("sea"), tiny_unet(frames=2), steps=2)
    prepare_training_data(config.data)
    return config


@pytest.mark.slow
def test_a_diagnostic_is_the_models_output_and_weighs_in_its_own_spread(config):
    training = built(config, alone())
    loss = training.trainer.forward_backward.loss
    channels = prepare_training_data(config.data).store.channels
    assert loss.scale[channels.num_states :].flatten().tolist() == [1, 1]
    assert (loss.scale[: channels.num_states] != 1).all()
    with training.loader:
        batch = next(training.loader)
    assert batch.state.shape[1] == 2 * channels.num_states
    assert batch.target.shape[1] == channels.num_outputs
    with torch.no_grad():
        made = training.forecast_step(batch.state, batch.forcing, batch.static)
        output = training.forecast_step.model(
            torch.cat([batch.state, batch.forcing, batch.static], 1)
        )
    assert torch.equal(made[:, channels.num_states :], output[:, channels.num_states :])
    assert not torch.equal(made[:, : channels.num_states], output[:, : channels.num_states])


def test_what_is_described_is_checked_on_resuming(config):
    prepared = prepare_training_data(config.data)
    own = describe_data(prepared, config.model)
    assert own["data.diagnostic"] == [RAIN, SOIL]
    assert own["data.variables"] == {
        RAIN: {"normalise": "log1p(1e-4)"},
        SEA: {"fill": "mean"},
        SOIL: {"fill": 0.0},
    }
    assert own["fields"]["variables"][RAIN] == {"normalise": "log1p(1e-4)", "nonnegative": True}
    check_data(own, own)
    plain = {**own, "data.diagnostic": [], "data.variables": {}}
    with pytest.raises(UserError, match=r"data\.diagnostic=\[\], the config has \[rain,volum"):
        check_data(plain, own)
    with pytest.raises(UserError, match=r"data\.variables=\{\}, the config has \{rain:\{norm"):
        check_data({**plain, "data.diagnostic": own["data.diagnostic"]}, own)


@pytest.fixture(scope="module")
def exported(config, tmp_path_factory):
    """A run's config and training, and its model in a file."""
    folder = tmp_path_factory.mktemp("exported")
    config = replace(config, run=replace(config.run, dir=str(folder / "run")))
    training = built(config, alone())
    train_on(training)
    training.trainer.state.train(False)
    save_checkpoint(folder / "run" / "checkpoint", training.trainer.state, resolved_yaml(config))
    file = folder / "model.safetensors"
    checkpoint(["export", str(folder / "run"), "--output", str(file)], "credit-dp")
    return config, training, file


def forecast(config: Config, training: Training) -> tuple[tuple[object, ...], torch.Tensor]:
    """Return a model's input in the store's units, and its forecast in training."""
    prepared = prepare_training_data(config.data)
    store = prepared.store
    dates = HeldOutData(config, prepared, slice(None), training.like)
    times = dates.initial_times[:2]
    with torch.no_grad():
        made = training.forecast_step(
            dates.initial_states(times), dates.forcing(times), dates.static(2)
        )
    moments = (times[:, None] + np.array([-6, 0], "timedelta64[h]")).ravel()
    states = torch.from_numpy(store.read_states(moments, slice(None))).reshape(2, -1, ROWS, COLUMNS)
    forcing = torch.from_numpy(store.read_forcing(times, slice(None)))
    solar = forcing[:, [store.channels.forcing.index("solar")]]
    return (states, times, solar), dates.denormalise(made)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", pytest.param("run", marks=pytest.mark.exhaustive)])
def test_a_file_gives_them_as_training_does(exported, source):
    config, training, file = exported
    model = credit_dp.load(str(file if source == "file" else config.run.dir))
    given, wanted = forecast(config, training)
    assert (len(model.variables), model.states) == (6, 4)
    assert model.variables[-2:] == (RAIN, SOIL)
    with torch.no_grad():
        found = model(*given)
    assert found.shape == wanted.shape == (2, 6, ROWS, COLUMNS)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))
    assert np.array_equal(found[0, -1].isnan().numpy(), sea())
    # Input values on land do not matter, and the model can run again.
    states = given[0].nan_to_num(1e6)
    with torch.no_grad():
        assert torch.equal(model(states, *given[1:]).nan_to_num(-1), found.nan_to_num(-1))
    states.requires_grad_()
    model(states, *given[1:]).nan_to_num(0).sum().backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()
    assert not states.grad[:, 3][:, ~torch.from_numpy(sea())].any()


def test_the_file_and_its_card_say_which_come_out_only(exported):
    _, _, file = exported
    with safe_open(str(file), framework="pt") as opened:
        texts = opened.metadata()
        assert opened.get_tensor("credit_dp.valid").shape == (6, ROWS, COLUMNS)
    assert texts["diagnostic"] == "2"
    assert RAIN in texts["outputs"]
    assert RAIN not in texts["inputs"]
    card = file.with_suffix(".md").read_text()
    assert f"| 4 | {RAIN} (output only) |" in card
    assert f"| 3 | {SEA} |" in card
    assert f"torch.zeros(1, 8, {ROWS}, {COLUMNS})" in card
