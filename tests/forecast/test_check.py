"""`check_forecast` reads every chunk and reports damage."""

import os
import shutil

import netCDF4
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from credit_dp.forecast.check import check_forecast
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.training.masked_stores import SEA, sea_config

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CHUNK = "temperature/c.1.2.0.0.0"  # of 2000-01-04T12 +18h


@pytest.fixture
def store(whole, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(whole, tmp_path / "copy.zarr")


def damage_lines(path) -> list[str]:
    """Return the lines about a damaged forecast."""
    finding = check_forecast(str(path))
    assert not finding.complete
    first, *rest = finding.lines()
    assert str(finding.forecast.path) in first
    assert all("\n" not in line for line in rest)
    return rest


def test_a_chunk_that_is_not_what_was_written(store):
    chunk = store / CHUNK
    content = chunk.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (content[:-7], bytes(flipped), bytes(len(content))):
        chunk.write_bytes(damaged)
        (line,) = damage_lines(store)
        assert "damaged: " in line
        assert "temperature 2000-01-04T12 +18h, rows 0 to 16: can't be decoded" in line


def test_values_that_can_not_be(store):
    array = zarr.open_array(LocalStore(store), path="2m_temperature", mode="r+")
    array[0, 1, 3, :2] = np.nan
    array[1, 3] = np.inf
    one, other = damage_lines(store)
    assert "2m_temperature 2000-01-04T00 +12h, rows 0 to 16: has NaN or infinite values on 2" in one
    assert "2m_temperature 2000-01-04T12 +24h" in other


def test_wrong_coordinates(store):
    for name, first, line in (
        ("time", 876612, "time: has 876612 instead of 876648"),
        ("prediction_timedelta", 0, "prediction_timedelta: has 0 instead of 6"),
        ("latitude", 0, "latitude: has 0.0 instead of 90.0"),
        ("level", 0, "level: has 0 instead of 500"),
    ):
        zarr.open_array(LocalStore(store), path=name, mode="r+")[0] = first
        assert line in "\n".join(damage_lines(store))


def test_what_is_lacking(store):
    shutil.rmtree(store / "longitude")
    array = zarr.open_array(LocalStore(store), path="time", mode="r+")
    array.attrs["units"] = "days since 1900-01-01"
    temperature = zarr.open_array(LocalStore(store), path="temperature", mode="r+")
    temperature.resize((1, *temperature.shape[1:]))
    lines = "\n".join(damage_lines(store))
    assert "longitude: is missing" in lines
    assert "time: its units is 'days since 1900-01-01', not 'hours since 1900-01-01'" in lines
    assert "temperature: has 1 time x 4 prediction_timedelta x 3 level" in lines
    (store / "level/zarr.json").write_text("{")
    assert "level: has no metadata that can be read" in "\n".join(damage_lines(store))


def test_many_faults_are_a_few_lines(store):
    for chunk in (store / "geopotential").glob("c.*"):
        chunk.write_bytes(b"nothing")
    lines = damage_lines(store)
    assert len(lines) == 6
    assert lines[-1] == "  and 3 more"


@pytest.mark.slow
def test_files_of_ranks(bands, tmp_path):
    folder = shutil.copytree(bands, tmp_path / "copy")
    path = min(folder.glob("*.nc"))
    with netCDF4.Dataset(path, "a") as file:
        file["longitude"][1] = 0.5
        file["2m_temperature"][0, 0, 1, 0, 0] = np.nan
    cut = max(folder.glob("*.nc"))
    os.truncate(cut, cut.stat().st_size // 2)
    lines = "\n".join(damage_lines(folder))
    assert f"{path}: longitude: has 0.5 instead of 22.5" in lines
    assert "2m_temperature 2000-01-04T00 +12h, member 0, rows 0 to 5: has NaN" in lines
    assert f"{cut}: can't be opened" in lines


@pytest.mark.slow
def test_gaps_are_where_they_were(tmp_path):
    config = sea_config(tmp_path, steps=2)
    leave_checkpoint(config)
    found = forecast(forecast_config(config, tmp_path / "f.zarr", lead="12h"))
    assert check_forecast(str(found)).complete
    array = zarr.open_array(LocalStore(found), path=SEA, mode="r+")
    array[1, 1, -1] = np.nan
    (line,) = damage_lines(found)
    assert f"{SEA} 2000-01-04T12 +12h" in line
    assert "has values at other points than the fields before it" in line
