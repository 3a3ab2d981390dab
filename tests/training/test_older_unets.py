"""U-Nets of checkpoints older than `model.upsample` keep their transposed convolutions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import credit_dp
from credit_dp.cli.compose import Composer
from credit_dp.cli.export import checkpoint
from credit_dp.cli.forecast import forecast_config
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.saved_config import overrides_of_run
from credit_dp.config import Config
from credit_dp.config.model import UNET_UPSAMPLING
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from credit_dp.forecast.make_forecasts import make_forecasts
from credit_dp.training.build_training import Training
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.checkpoint_files import METADATA_FILE
from credit_dp.training.console import Screen
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from credit_dp.training.transfer import load_initial_weights
from tests.forecast.runs import INIT, leave_checkpoint
from tests.training.runs import alone, built, make_config, make_store, tiny_unet


def without_the_key(config: Path) -> str:
    """Remove the key from a saved config, as older versions wrote it."""
    lines = config.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("  upsample:")]
    assert len(kept) == len(lines) - 1
    return "\n".join(kept)


@pytest.fixture(scope="module")
def older(tmp_path_factory) -> tuple[Config, Training, Path]:
    """A run's config, its training, and its checkpoint without the key."""
    folder = tmp_path_factory.mktemp("older")
    model = tiny_unet(upsample="transpose")
    config = make_config(make_store(folder, 17), folder / "run", model, steps=2)
    training = leave_checkpoint(config)
    training.trainer.state.train(False)
    run = RunFolder(folder / "run")
    run.config.write_text(resolved_yaml(config))
    run.config.write_text(without_the_key(run.config))
    (path,) = run.checkpoints.iterdir()
    state = path / METADATA_FILE
    numbers = json.loads(state.read_text())
    assert numbers["data"]["model"]["keys"].pop("upsample") == "transpose"
    numbers["config"] = run.config.read_text()
    del numbers["checksum"]  # which older checkpoints lack, too
    state.write_text(json.dumps(numbers))
    return config, training, path


def state_with(older: tuple[Config, Training, Path], upsample: str) -> tuple[Training, Config]:
    """Return the state of a new run with this key."""
    config = replace(older[0], model=tiny_unet(upsample=upsample))
    return built(config, alone()), config


def same_weights(one: Training, other: Training) -> bool:
    pairs = [training.trainer.state.parameters for training in (one, other)]
    return all(torch.equal(weight, pairs[1][name]) for name, weight in pairs[0].items())


@pytest.mark.slow
def test_an_older_unet_resumes_only_with_its_own_upsampling(older):
    training, _ = state_with(older, "transpose")
    assert not same_weights(older[1], training)
    load_checkpoint(older[2], training.trainer.state)
    assert same_weights(older[1], training)
    for upsample in UNET_UPSAMPLING[1:]:
        training, _ = state_with(older, upsample)
        with pytest.raises(UserError) as error:
            load_checkpoint(older[2], training.trainer.state)
        assert str(error.value) == (
            "resume: the checkpoint was trained with model.upsample=transpose, the config has "
            f"{upsample}. Set model.upsample to that of the checkpoint, or start a new run."
        )


def test_its_weights_start_another_run_which_names_the_key(older):
    training, config = state_with(older, "transpose")
    prepared = prepare_training_data(config.data)
    summary = load_initial_weights(str(older[2]), training.trainer.state, config.model, prepared)
    assert same_weights(older[1], training)
    assert "newly initialised" not in summary
    training, config = state_with(older, "bilinear")
    summary = load_initial_weights(str(older[2]), training.trainer.state, config.model, prepared)
    assert "2 newly initialised (up.0.0.bias, up.0.0.weight)" in summary
    assert summary.endswith("; the checkpoint has model.upsample=transpose")


@pytest.mark.parametrize("source", ["run", "file", "older file"])
def test_loading_and_exporting_give_the_same_model(older, tmp_path, source):
    _, training, path = older
    place = path
    if source != "run":
        place = tmp_path / "m.safetensors"
        checkpoint(["export", str(path), "--output", str(place)], "credit-dp checkpoint")
    if source == "older file":
        with safe_open(str(place), framework="pt") as opened:
            texts = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        keys = json.loads(texts["keys"])
        assert "upsample" not in keys
        save_file(tensors, place, texts)
    (whole,) = training.trainer.state.parts
    x = torch.randn(1, whole.stem.conv.in_channels, 17, 16, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(credit_dp.load(place).model(x), whole(x))


@pytest.mark.slow
def test_an_older_unet_makes_forecasts(older, tmp_path):
    path = older[2]
    out = tmp_path / "forecast.zarr"
    words = [f"checkpoint={path}", f"init={INIT}", "lead=6h", f"out={out}", "device=cpu"]
    settings = forecast_config(words, "credit-dp forecast")
    assert settings.model.upsample == "transpose"
    make_forecasts(settings, alone(), torch.device("cpu"), Screen(None))
    assert out.is_dir()
    other = [*words[:-2], f"out={tmp_path / 'other.zarr'}", "device=cpu", "model.upsample=bilinear"]
    changed = forecast_config(other, "credit-dp forecast")
    with pytest.raises(UserError, match=r"trained with model\.upsample=transpose, the config has"):
        make_forecasts(changed, alone(), torch.device("cpu"), Screen(None))


@pytest.mark.slow
def test_the_run_is_done_again_with_it(older):
    composer = Composer("train")
    overrides = overrides_of_run(older[0].run.dir, [], composer)
    made = composer.compose_config(
        [str(override.input_line) for override in parse_overrides(overrides)]
    )
    assert made.model == older[0].model
    assert 'model.upsample="transpose"' in overrides
