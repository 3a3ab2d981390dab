"""`credit-dp seams`: what it finds in stores of others and of ours, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.domain_parallel.partition import BANDS
from tests.command.answers import answer
from tests.evaluation import forecasts

ROWS = 32
EDGES = (8, 16, 24)


def made(seed: int = 1) -> xr.Dataset:
    """Random walks with latitude."""
    data = forecasts.forecast(forecasts.truth(rows=ROWS, columns=24))
    random = np.random.default_rng(seed)
    for name in data.data_vars:
        noise = random.normal(size=data[name].shape).astype("f4")
        data[name] = (data[name].dims, noise.cumsum(axis=data[name].dims.index("latitude")))
    return data


def broken() -> xr.Dataset:
    """The third band of one variable is a column further east."""
    data = made()
    field = data["2m_temperature"]
    band = field.isel(latitude=slice(16, 24))
    field.values[..., 16:24, :] = 5 + np.roll(band.values, 7, axis=-1)
    return data


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    forecasts.write(made(), path / "whole.zarr")
    forecasts.write(broken(), path / "broken.zarr")
    forecasts.write(forecasts.truth(), path / "truth.zarr")
    return path


def ask(monkeypatch: pytest.MonkeyPatch, stores: Path, *keys: str) -> tuple[int, str, str]:
    monkeypatch.chdir(stores)
    with monkeypatch.context() as inner:
        return answer(inner, "seams", *keys, program="credit-dp")


def test_whole_forecasts_have_no_seams(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    code, said, _ = ask(monkeypatch, stores, "forecast=whole.zarr", "bands=4")
    assert code == 0
    assert said.splitlines()[0] == "whole.zarr: 4 bands, edges at rows 8, 16, 24; 2 initial times"
    assert said.endswith("\nno seams\n")
    assert len(said.splitlines()) == 2 + 1 + 7 + 2


def test_seams_are_found_and_told(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    keys = ("forecast=broken.zarr", "edges=[8,16,24]", "hours=[6,24]", "out=seams.csv")
    code, said, _ = ask(monkeypatch, stores, *keys)
    assert code == 1
    assert "SEAMS in 2 of 14 fields (!): above all in 2m_temperature at " in said
    assert [line.split()[0] for line in said.splitlines() if "!" in line][:-1] == ["2m_temperature"]
    rows = list(csv.DictReader((stores / "seams.csv").read_text().splitlines()))
    far = [row for row in rows if row["seam"] == "True"]
    assert {row["variable"] for row in far} == {"2m_temperature"}
    assert {row["edge"] for row in far} >= {"16", "24"}
    assert "8" not in {row["edge"] for row in far}
    code, _, _ = ask(monkeypatch, stores, *keys[:3], "out=seams.json")
    told = json.loads((stores / "seams.json").read_text())
    assert told["edges"] == list(EDGES)
    assert len(told["fields"]) == len(rows)


def test_bands_elsewhere_are_not_blamed(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    keys = ("forecast=broken.zarr", "variables=[temperature]", "levels=[850]", "bands=4")
    assert ask(monkeypatch, stores, *keys)[0] == 0
    assert ask(monkeypatch, stores, "forecast=broken.zarr", "edges=[12]")[0] == 0


def test_rows_without_values_are_no_seam(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a globe without values, whose end is an edge and which has edges within."""
    data = made()
    data["2m_temperature"][{"latitude": slice(16, None)}] = np.nan
    forecasts.write(data, tmp_path / "half.zarr")
    code, said, _ = ask(monkeypatch, tmp_path, "forecast=half.zarr", "bands=4", "out=half.csv")
    assert (code, said.splitlines()[-1]) == (0, "no seams")
    rows = list(csv.DictReader((tmp_path / "half.csv").read_text().splitlines()))
    across = [
        row for row in rows if (row["variable"], row["pairs"]) == ("2m_temperature", "across")
    ]
    by_edge = {row["edge"]: row["ratio"] for row in across if row["lead_hours"] == "24.0"}
    assert (by_edge["16"], by_edge["24"]) == ("", "")
    assert by_edge["all"] == by_edge["8"] != ""


@pytest.mark.parametrize("rises", [False, True])
def test_files_of_bands_say_where_edges_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rises: bool
) -> None:
    """Uneven ones, of somebody else, and from the south."""
    data = broken()
    data = data.isel(latitude=slice(None, None, -1)) if rises else data
    for number, rows in enumerate((slice(0, 16), slice(16, 24), slice(24, None))):
        rows = slice(ROWS - (rows.stop or ROWS), ROWS - rows.start) if rises else rows
        forecasts.write(data.isel(latitude=rows), tmp_path / f"rank{number}.nc")
    code, said, _ = ask(monkeypatch, tmp_path, "forecast=*.nc", "hours=[24]")
    assert code == 1
    assert "3 bands, edges at rows 16, 24;" in said


def test_stores_of_ours_say_their_bands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forecasts.write(broken().assign_attrs({BANDS: [0, 8, 16, 24, 32]}), tmp_path / "a.zarr")
    code, said, _ = ask(monkeypatch, tmp_path, "forecast=a.zarr", "hours=[24]")
    assert code == 1
    assert "edges at rows 8, 16, 24;" in said


def test_rows_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    keys = ("forecast=broken.zarr", "bands=4", "hours=[24]", "levels=[850]")
    whole = ask(monkeypatch, stores, *keys)[1]
    monkeypatch.setattr("credit_dp.evaluation.seam_scan.BLOCK_BYTES", 1)
    monkeypatch.setattr(
        "credit_dp.evaluation.forecast_store.ForecastStore.rows_together", lambda *_: 5
    )
    monkeypatch.chdir(stores)
    code, said, _ = answer(monkeypatch, "seams", *keys, program="credit-dp")
    assert (code, said) == (1, whole)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ([], "does not say what bands of rows it was computed in"),
        (["bands=1"], "bands: needs at least 2 bands"),
        (["bands=0"], "bands: needs a number of 2 to 16, got [0]"),
        (["bands=[2,4]"], "bands: needs a number of 2 to 16, got [2, 4]"),
        (["bands=four"], "bands: needs a list of whole numbers"),
        (["bands=10"], "10 bands of 32 rows are too narrow"),
        (["edges=[8,99]"], "edges: 99 has not two rows on either side, of 32 rows"),
        (["edges=[0,8]"], "edges: 0 has not two rows"),
        (["edges=[16,8]"], "edges: need to rise, got [16, 8]"),
        (["edges=[8]", "bands=2"], "no use beside edges="),
        (["bands=2", "levels=[7]"], "has no level 7. There are: 500, 850, 1000"),
        (["bands=2", "hours=[7]"], "no lead time of 7 hours"),
        (["bands=2", "variables=[wind]"], "no forecast of wind"),
        (["bands=2", "dates=[1999-01-01,1999-02-01]"], "no initial time from 1999-01-01"),
        (["bands=2", "out=x.txt"], "out: needs a name that ends in .csv or .json"),
        (["bands=2", "out=nowhere/x.csv"], "can't be written (no folder nowhere)"),
        (["bands=2", "out=whole.zarr/zarr.json/x.csv"], "can't be written (no folder whole.zarr"),
        (["bands=2", "forecast=nowhere.zarr"], "nowhere.zarr: no such zarr store. Set forecast"),
        (["bands=2", "forecast=truth.zarr"], "forecasts need the dims time (initial time)"),
        (["bnads=2"], "Did you mean bands?"),
        (["forecast="], "forecast: needs the store of forecasts"),
    ],
)
def test_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, stores: Path, keys: list[str], part: str
) -> None:
    before = sorted(stores.rglob("*"))
    code, said, complaints = ask(monkeypatch, stores, "forecast=whole.zarr", *keys)
    assert (code, said) == (2, "")
    lines = [line for line in complaints.splitlines() if not line.startswith("looking for")]
    assert len(lines) == 1
    assert part in lines[0]
    assert sorted(stores.rglob("*")) == before


def test_an_output_is_not_written_over(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    (stores / "kept.csv").write_text("x")
    keys = ("forecast=whole.zarr", "bands=4", "out=kept.csv")
    code, _, complaints = ask(monkeypatch, stores, *keys)
    assert (code, (stores / "kept.csv").read_text()) == (2, "x")
    assert "kept.csv: exists already. Change out" in complaints


def test_help_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, complaints = answer(monkeypatch, "seams", "--help", program="credit-dp")
    assert (code, complaints) == (0, "")
    assert said.startswith("credit-dp seams forecast=STORE")
