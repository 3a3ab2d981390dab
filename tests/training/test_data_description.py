"""A checkpoint describes its training data; a run with other data can't resume from it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from numpy.typing import NDArray

from credit_dp.config import Config, DataConfig, DiffusionConfig, VariableConfig
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.data_description import DataDescription, check_data, describe_data
from tests.checkpoints import save_checkpoint
from tests.training.masked_stores import SEA, SOIL, sea_config
from tests.training.runs import alone, built, make_config, make_store, tiny_unet


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    return make_config(make_store(folder, 12), folder / "run")


@pytest.fixture(scope="module")
def description(config):
    return describe_data(prepare_training_data(config.data), config.model)


def refusal(saved: DataDescription, config: Config) -> str:
    """Return why a run can't resume from a checkpoint with a description."""
    own = describe_data(prepare_training_data(config.data), config.model)
    with pytest.raises(UserError) as error:
        check_data(saved, own)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_is_loaded_on_the_same_data_only(config, tmp_path):
    save_checkpoint(tmp_path / "checkpoint", built(config, alone()).trainer.state, "")
    levels = replace(config.data, levels=[1000, 500, 850])  # shapes of weights are the same
    state = built(replace(config, data=levels), alone()).trainer.state
    said = r"^resume: .* data\.levels=\[500,850,1000\], the config has \[1000,500,850\]"
    with pytest.raises(UserError, match=said):
        load_checkpoint(tmp_path / "checkpoint", state)


DATA = (
    (
        "prognostic",
        ["2m_temperature", "geopotential", "temperature"],
        "[geopotential,2m_temperature,temperature], the config has "
        "[2m_temperature,geopotential,temperature]",
    ),
    ("forcing", ["solar", "day_of_year_sin"], "[day_of_year_sin,solar]"),
    (
        "static",
        ["land_sea_mask", "geopotential_at_surface"],
        "[geopotential_at_surface,land_sea_mask]",
    ),
    ("step", "12h", "6h, the config has 12h"),
)
MODEL = (
    ({"frames": 2}, "model.frames=1, the config has 2. Set model.frames to"),
    ({"residual": False}, "model.residual=true, the config has false. Set model.residual to"),
    (
        {"fixers": ["nonnegative"]},
        "model.fixers=[], the config has [nonnegative]. Set model.fixers to",
    ),
    ({"bounds": {"temperature": [1.0, 9.0]}}, "model.bounds={}, the config has {temperature:"),
    ({"channels": [8, 24]}, "model.channels=[8,16], the config has [8,24]. Set model.channels"),
    # The same shapes of weights, but another model.
    ({"groups": 2}, "model.groups=4, the config has 2. Set model.groups"),
    ({"upsample": "nearest"}, "model.upsample=bilinear, the config has nearest. Set model."),
)


def test_another_sample_or_model_is_refused_by_its_key(config, description):
    data = prepare_training_data(config.data)
    for key, value, said in DATA:
        assert f"data.{key}" in description
        with pytest.raises(UserError) as error:
            check_data(description, {**description, f"data.{key}": value})
        line = f"resume: the checkpoint was trained with data.{key}={said}"
        assert str(error.value).startswith(line), key
    for option, said in MODEL:
        with pytest.raises(UserError) as error:
            check_data(description, describe_data(data, replace(tiny_unet(), **option)))
        assert said in str(error.value), option
        assert "\n" not in str(error.value)


def test_a_diffusion_model_resumes_with_its_own_scale(config):
    data = prepare_training_data(config.data)
    saved, own = (describe_data(data, DiffusionConfig(sigma_data=x)) for x in (0.5, 1.0))
    with pytest.raises(UserError, match=r"with model\.sigma_data=0\.5, the config has 1\.0"):
        check_data(saved, own)
    with pytest.raises(UserError, match=r"with model=unet, the config has diffusion\. Set model"):
        check_data(describe_data(data, config.model), own)


def moved(config: Config, path: Path, **coords: NDArray[np.float64]) -> DataConfig:
    """Write a store with the same fields at other coordinates."""
    fields = xr.open_zarr(config.data.store, chunks=None, consolidated=False).load()
    fields.assign_coords(coords).to_zarr(path, zarr_format=3, consolidated=False)
    return replace(config.data, store=str(path))


LONGITUDES = np.arange(16) * 22.5  # of the store; half a cell is 11.25 degrees


def test_another_origin_of_the_grid_is_refused(config, description, tmp_path):
    data = moved(config, tmp_path / "moved.zarr", longitude=LONGITUDES + 11.25)
    assert refusal(description, replace(config, data=data)) == (
        "resume: the checkpoint was trained with longitude 0 at index 0, but data.store has 11.25. "
        "Set data.store to that of the checkpoint, or start a new run."
    )
    fields = description["fields"]
    for key, values, said in (
        ("longitude", LONGITUDES + 180, "longitude 0 at index 0, but data.store has 180"),
        (
            "latitude",
            82.5 - 15.0 * np.arange(12),
            "latitude 90 at index 0, but data.store has 82.5",
        ),
        ("longitude", LONGITUDES - 360, ""),  # may be written from -180 or from 180
    ):
        other = {**description, "fields": {**fields, key: values.tolist()}}
        if said:
            with pytest.raises(UserError, match=said):
                check_data(description, other)
        else:
            check_data(description, other)


def test_another_unit_and_other_model_levels_are_refused(description):
    own, fields = description, description["fields"]

    def check(saved: dict[str, object], present: dict[str, object]) -> None:
        check_data({**own, "fields": {**fields, **saved}}, {**own, "fields": {**fields, **present}})

    units = ["K", *fields["units"][1:]]
    for spelling in ("kelvin", ""):  # the same unit, and none that is known
        check({"units": units}, {"units": [spelling, *units[1:]]})
    with pytest.raises(UserError, match=r"geopotential_500 in K, but data\.store has it in g/kg"):
        check({"units": units}, {"units": ["g/kg", *units[1:]]})
    levels = {"a": [0.0, 2000.0, 0.0], "b": [0.0, 0.5, 1.0]}
    check({"hybrid": levels}, {"hybrid": {**levels}})
    for b in ([0.0, 0.6, 1.0], [0.0, 1.0]):
        with pytest.raises(UserError, match="other coefficients b of model levels than"):
            check({"hybrid": levels}, {"hybrid": {**levels, "b": b}})


def test_other_fields_are_refused_by_their_statistics(config, description):
    # As many samples as before, so that nothing but the fields themselves tells the difference.
    dates = replace(config.data.dates, train=["2000-01-01T06", "2000-01-04T00"])
    line = refusal(description, replace(config, data=replace(config.data, dates=dates)))
    assert "another mean of the fields: data.store or data.dates.train differs" in line


def test_other_quantiles_are_refused(config, description):
    variables = {"temperature": VariableConfig(normalise="quantile")}
    data = replace(config.data, variables=variables)
    own = describe_data(prepare_training_data(data), config.model)
    check_data(own, own)
    saved = np.array(own["statistics"]["quantiles"])
    for factor, same in ((1e-12, True), (1e-2, False)):
        moved = saved + factor * np.ptp(saved, axis=-1, keepdims=True)
        other = {**own, "statistics": {**own["statistics"], "quantiles": moved.tolist()}}
        if same:
            check_data(other, own)
        else:
            with pytest.raises(UserError, match="with other quantiles of the fields"):
                check_data(other, own)
    assert not any(name.endswith("quantiles") for name in description["statistics"])


def test_the_last_digits_may_differ(description):
    own = description
    saved = {name: np.array(values) for name, values in own["statistics"].items()}
    rounded = {name: (values * (1 + 1e-12)).tolist() for name, values in saved.items()}
    check_data({**own, "statistics": rounded}, own)
    moved = {**rounded, "forcing_mean": (saved["forcing_mean"] + 1).tolist()}
    with pytest.raises(UserError, match="another forcing_mean"):
        check_data({**own, "statistics": moved}, own)


@pytest.mark.slow
def test_values_on_other_points_are_refused(tmp_path):
    config = sea_config(tmp_path)
    own = describe_data(prepare_training_data(config.data), config.model)
    assert set(own["masks"]) == {SEA, SOIL}
    check_data(own, own)
    zarr.open_group(config.data.store, mode="r+")[SEA][1, -1] = np.nan
    again = replace(config.data, cache=str(tmp_path / "another"))
    other = describe_data(prepare_training_data(again), config.model)
    saved = {**other, "masks": own["masks"]}
    with pytest.raises(UserError, match=rf"^resume: .* values of {SEA} on other points") as error:
        check_data(saved, other)
    assert "\n" not in str(error.value)
