"""Impossible values are refused wherever they are read, in one line that locates them."""

import fnmatch
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import DataConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.limits import ValueLimits, extremes, physical_range
from credit_dp.data.loader import Loader
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.source import VariableInfo
from credit_dp.data.statistics import StatisticsRun
from credit_dp.data.store import Store
from credit_dp.data.streaming import PieceWorkers
from credit_dp.data.units import KNOWN_VARIABLES, ValueRange
from credit_dp.errors import UserError
from tests.data import anemoi_stores, prepared_stores, stores
from tests.data.rechunk import requests
from tests.tables import each

ALL = slice(None)
PLACE = (5, 3, 2)  # time, row, column of the wrong value
Change = Callable[[xr.Dataset], None]


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def spike(name: str, value: float, level: int | None = None) -> Change:
    """Write one wrong value at `PLACE`."""

    def change(data: xr.Dataset) -> None:
        at = PLACE if level is None else (PLACE[0], stores.LEVELS.index(level), *PLACE[1:])
        data[name].values[at] = value

    return change


def config_of_changed_store(path: Path, change: Change, **changes: Any) -> DataConfig:
    """Write a store with a wrong value, and return its config."""
    data = stores.dataset()
    change(data)
    return stores.config(stores.write(data, path / "in.zarr"), **changes)


def read_all(config: DataConfig) -> np.ndarray:
    store = Store.open(config)
    return store.read_outputs(store.times[:8], ALL)


def replaced(name: str, value: Callable[[xr.Dataset], Any], units: str | None = None) -> Change:
    """Replace a variable, with or without a unit."""

    def change(data: xr.Dataset) -> None:
        data[name] = value(data).astype("f4")
        data[name].attrs = {} if units is None else {"units": units}

    return change


def rain(data: xr.Dataset) -> xr.DataArray:
    """Half a metre, and much more at one of the points."""
    values = data["2m_temperature"] * 0 + 0.5
    values[3, 2, 1] = 41
    return values


def celsius(data: xr.Dataset) -> xr.DataArray:
    return data["2m_temperature"] - 273.15


def huge(data: xr.Dataset) -> xr.DataArray:
    values = data["2m_temperature"].copy()
    values[3, :2] = -7.7e20
    return values


MESSAGES: list[tuple[Change, list[str], str]] = [
    (
        spike("temperature", 9.96921e36, level=850),
        [],
        "temperature on level 850 is 9.96921e+36 at 2000-01-02T06:00, row 3, col",
    ),
    (spike("temperature", 9.96921e36, level=850), [], "a fill value that no attribute of the st"),
    (
        replaced("2m_temperature", huge),
        [],
        "a fill value that no attribute of the store declares, which 16 points",
    ),
    (
        replaced("2m_temperature", celsius, "K"),
        [],
        "degC, while the store says K: correct its units attribute",
    ),
    (
        replaced("2m_temperature", celsius, ""),
        [],
        "degC, and the store gives no unit: set data.variables.2m_temperature.",
    ),
    (
        replaced("mean_sea_level_pressure", lambda data: data["2m_temperature"] + 730, "Pa"),
        ["mean_sea_level_pressure"],
        "hPa, while the store says Pa",
    ),
    (
        replaced("total_precipitation", rain, "m"),
        ["2m_temperature", "total_precipitation"],
        "looks like a damaged chunk, or mm, while the store says m: correct",
    ),
    (replaced("geopotential", lambda data: data["geopotential"] / 9.80665), [], "looks like gpm"),
    (spike("2m_temperature", np.inf), [], "2m_temperature has infinite values"),
]


class TestMessage:
    @pytest.mark.slow
    @each("change, names, expected", MESSAGES)
    def test_what_is_wrong(
        self, tmp_path: Path, change: Change, names: list[str], expected: str
    ) -> None:
        changes = {"prognostic": names} if names else {}
        config = config_of_changed_store(tmp_path, change, **changes)
        assert expected in refusal(lambda: read_all(config))

    def test_overwritten_bytes_of_a_chunk(self, tmp_path: Path) -> None:
        config = stores.config(stores.write(stores.dataset(), tmp_path / "in.zarr"))
        chunk = tmp_path / "in.zarr/2m_temperature/c/5/0/0"
        damaged = bytearray(chunk.read_bytes())
        damaged[40:104] = bytes.fromhex("7e425c33") * 16
        chunk.write_bytes(damaged)
        message = refusal(lambda: read_all(config))
        assert message.startswith(f"{tmp_path}/in.zarr, chunk 2m_temperature/c/5/0/0: 2m_temper")
        assert "at 2000-01-02T06:00, row 1, column 2, but its limits are 150 to 350" in message
        assert "16 of 96 points are out of range. It looks like a damaged chunk." in message
        assert "set 'data.limits={2m_temperature:[LOW,HIGH]}', or {2m_temperature:null}" in message

    def test_the_advised_conversion_works(self, tmp_path: Path) -> None:
        def change(data: xr.Dataset) -> None:
            data["2m_temperature"] = data["2m_temperature"] - 273.15

        config = config_of_changed_store(tmp_path, change)
        advised = {"2m_temperature": VariableConfig(convert="degC->K")}
        assert "convert='degC->K'" in refusal(lambda: read_all(config))
        assert read_all(replace(config, variables=advised)).mean() > 200

    def test_rows_are_counted_from_the_north(self, tmp_path: Path) -> None:
        data = stores.dataset()
        spike("2m_temperature", 0.0)(data)
        rising = stores.write(data.sortby("latitude"), tmp_path / "rising.zarr")
        message = refusal(lambda: read_all(stores.config(rising)))
        assert "row 3, column 2" in message
        store = Store.open(stores.config(rising))
        assert "row 3," in refusal(lambda: store.read_outputs(store.times[5:6], slice(2, 5)))


def chunked_netcdf(data: xr.Dataset, path: Path) -> str:
    encoding = {"2m_temperature": {"chunksizes": (2, 12, 8)}}
    data.to_netcdf(path.with_suffix(".nc"), encoding=encoding)
    return str(path.with_suffix(".nc"))


def anemoi(data: xr.Dataset, path: Path) -> Path:
    return anemoi_stores.write(data.sortby("latitude"), path, chunks=(1, 1, 1, 24))


@each(
    "write, chunk",
    [
        (chunked_netcdf, "(2, 0, 0)"),
        (anemoi, f"data/5.0.0.{(11 - PLACE[1]) // 3}"),
        (prepared_stores.write, "fields/c.5.0.0.0"),
    ],
)
def test_the_chunk_is_named(tmp_path: Path, write: Callable[..., Any], chunk: str) -> None:
    """The very chunk; test_store_forms.py has the file, for every form of store."""
    data = stores.dataset()
    spike("2m_temperature", 0.0)(data)
    data["land_sea_mask"].values[0, 0] = 7
    path = write(data, tmp_path / "in.zarr")
    message = refusal(lambda: read_all(stores.config(path)))
    assert f"{path}, chunk {chunk}: 2m_temperature is 0 at" in message
    if write is prepared_stores.write:
        static = refusal(lambda: Store.open(stores.config(path)).read_static(ALL))
        assert f"{path}, chunk static/c.0.0.0: land_sea_mask is 7 at row 0, column 0, but" in static


class TestWhereValuesEnter:
    def test_statistics_and_climatology(self, tmp_path: Path) -> None:
        fill = {"2m_temperature": VariableConfig(fill="mean")}
        data = stores.dataset()
        data["2m_temperature"].values[:, 0, :3] = np.nan
        spike("2m_temperature", 2.6e38)(data)
        config = stores.config(stores.write(data, tmp_path / "in.zarr"), variables=fill)
        assert "2m_temperature is 2.6e+38 at 2000-01-02T06:00" in refusal(
            lambda: prepare_training_data(config)
        )
        assert not list((tmp_path / "cache").glob("statistics-*.json"))

    @pytest.mark.slow
    def test_statistics_of_before_that_hold_garbage(self, tmp_path: Path) -> None:
        """Statistics that were computed without limits may still be in the cache."""
        without = {"2m_temperature": None}
        config = config_of_changed_store(tmp_path, spike("2m_temperature", 2.6e38), limits=without)
        prepare_training_data(config)
        message = refusal(lambda: prepare_training_data(replace(config, limits={})))
        assert "the maximum of 2m_temperature is 2.6e+38, but its limits are 150 to 350" in message
        statistics, climatology = message.partition("Remove ")[2].partition(",")[0].split(" and ")
        Path(statistics).unlink()
        shutil.rmtree(climatology)
        assert "row 3, column 2" in refusal(
            lambda: prepare_training_data(replace(config, limits={}))
        )

    def test_statistics_that_are_given(self, tmp_path: Path) -> None:
        names = ("geopotential", "temperature", "2m_temperature", "solar")
        levels = {"level": list(stores.LEVELS)}
        mean = {n: (("level",), [54e3, 14e3, 1e3]) for n in names[:1]}
        mean |= {"temperature": (("level",), [270.0] * 3), "2m_temperature": ((), 7.0)}
        mean |= {"solar": ((), 100.0)}
        std = {n: (v[0], np.ones_like(v[1])) for n, v in mean.items()}
        xr.Dataset(mean, levels).to_netcdf(tmp_path / "mean.nc")
        xr.Dataset(std, levels).to_netcdf(tmp_path / "std.nc")
        files = [str(tmp_path / "mean.nc"), str(tmp_path / "std.nc")]
        config = config_of_changed_store(tmp_path, lambda data: None, statistics=files)
        message = refusal(lambda: prepare_training_data(config))
        assert message.startswith(f"{files[0]}, {files[1]}: the mean of 2m_temperature is 7, but")

    @pytest.mark.slow
    def test_loader(self, tmp_path: Path) -> None:
        """A store that is damaged after its statistics were computed."""
        config = config_of_changed_store(tmp_path, lambda data: None)
        prepared = prepare_training_data(config)
        stored = zarr.open_array(tmp_path / "in.zarr", path="geopotential", mode="r+")
        stored[2, 0, 4, 4] = 1e20
        loader = Loader(prepared, "train", slice(3, 9), SampleSequence(7, 7), prefetch=0)
        with loader:
            message = refusal(lambda: next(loader))
        assert "geopotential on level 500 is 1e+20 at 2000-01-01T12:00, row 4, column 4" in message

    @each("name", ["geopotential_at_surface", "land_sea_mask"])
    def test_static(self, tmp_path: Path, name: str) -> None:
        def change(data: xr.Dataset) -> None:
            data[name].values[2, 3] = -32767

        message = refusal(
            lambda: Store.open(config_of_changed_store(tmp_path, change)).read_static(slice(1, 5))
        )
        assert f"{name} is -32767 at row 2, column 3, but its limits are" in message

    def test_large_fill_values_of_an_unknown_variable(self, tmp_path: Path) -> None:
        config = config_of_changed_store(tmp_path, spike("solar", 1e20))
        message = refusal(lambda: prepare_training_data(config))
        assert "solar is 1e+20 at 2000-01-02T06:00, row 3, column 2, but its limits are" in message
        assert "-1e+15 to 1e+15" in message
        assert "a fill value that no attribute of the store declares" in message

    @each("name", ["solar", "flag", "height"])
    def test_small_fill_values_of_an_unknown_variable(self, tmp_path: Path, name: str) -> None:
        """They are in the statistics of all roles, of the run and of `data stats`."""

        def change(data: xr.Dataset) -> None:
            data["flag"] = data["land_sea_mask"].copy()
            data["height"] = data["2m_temperature"].copy()
            data["height"].attrs["units"] = "hPa"
            data[name].values[..., 3, 2] = -9999

        config = config_of_changed_store(
            tmp_path,
            change,
            prognostic=["temperature", "height"],
            static=["flag"],
            variables={"height": VariableConfig(convert="hPa->Pa")},
        )
        message = refusal(lambda: prepare_training_data(config))
        least = "-999900" if name == "height" else "-9999"
        assert message.startswith(f"{config.store}: the minimum of {name} is {least}, which looks ")
        assert f"'data.limits={{{name}:[LOW,HIGH]}}'" in message
        store = Store.open(config)
        with closing(StatisticsRun(store, tmp_path / "stats.json")) as run:
            with closing(PieceWorkers(store, run.dates)) as workers:
                assert refusal(lambda: run.run(workers, lambda done: None)) == message
        assert not (tmp_path / "stats.json").exists()
        for limits in (None, [-1e6, 1e6]):
            prepare_training_data(replace(config, limits={name: limits}))

    def test_sums_over_a_step(self, tmp_path: Path) -> None:
        def change(data: xr.Dataset) -> None:
            data["total_precipitation"] = abs(data["2m_temperature"] - 280) * 1e-4
            spike("total_precipitation", 50.0)(data)

        config = config_of_changed_store(
            tmp_path, change, prognostic=["temperature"], diagnostic=["total_precipitation"]
        )
        config = replace(config, step="12h", batch_size=1)
        message = refusal(lambda: Store.open(config).read_outputs(stores.times(12)[6:7], ALL))
        assert "total_precipitation is 50.00" in message
        assert " at 2000-01-02T12:00, row 3, column 2, but" in message


class TestKeys:
    def test_wider_narrower_and_none(self, tmp_path: Path) -> None:
        config = config_of_changed_store(tmp_path, spike("2m_temperature", 380.0))
        assert "380 at" in refusal(lambda: read_all(config))
        for limits in ([150, 400], None):
            read_all(replace(config, limits={"2m_temperature": limits}))
        narrower = replace(config, limits={"2m_temperature": [279, 281]})
        assert "but its limits are 279 to 281" in refusal(lambda: read_all(narrower))

    def test_one_level_by_any_name(self, tmp_path: Path) -> None:
        config = config_of_changed_store(tmp_path, spike("temperature", 0.0, level=850))
        for name in ("temperature_850", "t", "T850", "t_850"):
            read_all(stores.config(config.store, limits={name: None}))
        for name in ("temperature_500", "t_500"):
            spoilt = stores.config(config.store, limits={name: None})
            assert "temperature on level 850" in refusal(lambda spoilt=spoilt: read_all(spoilt))

    def test_a_variable_that_is_not_read(self, tmp_path: Path) -> None:
        config = config_of_changed_store(
            tmp_path, lambda data: None, limits={"2m_temprature": [1, 2]}
        )
        assert "data.limits.2m_temprature: no list" in refusal(lambda: read_all(config))
        assert "Nearest: 2m_temperature" in refusal(lambda: read_all(config))

    @each("value", [[1], [2, 1], [1, "x"], "cold", 5, [1, True], {"low": 1}])
    def test_what_is_no_range(self, value: Any) -> None:
        message = refusal(lambda: stores.config("in.zarr", limits={"solar": value}))
        assert message.startswith("data.limits.solar: needs [low, high], like [150, 350], or null")


class TestPhysical:
    def test_the_docs_have_them(self) -> None:
        page = (Path(__file__).parents[2] / "docs/data-limits.md").read_text()
        rows = re.findall(r"^\| (.*`.*) \| (\S+) to (\S+)( .*)? \|$", page, re.MULTILINE)
        documented = {}
        for names, low, high, unit in rows:
            for pattern in re.findall(r"`([\w*?]+)`", names):
                for name in fnmatch.filter(KNOWN_VARIABLES, pattern):
                    documented[name] = (float(low), float(high), unit.strip())
        for name, known in KNOWN_VARIABLES.items():
            found = physical_range(name, VariableInfo(True), None, known.unit)
            assert found is not None
            unitless = documented[name][2] == ""
            assert documented[name] == (*found, "" if unitless else known.unit), name
        at_500 = physical_range("geopotential", VariableInfo(True), 500, "")
        assert at_500 is not None
        assert f"{at_500.low:.0f} to {at_500.high:.0f} m2 s-2 |" in page

    @each(
        "level, usual, height",
        [(1, 470e3, 48e3), (50, 200e3, 20e3), (250, 102e3, 10.4e3), (500, 56e3, 5.7e3)],
    )
    def test_geopotential_by_level(self, level: int, usual: float, height: float) -> None:
        found = physical_range("geopotential", VariableInfo(True), level, "m2 s-2")
        assert found is not None
        assert found.low < usual < found.high
        assert height < found.low

    def test_sums_over_several_days(self, tmp_path: Path) -> None:
        store = Store.open(config_of_changed_store(tmp_path, lambda data: None))
        channel = Channel("toa_incident_solar_radiation")
        of_step = {}
        for step in ("6h", "10d"):
            config = replace(store.config, step=step)
            variables = {channel.variable: VariableInfo(True, units="J m-2")}
            of_step[step] = ValueLimits(SimpleNamespace(variables=variables), config).range_of(
                channel
            )
        assert of_step == {"6h": ValueRange(-3e8, 3e8), "10d": ValueRange(-3e9, 3e9)}

    def test_names(self) -> None:
        given = ValueRange(150.0, 350.0)
        for name in ("2m_temperature", "2t", "t2m"):
            assert physical_range(name, VariableInfo(True), None, "K") == given
        by_standard_name = VariableInfo(True, standard_name="air_pressure_at_mean_sea_level")
        assert physical_range("psl", by_standard_name, None, "Pa") == ValueRange(8e4, 1.2e5)
        at_500 = physical_range("geopotential", VariableInfo(True), 500, "m2 s-2")
        assert physical_range("z", VariableInfo(True), 500, "") == at_500
        for name in ("z_500", "z500", "Z500", "geopotential_500"):
            assert physical_range(name, VariableInfo(True), None, "m2 s-2") == at_500, name
        of_model_levels = VariableInfo(True, model_levels=True)
        found = physical_range("geopotential", of_model_levels, 137, "m2 s-2")
        assert found is not None
        assert found.high > 1e6

    def test_units(self) -> None:
        found = physical_range("2m_temperature", VariableInfo(True), None, "degC")
        assert found is not None
        np.testing.assert_allclose(found, (150 - 273.15, 350 - 273.15))
        assert physical_range("2m_temperature", VariableInfo(True), None, "furlong") is None
        assert physical_range("zebra", VariableInfo(True), None, "K") is None


@given(
    shape=st.tuples(*[st.integers(1, 4)] * 2, st.integers(0, 9), st.integers(1, 9)),
    large=st.booleans(),
    flipped=st.booleans(),
    gap=st.booleans(),
)
def test_extremes(shape: tuple[int, ...], large: bool, flipped: bool, gap: bool) -> None:
    if large:
        shape = (*shape[:2], 190, 181)
    values = np.random.default_rng(sum(shape)).normal(size=shape).astype("f4")
    if gap and values.size:
        values[0, -1, 0, 0] = np.nan
    lowest, highest = extremes(values[:, :, ::-1] if flipped else values)
    assert lowest.shape == highest.shape == shape[:2]
    if values.size:
        np.testing.assert_array_equal(lowest, values.min(axis=(2, 3)))
        np.testing.assert_array_equal(highest, values.max(axis=(2, 3)))


def test_values_that_can_not_be_are_not_prepared(tmp_path: Path) -> None:
    path = Path(config_of_changed_store(tmp_path, spike("2m_temperature", 9e36)).store)
    with pytest.raises(UserError, match=r"in\.zarr, chunk 2m_temperature/c/5/0/0: 2m_"):
        requests.prepared(path, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()
