"""A trained model is exported to one file, and loads as the same model without data or ranks."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import credit_dp
from credit_dp.cli.export import checkpoint
from credit_dp.config import (
    Config,
    DatesConfig,
    ModelConfig,
    OwnModelConfig,
    StandardLossConfig,
    VariableConfig,
)
from credit_dp.data.sampling import frame_offsets
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData
from credit_dp.export.file import (
    ModelMetadata,
    read_safetensors,
    usage_text,
    write_safetensors,
)
from credit_dp.export.forecaster import build_forecaster, build_model_config
from credit_dp.export.hub import fetch_model
from credit_dp.models.blocks import NoiseModulation
from credit_dp.models.unet import PeriodicConv2d
from credit_dp.plugins import PLUGINS_VARIABLE, find_plugins
from credit_dp.training.build_training import Training
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.cli.invocation import answer
from tests.data import region_stores
from tests.full_disk import full_disk
from tests.ranks import TIMEOUT
from tests.tier_cases import tiers
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    tiny_pangu,
    tiny_swin,
    tiny_unet,
    train_on,
)

SOLAR = "solar"  # a forcing that the store has to give
COMPLEX = (torch.complex64, torch.complex128)


def trained(config: Config) -> Training:
    """Train a little, and leave a checkpoint."""
    training = built(config, alone())
    train_on(training)
    folder = RunFolder(Path(config.run.dir)).checkpoints
    save_checkpoint(folder, training.trainer.state, resolved_yaml(config))
    training.trainer.state.train(False)
    return training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, its config and what it trained."""
    folder = tmp_path_factory.mktemp("exported")
    config = make_config(make_store(folder, 12), folder / "run", steps=2)
    return folder / "run", config, trained(config)


def exported(folder: Path, *words: str) -> Path:
    """The file that the command writes."""
    assert checkpoint(["export", str(folder), *words], "credit-dp checkpoint") == 0
    return Path(words[-1]) if words else folder / "model.safetensors"


@pytest.fixture(scope="module")
def file(run):
    return exported(run[0])


def forecast(config: Config, training: Training, count: int) -> tuple[list[object], torch.Tensor]:
    """Return a model's input in physical units, and the forecast that training computes from it."""
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, slice(None), training.like)
    times = dates.initial_times[:count]
    with torch.no_grad():
        wanted = training.forecast_step(
            dates.initial_states(times), dates.forcing(times), dates.static(count)
        )
    moments = (times[:, None] + frame_offsets(config.model.frames, config.data.step_hours)).ravel()
    fields = torch.from_numpy(prepared.store.read_states(moments, slice(None)))
    forcing = torch.from_numpy(prepared.store.read_forcing(times, slice(None)))
    place = prepared.store.channels.forcing.index(SOLAR)
    given = [fields.reshape(count, -1, *fields.shape[2:]), times, forcing[:, [place]]]
    return given, dates.normaliser.denormalise(wanted)


@pytest.mark.slow
def test_a_model_of_a_region_loads_as_one(file):
    """Whether it is one follows from the coordinates, which the file has."""
    trained_model = read_safetensors(file)
    metadata = trained_model.metadata
    for longitude, mode in (
        (metadata.longitude, "circular"),
        ([degrees / 4 for degrees in metadata.longitude], "replicate"),
    ):
        region = replace(trained_model, metadata=replace(metadata, longitude=longitude))
        model = build_forecaster("", region, build_model_config("", region.metadata))
        layers = [layer for layer in model.modules() if isinstance(layer, PeriodicConv2d)]
        assert {layer.column_mode for layer in layers} == {mode}


@pytest.fixture(scope="module")
def region(tmp_path_factory):
    """A run on a projection whose rim of two rows and columns is given, with a relaxation zone."""
    folder = tmp_path_factory.mktemp("region")
    config = make_config(region_stores.write("lambert", folder), folder / "run", steps=2)
    dates = DatesConfig(
        train=["2019-12-28", "2019-12-30"],
        valid=["2019-12-31", "2020-01-01T06"],
        test=["2020-01-01T12", "2020-01-02T18"],
    )
    fields = {
        "prognostic": ["mean_sea_level_pressure", "2m_temperature"],
        "forcing": ["insolation"],
        "static": ["land_sea_mask"],
    }
    data = replace(config.data, **fields, dates=dates, boundary=2, relaxation=1)
    config = replace(config, data=data)
    return folder / "run", config, trained(config)


@pytest.mark.slow
def test_a_model_of_a_projection_is_given_its_rim(region):
    folder, config, training = region
    store = prepare_training_data(config.data).store
    dates = HeldOutData(config, prepare_training_data(config.data), slice(None), training.like)
    times = dates.initial_times[:2]
    hours = [times + step * dates.step for step in range(3)]
    truth = {time[0]: torch.from_numpy(store.read_states(time, slice(None))) for time in hours}
    given = [dates.normaliser.normalise_outputs(store.read_states(x, slice(None))) for x in hours]
    with torch.no_grad():
        forcings = [dates.forcing(time) for time in hours[:2]]
        steps = training.forecast_step.rollout(given[0], forcings, dates.static(2), given=given[1:])
        wanted = [dates.normaliser.denormalise(fields) for fields in steps]
    start = truth[times[0]]
    for source in (exported(folder), folder):
        model = credit_dp.load(source)
        assert np.array_equal(model.latitude, store.latitude)
        assert model.metadata.grid.to_json() == store.grid.to_json()
        assert (model.metadata.boundary, model.metadata.relaxation) == (2, 1)
        with torch.no_grad():
            found = list(model.rollout(start, times, 2, boundary=lambda time: truth[time[0]]))
            one = model(start, times, boundary=truth[times[0] + dates.step])
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        assert torch.equal(one, found[0])
        edges = truth[times[0] + dates.step].double()
        torch.testing.assert_close(one[..., :2, :], edges[..., :2, :], rtol=1e-12, atol=0)
        assert not torch.allclose(one[..., 2:-2, 2:-2], edges[..., 2:-2, 2:-2], rtol=1e-6, atol=0)
    with pytest.raises(UserError, match=r"was trained with data\.boundary=2, rows and columns"):
        model(start, times)
    with pytest.raises(UserError, match=r"boundary: needs 2 samples .* got 2 x 1 x 13 x 16"):
        model(start, times, boundary=start[:, :1])


def test_a_model_without_a_rim_is_given_none(run, file):
    (fields, times, solar), wanted = forecast(*run[1:], 2)
    with pytest.raises(UserError, match=r"predicts all points\. Leave boundary out"):
        credit_dp.load(file)(fields, times, solar, boundary=wanted)


def test_the_card_of_a_region_says_so_and_its_block_runs(region, tmp_path, monkeypatch):
    file = exported(region[0], "--output", str(tmp_path / "model.safetensors"))
    card = file.with_suffix(".md").read_text()
    assert "A regional weather model" in card
    assert "give the 2 rows and columns at each edge" in card
    (block,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path("block.py")["later"].shape == (1, 2, 13, 16)
    metadata = replace(read_safetensors(file).metadata, along_grid=[False, True])
    said = f"Winds are along its rows and columns: {metadata.outputs[1]}."
    assert said in usage_text(metadata, file)
    assert ModelMetadata.from_texts("a", metadata.to_texts()).along_grid == [False, True]


def content(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the metadata and the tensors of a file."""
    with safe_open(str(file), framework="pt") as opened:
        names = opened.keys()
        return opened.metadata(), {name: opened.get_tensor(name) for name in names}


def doctored(file: Path, place: Path, changes: dict[str, str]) -> Path:
    """Write a file again with other metadata and without checksums."""
    texts, tensors = content(file)
    del texts["checksums"]
    save_file(tensors, place, texts | changes)
    return place


def test_doctored_regions_are_one_line(region, tmp_path):
    file = exported(region[0], "--output", str(tmp_path / "model.safetensors"))
    projection = json.loads(read_safetensors(file).metadata.to_texts()["projection"])
    for key, value in (
        *(("shape", [13, 15]), ("shape", [13, 16, 1]), ("latitude", "<f8AAAA"), ("axes", 1)),
        *(("boundary", 7), ("boundary", -1), ("along_grid", [True])),
    ):
        changes = {key: json.dumps(value)}
        if key not in ("boundary", "along_grid"):
            changes = {"projection": json.dumps(projection | {key: value})}
        found = refusal(doctored(file, tmp_path / "other.safetensors", changes))
        assert "has metadata that can't be read" in found, (key, value)


@pytest.mark.parametrize(
    "source", tiers(fast=[("file",)], slow=[("run",)], exhaustive=[("checkpoint",)])
)
def test_the_loaded_model_is_the_trained_one(run, file, source):
    folder, config, training = run
    places = {"file": file, "run": folder, "checkpoint": folder / "checkpoint/step-00000002"}
    model = credit_dp.load(places[source])
    given, wanted = forecast(config, training, 3)
    with torch.no_grad():
        found = model(*given)
    assert not model.training
    assert torch.equal(found, wanted)


MODELS: dict[str, ModelConfig] = {
    "next state of several": tiny_unet(residual=False, frames=2, squeeze_excite=True, dropout=0.2),
    "pangu": tiny_pangu(),
    "swin": tiny_swin(),
}


@pytest.mark.parametrize(
    "name",
    tiers(
        fast=[],
        slow=[("next state of several",), ("pangu",)],
        exhaustive=[("swin",)],
    ),
)
def test_any_model_comes_back(tmp_path, name):
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", MODELS[name], steps=2)
    training = trained(config)
    model = credit_dp.load(exported(tmp_path / "run", "--output", str(tmp_path / "m.safetensors")))
    given, wanted = forecast(config, training, 2)
    with torch.no_grad():
        assert torch.equal(model(*given), wanted)


def test_complex_weights_come_back(file, tmp_path):
    path = tmp_path / "complex.safetensors"
    weights = {str(dtype): torch.randn(3, 2, dtype=dtype) for dtype in COMPLEX}
    write_safetensors(replace(read_safetensors(file), weights=weights), path)
    found = read_safetensors(path).weights
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_quantiles_go_with_the_model(tmp_path):
    names = ("temperature", SOLAR, "land_sea_mask")
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", steps=2)
    variables = {name: VariableConfig(normalise="quantile") for name in names}
    config = replace(config, data=replace(config.data, variables=variables))
    training = trained(config)
    given, wanted = forecast(config, training, 2)
    for source in (exported(tmp_path / "run"), tmp_path / "run"):
        model = credit_dp.load(source)
        assert np.isfinite(model.metadata.statistics_arrays.static_quantiles).any()
        with torch.no_grad():
            assert torch.equal(model(*given), wanted)


def test_the_loaded_model_describes_itself(run, file):
    _, config, _ = run
    model = credit_dp.load(file)
    store = prepare_training_data(config.data).store
    assert model.variables == tuple(channel.name for channel in store.channels.prognostic)
    assert len(model.units) == len(model.variables)
    assert np.array_equal(model.latitude, store.latitude)
    assert np.array_equal(model.longitude, store.longitude)
    assert model.step == np.timedelta64(6, "h")
    assert model.forcing == (SOLAR,)
    assert model.config == resolved_yaml(config)
    means = prepare_training_data(config.data).statistics.mean
    assert model.mean.shape == (len(means), 1, 1)
    assert np.allclose(model.mean.flatten(), means, rtol=1e-12)


def test_the_file_is_plain_and_says_it_all(run, file):
    _, config, training = run
    texts, tensors = content(file)
    static = tensors.pop("credit_dp.static")
    prepared = prepare_training_data(config.data)
    assert np.array_equal(static.numpy(), prepared.store.read_static(slice(None)))
    wanted = training.trainer.state.parts[0].state_dict()
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    outputs = [channel.name for channel in prepared.store.channels.prognostic]
    assert json.loads(texts["outputs"]) == outputs
    others = [*prepared.store.channels.forcing, *prepared.store.channels.static]
    assert json.loads(texts["inputs"]) == [*outputs, *others]
    assert json.loads(texts["statistics"])["mean"] == prepared.statistics.mean.tolist()
    assert json.loads(texts["step_hours"]) == 6
    assert set(json.loads(texts["units_of_outputs"])) == set(outputs)


def test_the_loaded_model_moves_and_has_gradients(run, file):
    _, config, training = run
    (fields, times, solar), _ = forecast(config, training, 1)
    before = torch.get_rng_state()
    model = credit_dp.load(file).float()
    assert torch.equal(torch.get_rng_state(), before)
    fields = fields.clone().requires_grad_()
    model(fields, times, solar).sum().backward()
    assert fields.grad is not None
    assert fields.grad.abs().sum() > 0
    with torch.no_grad():
        assert model(fields, times, solar).dtype == torch.float32
    assert credit_dp.load(file, device="meta").static.device.type == "meta"


@pytest.fixture(scope="module")
def raining(tmp_path_factory):
    """A run with a diagnostic variable, two frames, and no forcing from the store."""
    folder = tmp_path_factory.mktemp("raining")
    config = make_config(make_store(folder, 12), folder / "run", tiny_unet(frames=2), steps=1)
    lists = {"prognostic": ["geopotential", "2m_temperature"], "diagnostic": ["temperature"]}
    config = replace(config, data=replace(config.data, **lists, forcing=["insolation"]))
    trained(config)
    return folder / "run"


def test_a_rollout_feeds_back_what_goes_in_again(raining):
    model = credit_dp.load(raining)
    assert (len(model.variables), model.states, model.frames) == (7, 4, 2)
    fields = torch.randn(2, 8, 12, 16, dtype=torch.float64)
    times = np.array(["2000-01-02", "2000-01-02T06"], "M8[ns]")
    with torch.no_grad():
        one, two, three = model.rollout(fields, times, 3)
        states = torch.cat([fields[:, 4:], one[:, :4]], dim=1)
        assert torch.equal(two, model(states, times + model.step))
        states = torch.cat([one[:, :4], two[:, :4]], dim=1)
        assert torch.equal(three, model(states, times + 2 * model.step))


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """The folder of a run of an ensemble, its config and what it trained."""
    folder = tmp_path_factory.mktemp("members")
    config = make_config(make_store(folder, 12), folder / "run", steps=2)
    trainer = replace(config.trainer, members=2)
    model, loss = tiny_unet(noise=3), StandardLossConfig(name="crps")
    config = replace(config, trainer=trainer, model=model, loss=loss)
    training = trained(config)
    for layer in training.trainer.state.parts[0].modules():
        if isinstance(layer, NoiseModulation):
            layer.draws = None  # those of the last step of training
    return folder / "run", config, training


@pytest.mark.slow
def test_members_have_the_noise_of_forecasts(members, run, file):
    folder, config, training = members
    given, _ = forecast(config, training, 2)
    fields, times, _ = given
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, slice(None), training.like)
    place = prepared.store.channels.forcing.index(SOLAR)

    def solar(at: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(prepared.store.read_forcing(at, slice(None)))[:, [place]]

    rollout = replace(training.ensemble, members=(4, 1), seed=9).rollout
    with torch.no_grad():
        forcings = [dates.forcing(times), dates.forcing(times + dates.step)]
        steps = rollout(times, dates.initial_states(times), forcings, dates.static(2))
        wanted = [dates.normaliser.denormalise(x.flatten(0, 1)).view_as(x) for x in steps]
        model = credit_dp.load(exported(folder))
        quiet = model(*given)
        for index, member in enumerate((4, 1)):
            found = list(model.rollout(fields, times, 2, solar, member=member, seed=9))
            for one, both in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, both[:, index], rtol=1e-12, atol=0)
            assert not torch.equal(found[0], quiet)
        assert torch.equal(model(*given), quiet)
    with pytest.raises(UserError, match=r"^member: needs an integer of at least 0, got -1"):
        model(*given, member=-1)
    given, _ = forecast(run[1], run[2], 2)
    with pytest.raises(UserError, match=r"^member: this model has no noise, so that all members"):
        credit_dp.load(file)(*given, member=0)


def test_a_rollout_asks_for_its_forcings(run, file):
    _, config, training = run
    (fields, times, solar), wanted = forecast(config, training, 2)
    times_read = []

    def forcing(at: np.ndarray) -> torch.Tensor:
        times_read.append(at)
        return solar

    with torch.no_grad():
        first, _ = credit_dp.load(file).rollout(fields, times, 2, forcing)
    assert torch.equal(first, wanted)
    assert np.array_equal(times_read, [times, times + np.timedelta64(6, "h")])


def test_the_example_of_the_docs_runs_on_a_model_with_diagnostics(raining, tmp_path):
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    script = tmp_path / "forecast.py"
    script.write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["forecast.py"])
        found = runpy.run_path(str(script))["forecast"](str(raining), 4)
    assert found.shape == (4, 7)
    assert torch.isfinite(found).all()


def test_what_does_not_fit_is_one_line(run, file, raining):
    _, config, training = run
    (fields, times, solar), _ = forecast(config, training, 2)
    model, other = credit_dp.load(file), credit_dp.load(raining)
    states = torch.zeros(1, 8, 12, 16)
    out = torch.zeros(1, 11, 12, 16)
    cases = {
        "fields: needs 1 sample (one for each time) x 7 channels (the states) x 12 rows x 16 "
        "columns, got 2 x 7 x 12 x 16.": (model, fields, times[:1], solar),
        "got 2 x 7 x 11 x 16.": (model, fields[:, :, 1:], times, solar),
        "got 2 x 7 x 12 x 15.": (model, fields[..., 1:], times, solar),
        "got 7 x 12 x 16.": (model, fields[0], times[:1], solar[:1]),
        "got torch.int64; needs floating-point numbers.": (model, fields.long(), times, solar),
        "got ndarray, which is not a tensor.": (model, fields.numpy(), times, solar),
        "x 8 channels (2 x 4 states) x 12 rows x 16 columns, got 1 x 11 x 12 x 16. The last 3 "
        "output channels are no inputs": (other, out, times[:1], None),
        "got 1 x 7 x 12 x 16. The last 3 output channels": (other, out[:, :7], times[:1], None),
        "got 1 x 9 x 12 x 16.": (other, out[:, :9], times[:1], None),
        "forcing: this model needs solar as the third argument": (model, fields, times, None),
        "forcing: needs 2 samples (one for each time) x 1 channel (solar) x 12 rows x 16 columns, "
        "got 2 x 2 x 12 x 16.": (model, fields, times, torch.cat([solar, solar], dim=1)),
        "x 0 channels x 12 rows": (other, states, times[:1], solar[:1]),
        "times: need a date for each sample": (other, states, [0], None),
        "got ['soon']": (other, states, ["soon"], None),
        "got array([['2000": (other, states, np.array([["2000-01-01"]], "M8[D]"), None),
    }
    for needed, (function, *arguments) in cases.items():
        with pytest.raises(UserError) as error:
            function(*arguments)
        assert needed in str(error.value)
        assert "\n" not in str(error.value)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        credit_dp.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_model_is_one_line(tmp_path, file):
    assert "does not exist" in refusal(tmp_path / "none.safetensors")
    assert "holds no checkpoint" in refusal(tmp_path)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"something else")
    assert "is not a readable safetensors file" in refusal(other)
    other.write_bytes(file.read_bytes()[:-10])
    assert "is not a readable safetensors file" in refusal(other)
    save_file({"weight": torch.zeros(2)}, other)
    assert "is not a model that this program exported" in refusal(other)
    shutil.copy(file, tmp_path / "one.safetensors")
    assert "needs one exported model, got one.safetensors, other.s" in refusal(tmp_path)


def test_doctored_metadata_is_one_line(tmp_path, file):
    unreadable = "has metadata that can't be read"
    for key, text, part in (
        ("kind", "os.system", "needs the model 'os.system', but only unet, diffusion, pangu"),
        ("kind", "pangu", "its model has keys that are unknown or invalid"),
        ("statistics", "{}", unreadable),
        ("latitude", "3", unreadable),
        ("units", "[]", unreadable),
        ("keys", "[]", unreadable),
        ("keys", '{"name": "${oc.env:HOME}"}', "name needs a plain value"),
        ("frames", "2", "which is"),
        ("frames", "1000000000", "has far fewer weights"),
        ("frames", "-1", unreadable),
        ("frames", "true", unreadable),
        ("step_hours", "9" * 30, unreadable),
        ("channels", "[1, 2, 3, 4, 5, 6, 7]", unreadable),
        ("forcing", "[1, 2, 3]", unreadable),
        ("latitude", "[null]", unreadable),
        ("variables", '{"solar": {"normalise": "quantile"}}', unreadable),
        ("calendar", "lunar", unreadable),
        ("latitude", "[1.0]", "has static fields of shape"),
        ("step", "[" * 200_000, unreadable),
    ):
        found = refusal(doctored(file, tmp_path / "m.safetensors", {key: text}))
        assert part in found, (key, text[:40])


def test_a_config_of_a_far_larger_model_is_refused_before_it_is_built(file):
    trained_model = read_safetensors(file)
    metadata = trained_model.metadata
    for keys in (
        *({"blocks": 10**9}, {"noise": 10**9}, {"noise": 10**6}),
        *({"channels": [8, 8 * 10**5]}, {"channels": [8] * 30 + [10**9]}),
    ):
        larger = replace(metadata, keys=metadata.keys | keys)
        with pytest.raises(
            UserError, match="m: has far fewer weights than the model of its config"
        ):
            build_forecaster("m", trained_model, build_model_config("m", larger))


def test_a_flipped_bit_is_found_and_files_without_checksums_are_read(file, tmp_path):
    texts, tensors = content(file)
    other = tmp_path / "m.safetensors"
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    for part, damaged in (
        (tensors[name].numpy().tobytes(), name),
        (b"step_hours", "its metadata"),
        (texts["statistics"][-30:].encode(), "its metadata"),
    ):
        damaged_bytes = bytearray(file.read_bytes())
        damaged_bytes[damaged_bytes.index(part)] ^= 1
        other.write_bytes(damaged_bytes)
        assert f"is damaged: {damaged} is not as it was written" in refusal(other)
    del texts["checksums"]
    save_file(tensors, other, texts)
    assert credit_dp.load(other).step == credit_dp.load(file).step


def test_a_checkpoint_that_says_too_little_is_not_exported(run, tmp_path):
    training = run[2]
    state = replace(training.trainer.state, data={}, static=None)
    path = save_checkpoint(tmp_path / "run" / "checkpoint", state, "")
    with pytest.raises(UserError, match="lacks what is needed to use it without the data"):
        checkpoint(["export", str(path)], "credit-dp checkpoint")
    state = replace(training.trainer.state, static=None)
    path = save_checkpoint(tmp_path / "run" / "checkpoint", state, "")
    with pytest.raises(UserError, match="has no static fields"):
        checkpoint(["export", str(path)], "credit-dp checkpoint")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_file_is_written_whole_or_not_at_all(run, tmp_path):
    path = exported(run[0], "--output", str(tmp_path / "m.safetensors"))
    before = path.read_bytes()
    with full_disk(1000), pytest.raises(UserError, match=r"could not be written \(File too large"):
        exported(run[0], "--output", str(path))
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.md", "m.safetensors"]


def test_the_card_says_what_it_is_and_its_block_runs(run, file, tmp_path, monkeypatch):
    _, config, _ = run
    card = file.with_suffix(".md").read_text()
    for channel in prepare_training_data(config.data).store.channels.prognostic:
        assert f"| {channel.name} |" in card
    assert "None: the run was not scored" in card
    assert "2 optimiser steps of 4 samples" in card
    assert "2000-01-01 to 2000-01-03" in card
    (block,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    script = tmp_path / "block.py"
    script.write_text(block)
    monkeypatch.chdir(file.parent)
    made = runpy.run_path(str(script))
    assert made["later"].shape == made["fields"].shape == (1, 7, 12, 16)


def test_the_card_and_the_hub_show_the_scores_of_these_weights(run, file, tmp_path):
    from huggingface_hub import ModelCard

    errors = {"model": 1.23456, "persistence": 2.0, "climatology": 3.0}
    rmse = {"wind_500": {"6h": errors, "48h": errors}}
    found = {"step": 2, "initial_times": 7, "units": {}, "rmse": rmse}
    text = card_beside(run[0], tmp_path, json.dumps(found))
    assert "| wind_500 | 6h | 1.235 | 2 | 3 |" in text
    assert "7 initial times" in text
    assert "It was not scored beyond 48 hours." in text
    card = ModelCard(text)
    result, _ = card.data.eval_results
    assert (result.metric_name, result.metric_value) == ("RMSE of wind_500", 1.23456)
    assert (card.data.model_name, card.data.library_name) == ("m", "credit_dp")
    assert ModelCard(file.with_suffix(".md").read_text()).data.eval_results is None
    other = card_beside(run[0], tmp_path, json.dumps(found | {"step": 1, "rmse": {}}))
    assert "None: the run was not scored with these weights." in other
    assert "It was not scored beyond" not in other


def card_beside(folder: Path, place: Path, scores: str) -> str:
    """Return the card of a run with these scores."""
    (folder / "metrics.json").write_text(scores)
    try:
        file = exported(folder, "--output", str(place / "m.safetensors"))
    finally:
        (folder / "metrics.json").unlink()
    return file.with_suffix(".md").read_text()


def hub_cache(folder: Path, file: Path) -> str:
    """A cache with one repository as huggingface_hub lays it out; return its only revision."""
    repository = folder / "models--weather--small"
    revision = "0123456789abcdef0123456789abcdef01234567"
    blob = repository / "blobs/b10b"
    snapshot = repository / "snapshots" / revision
    for each in (blob.parent, snapshot, repository / "refs"):
        each.mkdir(parents=True)
    shutil.copy(file, blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/b10b")
    (repository / "refs/main").write_text(revision)
    return revision


@pytest.mark.slow
def test_a_model_of_the_hub_loads_from_its_cache(run, file, tmp_path):
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    revision = hub_cache(tmp_path, file)
    addresses = [
        f"hf://weather/small{part}" for part in ("", "@main", f"@{revision}", "/model.safetensors")
    ]
    snapshot = tmp_path / "models--weather--small/snapshots" / revision
    script = (
        "import sys, torch, credit_dp\n"
        "sums = {sum(p.double().sum().item() for p in credit_dp.load(a).parameters())"
        " for a in sys.argv[1:]}\n"
        "print(len(sums))\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", script, str(file), str(snapshot), *addresses]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    for address in ("hf://weather", "hf://weather/none", "hf://we ather/small"):
        words = ["from credit_dp.export.hub import fetch_model", f"fetch_model({address!r})"]
        done = subprocess.run(
            [sys.executable, "-c", "; ".join(words)],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"credit_dp.errors.UserError: {address}: "), done.stderr


def test_an_address_that_no_file_on_the_hub_can_have_is_one_line(monkeypatch):
    for rest in (
        *("/../../x", "/..", "/a/./b", "//etc/passwd", "/a\\..\\b"),
        *("@..", "@../../x", "/a\nb", "/\0"),
    ):
        with pytest.raises(UserError, match="needs hf://OWNER/NAME") as caught:
            fetch_model(f"hf://weather/small{rest}")
        assert str(caught.value).isprintable(), rest

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Invalid filename 'C:/x'")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError, match="hf://weather/small/C:/x: could not be fetched"):
        fetch_model("hf://weather/small/C:/x")


@pytest.mark.slow
def test_damaged_scores_are_one_line(run, tmp_path):
    for scores in (
        *("", "[]", "[" * 30_000, '{"step": 2}'),
        '{"step": 2, "rmse": {"a": {"b": 1}}}',
    ):
        with pytest.raises(UserError, match=r"metrics\.json, can't be read \(\w+: .*") as error:
            card_beside(run[0], tmp_path, scores)
        assert "\n" not in str(error.value), scores[:40]
        assert not list(tmp_path.iterdir()), scores[:40]


def test_a_file_never_goes_where_it_would_do_damage(run, tmp_path):
    checkpoint_folder = run[0] / "checkpoint/step-00000002"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "card.md").mkdir()
    for place, part in {
        str(checkpoint_folder / "m.safetensors"): "would be part of a checkpoint",
        str(pipe): "is a pipe, a socket or a device",
        str(tmp_path): "is a folder or a device",
        str(tmp_path / "card.safetensors"): "card.md is a folder or a device",
        "~nosuchuser/m.safetensors": "there is no home folder",
        "a" * 400: "can't be written",
    }.items():
        with pytest.raises(UserError, match=r"--output: ") as error:
            exported(run[0], "--output", place)
        assert part in str(error.value)
    assert pipe.is_fifo()
    assert len(list(checkpoint_folder.iterdir())) == 2


@pytest.mark.slow
def test_the_package_is_imported_without_torch():
    code = "import sys, credit_dp; credit_dp.load; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT).returncode == 0


OWN = """
from dataclasses import dataclass
from credit_dp.config import OwnModelConfig

@dataclass
class MineConfig(OwnModelConfig):
    name: str = "mine"
    width: int = 8

    def build(self, in_channels, out_channels, grid):
        from torch import nn

        first = nn.Conv2d(in_channels, self.width, 3, padding=1)
        return nn.Sequential(first, nn.SiLU(), nn.Conv2d(self.width, out_channels, 3, padding=1))
"""


@pytest.mark.slow
def test_a_user_model_is_imported_as_in_training(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "mine.py"))
    model = find_plugins(OwnModelConfig, ())["mine"](width=4)
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", model, steps=1)
    training = trained(config)
    file = exported(tmp_path / "run")
    assert f"`mine` comes from a plug-in: before you start Python, set {PLUGINS_VARIABLE}" in (
        file.with_suffix(".md").read_text()
    )
    given, wanted = forecast(config, training, 1)
    with torch.no_grad():
        assert torch.equal(credit_dp.load(file)(*given), wanted)
    monkeypatch.delenv(PLUGINS_VARIABLE)
    line = refusal(file)
    assert "needs the model 'mine', but only" in line
    assert PLUGINS_VARIABLE in line
    for name in [name for name in sys.modules if name.startswith("credit_dp.plugins.")]:
        del sys.modules[name]


def test_the_command_line_makes_the_file(run, tmp_path, monkeypatch):
    words = ("checkpoint", "export", str(run[0]), f"--output={tmp_path / 'm.safetensors'}")
    code, out, err = answer(monkeypatch, *words, program="credit-dp")
    assert (code, err) == (0, "")
    assert out.splitlines() == [str(tmp_path / "m.safetensors"), str(tmp_path / "m.md")]
    assert credit_dp.load(tmp_path / "m.safetensors").step == np.timedelta64(6, "h")
    code, out, err = answer(monkeypatch, "checkpoint", "export", "nowhere", program="credit-dp")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = answer(monkeypatch, "checkpoint", "--help", program="credit-dp")
    assert (code, err) == (0, "")
    assert "export RUN_OR_CHECKPOINT" in out
    for arguments in ([], ["export"], ["import", "run"], ["export", "a", "out=b"]):
        with pytest.raises(
            UserError, match=r"needs `export` and the folder of a run.*--output FIL"
        ):
            checkpoint(arguments, "credit-dp checkpoint")
