import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credit_dp.cli.data_commands import as_text
from credit_dp.data.channels import Channel
from credit_dp.data.inspection import band_read_amplification, inspect_source, report_time_axis
from credit_dp.data.sources.opening import open_source
from credit_dp.domain_parallel.partition import RowPartition
from tests.cli.invocation import answer, assert_refused
from tests.data import prepared_stores, stores
from tests.tier_cases import tiers


@pytest.fixture
def store(tmp_path: Path) -> Path:
    data = stores.dataset(rows=12, columns=8, steps=12).isel(time=[0, 1, 2, 5, 6, 7, 8, 10, 11])
    data["temperature"].attrs = {"units": "K", "standard_name": "air_temperature"}
    return stores.write(data, tmp_path / "in.zarr")


def ask(monkeypatch: pytest.MonkeyPatch, *keys: str) -> Any:
    code, said, complaints = answer(monkeypatch, "data", "inspect", *keys, "--json", program="")
    assert (code, complaints) == (0, "")
    return json.loads(said)


def test_everything_is_reported(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    code, said, complaints = answer(monkeypatch, "data", "inspect", f"store={store}", program="")
    assert (code, complaints) == (0, "")
    assert "12 x 8 with rows on the poles, latitude 90 to -90, longitude 0 to 315" in said
    assert "9, from 2000-01-01T00:00 to 2000-01-03T18:00, every 6 hours, 2 gaps, 3 times" in said
    assert "2 missing between 2000-01-01T12:00 and 2000-01-02T06:00" in said
    assert "3: 500 to 1000" in said
    assert "1x3x12x8" in said
    assert "air_temperature" in said
    assert "share the reading" in said
    assert "read amplification: what a rank decodes" in said
    assert f"credit-dp data prepare store={store} out=prepared.zarr 'domains=[1,2,4,8]'" in said


def test_json_has_it_all(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    report = ask(monkeypatch, f"store={store}", "domain=3")
    assert report["grid"] == [12, 8]
    assert report["poles"] is True
    assert report["dates"]["missing"] == 3
    assert report["dates"]["gaps"][1] == {
        "after": "2000-01-03T00:00",
        "before": "2000-01-03T12:00",
        "missing": 1,
    }
    [temperature] = [v for v in report["variables"] if v["name"] == "temperature"]
    assert temperature["units"] == "K"
    assert temperature["levels"] == list(stores.LEVELS)
    assert temperature["chunks"]["shape"] == [1, 3, 12, 8]
    assert report["sample_bytes"] == 8 * 12 * 8 * 4
    assert report["amplification"] == {"3": 3.0}
    assert report["decoded_bytes"] == {"3": report["sample_bytes"]}


CHUNKS = [(2, 5, 1, False), (5, 12, 4, False), (5, 3, 1, True)]
OTHER_CHUNKS = [
    case
    for ranks, chunk in product((2, 5), (3, 5, 12))
    for times, flipped in ((1, False), (4, False), (1, True))
    if (case := (ranks, chunk, times, flipped)) not in CHUNKS
]


@pytest.mark.parametrize(("ranks", "chunk", "times", "flipped"), tiers(CHUNKS, [], OTHER_CHUNKS))
def test_reported_bytes_are_those_that_are_read(
    tmp_path: Path, ranks: int, chunk: int, times: int, flipped: bool
) -> None:
    """Compare with the bytes that the store counts when each band of one time is read."""
    data = stores.dataset(rows=12, columns=8, steps=8)[["geopotential", "2m_temperature"]]
    if flipped:
        data = data.isel(latitude=slice(None, None, -1))
    sizes = {"time": times, "latitude": chunk}
    path = stores.write(data, tmp_path / "in.zarr", chunks=sizes)
    source = open_source(stores.config(path))
    report = inspect_source(source, (ranks,))
    channels = [*(Channel("geopotential", level) for level in stores.LEVELS)]
    channels.append(Channel("2m_temperature"))
    worst, most = 0.0, 0
    bands = RowPartition.balanced(12, ranks)
    for rank in range(ranks):
        before = source.bytes_read
        source.read(channels, slice(1, 2), bands.rows(rank))
        read = source.bytes_read - before
        worst = max(worst, read / (4 * 4 * bands.sizes[rank] * 8))
        most = max(most, read)
    # The report is of the worse order of rows: not every store tells from which pole it counts.
    found = report.amplification[ranks]
    assert found == pytest.approx(worst) if chunk in (3, 12) else found >= worst - 1e-9
    assert report.decoded_bytes[ranks] >= most


def test_levels_in_one_chunk_count(tmp_path: Path) -> None:
    assert band_read_amplification((1, 13, 10, 4), 13, 10, 1) == 1
    assert band_read_amplification((1, 13, 10, 4), 3, 10, 1) == pytest.approx(13 / 3)
    assert band_read_amplification((5, 1, 10, 4), 3, 10, 2) == 10


@pytest.mark.slow
def test_a_prepared_store_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = prepared_stores.write(stores.dataset(), tmp_path / "in.zarr", chunk_rows=3)
    report = ask(monkeypatch, f"store={path}", "domain=4")
    assert report["form"] == "prepared"
    assert report["amplification"] == {"4": 1.0}
    assert report["advice"] == ["Every rank reads little more than its own rows: nothing to do."]


def test_the_long_names_of_short_ones_are_reported(tmp_path: Path) -> None:
    short = {"geopotential": "z", "2m_temperature": "t2m", "land_sea_mask": "lsm"}
    path = stores.write(stores.dataset().rename(short), tmp_path / "in.zarr")
    report = inspect_source(open_source(stores.config(path)), (1,))
    assert report.long_names == short
    assert {variable.name for variable in report.variables} >= {"z", "t2m", "temperature"}
    said = as_text(report, [str(path)])
    assert "A config may also use these names: " in said
    assert "geopotential (z)" in said


def test_chunks_of_several_times_are_named_and_the_advice_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "my era5"
    folder.mkdir()
    path = stores.write(stores.dataset(), folder / "in.zarr", chunks={"time": 4})
    report = ask(monkeypatch, f"store={path}", "domain=1")
    assert report["amplification"] == {"1": 4.0}
    _, said, _ = answer(monkeypatch, "data", "inspect", f"store={path}", "domain=3", program="")
    lines = said.splitlines()
    factors = next(lines[i + 1] for i, x in enumerate(lines) if "by times and levels  by rows" in x)
    assert factors.split()[:4] == ["3", "12.00", "4.00", "3.00"]
    assert any("up to 4 times" in line for line in report["advice"])
    assert not any("share the reading" in line for line in report["advice"])
    words = shlex.split(ask(monkeypatch, f"store={path}")["advice"][-1])
    assert words[:3] == ["credit-dp", "data", "prepare"]
    assert f"store={path}" in words
    assert "domains=[1,2,4,8]" in words


@pytest.mark.exhaustive
def test_any_path_is_taken_and_its_advice_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("year=2000", "a b=[1]", "x(1)", "it's #1", "a,b"):
        path = str(stores.write(stores.dataset(), tmp_path / name))
        report = ask(monkeypatch, f'store="{path}"' if "," in name else f"store={path}")
        assert report["where"] == path
        again = shlex.split(report["advice"][-1])[3]
        assert ask(monkeypatch, again)["where"] == path


def test_one_time_has_no_gaps() -> None:
    report = report_time_axis(stores.times(1).astype("M8[ns]"))
    assert (report.count, report.gaps, report.spacing_hours) == (1, (), None)


def test_months_are_counted_as_months(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    months = np.delete(np.arange("2000-01", "2002-01", dtype="M8[M]"), [5, 6])
    data = stores.dataset(rows=9, columns=8, steps=22).assign_coords(time=months.astype("M8[ns]"))
    path = stores.write(data, tmp_path / "in.zarr")
    code, said, _ = answer(monkeypatch, "data", "inspect", f"store={path}", program="")
    assert code == 0
    assert "every 1 month, 1 gap, 2 times missing" in said
    assert "2 missing between 2000-05-01T00:00 and 2000-08-01T00:00" in said


def test_one_date_is_no_distance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = stores.dataset(rows=6, columns=8, steps=1)
    path = stores.write(data, tmp_path / "in.zarr")
    code, said, _ = answer(monkeypatch, "data", "inspect", f"store={path}", program="")
    assert code == 0
    assert "dates   1, 2000-01-01T00:00\n" in said
    # No more ranks than rows.
    assert list(inspect_source(open_source(stores.config(path)), (1, 4, 8)).amplification) == [1, 4]


def test_a_store_with_nothing_usable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = stores.dataset(rows=9, columns=8, steps=3)[["temperature"]].rename(level="soil")
    path = stores.write(data, tmp_path / "in.zarr")
    code, said, _ = answer(monkeypatch, "data", "inspect", f"store={path}", program="")
    assert code == 2
    assert "Nothing to train on: no variable that changes in time can be read: temperature" in said
    assert "nothing to do" not in said


def test_refused_in_one_line(store: Path) -> None:
    table = {
        "domain=13": "domain: needs a number of ranks from 1 to 12",
        "domian=2": "Did you mean domain?",
        "a/b.zarr": "needs keys like domain, store, ",
        "store=a,b": """store=\\[a,b\\].*'store="a,b"'""",
    }
    assert_refused(table, "data inspect", f"store={store}")


def test_gaps_are_counted_by_the_usual_spacing() -> None:
    times = stores.times(10)[[0, 1, 2, 6, 7, 9]].astype("M8[ns]")
    report = report_time_axis(times)
    assert report.spacing_hours == 6
    assert [gap.missing for gap in report.gaps] == [3, 1]
    assert report.missing == 4
    assert np.diff(times).min() == np.timedelta64(6, "h")
