import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.config.data import VariableConfig
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.statistics import StatisticsFile, input_description, statistics_path
from credit_dp.data.statistics_files import (
    check_statistics_files,
    covers_all_hours,
    load_or_compute_statistics,
    load_statistics_files,
)
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

NAMES = ("mean", "std", "tendency_std", "minimum", "maximum", "forcing_mean", "static_std")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return stores.write(stores.dataset(), tmp_path_factory.mktemp("statistics") / "store.zarr")


@pytest.fixture(scope="module")
def own(path, tmp_path_factory):
    """The statistics of all channels of the store, as a file of its own."""
    return own_file(path, tmp_path_factory.mktemp("own") / "stats.json")


def own_file(path, out, every=1, **changes):
    """A file as `credit-dp data stats` writes it."""
    store = Store.open(stores.config(path, **changes))
    found = load_or_compute_statistics(store, out.parent, every, lambda title, done: None)
    found.save(out)
    return str(out)


def loaded(path, files, **changes):
    """Return the statistics that a run takes from files, without a climatology."""
    store = Store.open(stores.config(path, statistics=files, **changes))
    return load_statistics_files(store, Path(store.config.cache), lambda title, done: None)[0]


def refused(path, file, **changes):
    with pytest.raises(UserError) as caught:
        prepare_training_data(stores.config(path, statistics=file, **changes))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.slow
def test_a_file_gives_the_statistics_of_the_cache(path, own):
    given = prepare_training_data(stores.config(path, statistics=own)).statistics
    computed = prepare_training_data(stores.config(path)).statistics
    for name in NAMES:
        assert np.array_equal(getattr(given, name), getattr(computed, name))


@pytest.mark.slow
def test_a_file_gives_the_quantiles_of_its_channels(path, tmp_path):
    variables = {name: VariableConfig(normalise="quantile") for name in ("temperature", "solar")}
    file = own_file(path, tmp_path / "stats.json", variables=variables)
    given = prepare_training_data(stores.config(path, statistics=file, variables=variables))
    computed = prepare_training_data(stores.config(path, variables=variables)).statistics
    for name in (*NAMES, "quantiles", "forcing_quantiles", "static_quantiles"):
        stored, wanted = getattr(given.statistics, name), getattr(computed, name)
        assert np.array_equal(stored, wanted, equal_nan=True)
    assert "quantile, but the config has it as it is" in refused(path, file)


def test_fewer_channels_in_another_order_find_theirs(path, own):
    changes = {"prognostic": ["temperature"], "diagnostic": ["geopotential"], "levels": [850, 500]}
    given = loaded(path, own, **changes)
    rows = StatisticsFile.load(Path(own)).channels
    names = ["temperature_850", "temperature_500", "geopotential_850", "geopotential_500"]
    assert given.mean.tolist() == [rows[name]["mean"] for name in names]
    assert given.tendency_std.tolist() == [rows[name]["tendency_std"] for name in names]


def test_a_copy_of_the_store_has_the_same_statistics(own, tmp_path):
    copy = tmp_path / "copy" / "era5.zarr"
    stores.write(stores.dataset().sortby("latitude"), copy, chunks={"time": 4}, zarr_format=2)
    loaded(copy, own)


@each(
    "changes, pattern",
    [
        ({"train": ["2000-01-01", "2000-01-02T12"]}, "of dates .* Change data.dates.train or"),
        ({"step": "12h", "test": ["2000-01-03", "2000-01-03T12"]}, "of step 6h.* Change data.step"),
        ({"levels": [500, 1000]}, None),
        ({"static": ["land_sea_mask", "latitude_sin"]}, None),
        (
            {"variables": {"temperature": VariableConfig(normalise="log1p(2)")}},
            r"temperature as it is, but the config has it log1p\(2\)",
        ),
        (
            {"variables": {"temperature": VariableConfig(normalise="sqrt")}},
            "temperature as it is, but the config has it sqrt",
        ),
        (
            {"variables": {"temperature": VariableConfig(normalise="quantile")}},
            "temperature as it is, but the config has it quantile",
        ),
        ({"variables": {"temperature": VariableConfig(normalise="minmax")}}, None),
    ],
)
def test_a_mismatch_names_what_differs(path, own, changes, pattern):
    if pattern is None:
        loaded(path, own, **changes)
        return
    assert re.search(pattern, refused(path, own, **changes))


def test_channels_that_are_not_in_the_file_are_named(path, tmp_path):
    file = own_file(path, tmp_path / "stats.json", levels=[500], forcing=[])
    assert "has no statistics of geopotential_850" in refused(path, file, levels=[500, 850])
    assert "has no statistics of solar" in refused(path, file, levels=[500])


def test_another_grid_is_noticed(own, tmp_path):
    grid = stores.write(stores.dataset(rows=14), tmp_path / "grid.zarr")
    assert "of grid [12, 8" in refused(grid, own)


@pytest.mark.slow
def test_every_is_part_of_it(path, tmp_path, caplog):
    file = own_file(path, tmp_path / "stats.json", every=3)
    with caplog.at_level(logging.INFO, "credit_dp"):
        ready = prepare_training_data(stores.config(path, statistics=file))
    assert "has statistics of one in 3 training dates" in caplog.text
    fields = stores.dataset()["2m_temperature"].values[:8:3].astype(np.float64)
    assert ready.statistics.maximum[3] == fields.max()
    store = ready.store
    assert statistics_path(store, tmp_path, 3) != statistics_path(store, tmp_path)
    assert [n for n in (1, 2, 3, 4, 5) if covers_all_hours(n, 6)] == [1, 3, 5]


@each("content", ["", "{", "[]", '{"form": "credit_dp statistics 1"}'])
def test_what_is_no_file_of_statistics_is_refused(path, tmp_path, content):
    file = tmp_path / "stats.json"
    file.write_text(content)
    assert "no statistics that can be read" in refused(path, str(file))
    assert "no such file" in refused(path, str(tmp_path / "absent.json"))


@pytest.mark.slow
def test_damaged_parts_of_a_file_are_no_file(own, tmp_path):
    for part in ("form", "made_from", "channels"):
        content = json.loads(Path(own).read_text())
        content[part] = 3
        (tmp_path / "bad.json").write_text(json.dumps(content))
        assert StatisticsFile.load(tmp_path / "bad.json") is None


def foreign(names, seed):
    """A dataset with a number per level, or one number, for each name; all could be means."""
    numbers = np.random.default_rng(seed).uniform(1, 2, size=(len(names), 3))
    means = {"z": np.array([0, 5e4, 1e4]), "t": 250.0, "s": 0.0, "2": 280.0}
    variables = {}
    for name, values in zip(names, numbers, strict=True):
        on_levels = name in ("geopotential", "temperature", "Z", "T", "z", "t")
        values += means["2" if name == "t2m" else "z" if name[0] in "gzZ" else name[0].lower()]
        variables[name] = (("level",), values) if on_levels else ((), values[0])
    return xr.Dataset(variables, {"level": [1000, 500, 850]})  # in an order of its own


LONG = ["geopotential", "2m_temperature", "temperature", "solar"]
MILES = ["Z", "t2m", "T", "solar"]
SHORT = ["z", "2t", "t", "solar"]  # `z` off the levels is the geopotential at the surface


def written(dataset, path):
    if path.suffix == ".zarr":
        dataset.to_zarr(path, zarr_format=3, consolidated=False)
    else:
        dataset.to_netcdf(path, engine="netcdf4")
    return str(path)


@each("names, suffix", [(LONG, ".zarr"), (MILES, ".nc"), (SHORT, ".nc")])
def test_foreign_files_are_matched_by_name_and_level(path, tmp_path, suffix, names):
    sets = [foreign(names, seed) for seed in range(3)]
    files = [written(data, tmp_path / f"{seed}{suffix}") for seed, data in enumerate(sets)]
    found = loaded(path, files)
    for data, values in zip(sets, (found.mean, found.std, found.tendency_std), strict=True):
        levels = [500, 850, 1000]
        upper, lower = (data[name].sel(level=levels).values for name in (names[0], names[2]))
        assert np.allclose(values, [*upper, float(data[names[1]]), *lower], rtol=1e-12)
    assert found.forcing_mean.tolist() == [0, float(sets[0]["solar"])]
    assert np.isnan(found.minimum).all()
    computed = prepare_training_data(stores.config(path)).statistics
    assert np.array_equal(found.static_mean, computed.static_mean)


def test_tendencies_that_no_file_gives_are_computed(path, tmp_path, caplog):
    files = [written(foreign(LONG, seed), tmp_path / f"{seed}.nc") for seed in range(2)]
    with caplog.at_level(logging.INFO, "credit_dp"):
        found = loaded(path, files)
    computed = prepare_training_data(stores.config(path)).statistics
    assert np.array_equal(found.tendency_std, computed.tendency_std)
    assert not np.array_equal(found.std, computed.std)
    assert "has no tendency std: computed" in caplog.text


@pytest.mark.slow
@each("others", [0, 1])
def test_what_is_computed_needs_no_statistics(path, tmp_path, caplog, others):
    """Variables that are not normalised need none; those of forcings come from a sample."""
    lacking = {"2m_temperature", "solar"}
    names = [name for name in LONG if name not in lacking]
    files = [written(foreign(names, seed), tmp_path / f"{seed}.nc") for seed in range(2 + others)]
    changes = {
        "forcing": ["insolation", "day_of_year_sin", "solar"],
        "static": ["latitude_sin", "land_sea_mask"],
        "variables": {"2m_temperature": VariableConfig(normalise="none")},
    }
    with caplog.at_level(logging.INFO, "credit_dp"):
        ready = prepare_training_data(stores.config(path, statistics=files, **changes))
    (said,) = [message for message in caplog.messages if "computed from" in message]
    assert "no mean or std of 2m_temperature, solar: computed from all training dates" in said
    assert "has no tendency std and no mean or std" in said
    found = ready.statistics
    computed = prepare_training_data(stores.config(path, **changes)).statistics
    surface = [channel.name for channel in ready.store.channels.output_channels].index(
        "2m_temperature"
    )
    assert found.mean[0] == foreign(names, 0)["geopotential"].sel(level=500)
    assert found.tendency_std[surface] == computed.tendency_std[surface]
    for name in ("forcing_mean", "forcing_std", "static_mean", "static_std", "forcing_minimum"):
        assert np.array_equal(getattr(found, name), getattr(computed, name))
    assert Normaliser.of(ready, torch.float64).scale[surface] == 1


def test_statistics_that_are_not_used_are_not_missed(path, tmp_path):
    """Only a standardised channel needs mean and standard deviation."""
    mean = foreign([name for name in LONG if name != "2m_temperature"], 0)
    files = [written(mean, tmp_path / "0.nc")]
    files += [written(foreign(LONG, seed), tmp_path / f"{seed}.nc") for seed in (1, 2)]
    for normalise in ("none", "std"):
        variables = {"2m_temperature": VariableConfig(normalise=normalise)}
        found = loaded(path, files, variables=variables)
        assert found.std[3] == float(foreign(LONG, 1)["2m_temperature"])
    assert "0.nc: has no mean of 2m_temperature. " in refused(path, files)


@pytest.mark.slow
@each("names", [MILES, ["geopotential", "2t", "temperature", "solar"]])
def test_a_config_of_short_names_finds_them_too(tmp_path, names):
    renamed = {"geopotential": "z", "2m_temperature": "t2m", "temperature": "T"}
    path = stores.write(stores.dataset().rename(renamed), tmp_path / "s.zarr")
    sets = [foreign(names, seed) for seed in range(3)]
    files = [written(data, tmp_path / f"{seed}.nc") for seed, data in enumerate(sets)]
    lists = {"prognostic": ["z", "t2m", "T"], "levels": [850], "static": ["land_sea_mask"]}
    found = loaded(path, files, **lists)
    data = sets[1].sel(level=850)
    assert found.std.tolist() == [
        float(data[names[0]]),
        float(data[names[1]]),
        float(data[names[2]]),
    ]
    flat = loaded(path, files, **(lists | {"prognostic": ["z_850"], "levels": None}))
    assert flat.std.tolist() == [float(data[names[0]])]


@pytest.mark.slow
def test_one_dataset_may_have_all(path, tmp_path):
    mean, std = foreign(LONG, 0), foreign(LONG, 1)
    both = xr.merge([mean, std.rename({name: f"{name}_std" for name in LONG})])
    found = loaded(path, written(both, tmp_path / "both.nc"))
    assert found.std[0] == float(std["geopotential"].sel(level=500))


@pytest.mark.slow
def test_single_levels_by_name(path, tmp_path):
    """A variable whose name has a level is one of its own."""
    flat = (
        stores.dataset().sel(level=500, drop=True).rename(geopotential="Z500", temperature="T500")
    )
    store = stores.write(flat, tmp_path / "flat.zarr")
    numbers = {"Z500": 5e4, "T500": 260.0, "t2m": 270.0, "solar": 8.0}
    files = [written(xr.Dataset(numbers) + x, tmp_path / f"{x}.nc") for x in range(3)]
    found = loaded(store, files, prognostic=["Z500", "2m_temperature", "T500"])
    assert found.mean.tolist() == [50000, 270, 260]
    assert found.tendency_std.tolist() == [50002, 272, 262]
    assert "has no mean of geopotential_500" in refused(path, files, levels=[500])


@pytest.mark.slow
def test_the_surface_has_the_short_name_of_the_levels_too(path, tmp_path):
    numbers = {"z": 4.0, "geopotential": ("level", [5e4]), "t": ("level", [260.0])}
    data = xr.Dataset(numbers | {"2t": 270.0, "solar": 8.0}, {"level": [500]})
    files = [written(data + number, tmp_path / f"{number}.nc") for number in range(3)]
    found = loaded(path, files, levels=[500])
    assert found.mean.tolist() == [50000, 270, 260]
    assert found.static_mean[0] == 4


@each(
    "change, parts",
    [
        (lambda data: data.drop_vars("2m_temperature"), "0.nc: has no mean of 2m_temperature."),
        (lambda data: data.isel(level=[0, 1]), "0.nc: has no mean of geopotential_850."),
        (lambda data: data.drop_vars("level"), "needs one value per level"),
        (lambda data: data.expand_dims(x=2), "needs one value per level"),
        (lambda data: data * np.nan, "geopotential_500|geopotential is nan"),
    ],
)
def test_what_foreign_files_lack_is_named(path, tmp_path, change, parts):
    first = written(change(foreign(LONG, 0)), tmp_path / "0.nc")
    files = [first, written(foreign(LONG, 1), tmp_path / "1.nc")]
    text = refused(path, files)
    assert any(part in text for part in parts.split("|"))


@pytest.mark.slow
def test_means_that_can_not_be_are_refused_by_a_check_too(path, tmp_path):
    files = [written(foreign(LONG, seed) / (2 - seed), tmp_path / f"{seed}.nc") for seed in (0, 1)]
    with pytest.raises(UserError, match=r"the mean of .* is 14.*Change data\.statistics"):
        check_statistics_files(Store.open(stores.config(path, statistics=files, levels=[850])))


def test_static_fields_that_files_of_others_lack_are_judged_too(tmp_path):
    data = stores.dataset()
    data["roughness"] = data["land_sea_mask"].copy(data=data["land_sea_mask"].values.copy())
    data["roughness"].values[0, 0] = -9999
    path = stores.write(data, tmp_path / "store.zarr")
    files = [written(foreign(LONG, seed), tmp_path / f"{seed}.nc") for seed in range(3)]
    said = refused(path, files, static=["roughness"])
    assert "the minimum of roughness is -9999, which looks like a fill value" in said


@pytest.mark.slow
@each("name", ["temperature", "solar", "land_sea_mask"])
def test_files_of_others_do_not_know_transforms(path, tmp_path, name):
    files = [written(foreign(LONG, seed), tmp_path / f"{seed}.nc") for seed in range(3)]
    for way in {"temperature": ("log1p(1)", "sqrt", "quantile")}.get(name, ("sqrt",)):
        variables = {name: VariableConfig(normalise=way)}
        assert f"normalises it by {way}" in refused(path, files, variables=variables)
    assert "got 4" in refused(path, [*files, files[0]])


@each("value", [3, [], [None], {"a": 1}])
def test_only_files_can_be_given(path, value):
    with pytest.raises(UserError, match=r"data\.statistics: needs a file"):
        stores.config(path, statistics=value)


@pytest.mark.slow
def test_the_description_does_not_depend_on_the_path(path, tmp_path):
    copy = tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    found = [input_description(Store.open(stores.config(x)), 1) for x in (path, copy)]
    assert found[0].pop("store") != found[1].pop("store")
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_file_is_of_the_points_inside_a_rim(tmp_path):
    """A file from before rims has no `boundary`, and is of all points."""
    path = tmp_path / "box.zarr"
    stores.dataset().isel(longitude=slice(0, 6)).to_zarr(path, zarr_format=2)
    whole = own_file(path, tmp_path / "whole.json")
    inside = own_file(path, tmp_path / "inside.json", boundary=2)
    content = json.loads((tmp_path / "whole.json").read_text())
    assert content["made_from"].pop("boundary") == 0
    (tmp_path / "old.json").write_text(json.dumps(content))
    loaded(path, inside, boundary=2)
    loaded(path, str(tmp_path / "old.json"))
    text = "has statistics of boundary {}, but the config has {}. Change data.boundary or data.st"
    assert text.format(2, 0) in refused(path, inside)
    assert text.format(0, 2) in refused(path, whole, boundary=2)
