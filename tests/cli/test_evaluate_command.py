"""`credit-dp evaluate`: its output and files; it writes all files or none."""

import base64
import csv
import json
import logging
import re
import shutil
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas
import pytest
import xarray as xr
import zarr

from credit_dp.evaluation.metrics import LATITUDE_BANDS
from credit_dp.forecast.format import SETTINGS_ATTRIBUTE
from credit_dp.sphere import EARTH_RADIUS
from tests.cli.invocation import answer, assert_refused
from tests.evaluation import forecasts
from tests.forecast.grib_files import write_grib
from tests.plots import failing_plots

FILES = [
    *("rank_histograms.csv", "scorecard.html", "scores.csv", "scores.json", "scores_by_date.zarr"),
    "spectra.csv",
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with truth, climatology and an ensemble."""
    path = tmp_path_factory.mktemp("stores")
    observed = forecasts.truth()
    forecasts.write(observed, path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), path / "climatology.zarr")
    forecasts.write(forecasts.forecast(observed, members=2), path / "forecast.zarr")
    (path / "empty").mkdir()
    zarr.save_array(path / "array", np.zeros(3))
    return path


KEYS = {
    "forecast": "forecast.zarr",
    "truth": "truth.zarr",
    "out": "new",
    "climatology": "climatology.zarr",
}


def ask(monkeypatch: pytest.MonkeyPatch, stores: Path, *keys: str) -> tuple[int, str, str]:
    given = {**KEYS, **dict(key.split("=", 1) for key in keys)}
    monkeypatch.chdir(stores)
    monkeypatch.setenv("CREDIT_DP_CACHE", str(stores / "cache"))
    texts = [f"{key}={value}" for key, value in given.items()]
    with monkeypatch.context() as inner:
        return answer(inner, "evaluate", *texts, program="credit-dp")


class Page(HTMLParser):
    """Parses a page: rows of cells by table, and every address outside of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        found = [given[key] or "" for key in ("src", "href") if key in given]
        self.addresses += [address for address in found if not address.startswith("#")]
        if tag == "table":
            self.tables[given["id"] or ""] = []
        if tag == "tr":
            list(self.tables.values())[-1].append([])
        if tag in ("td", "th"):
            list(self.tables.values())[-1][-1].append("")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            list(self.tables.values())[-1][-1][-1] += data


def test_everything_is_written(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    few = ("variables=[2m_temperature,temperature]", "levels=[850]")
    code, said, complaints = ask(monkeypatch, stores, *few, "regions=[tropics]", "out=out")
    assert (code, complaints) == (0, "")
    assert "2 initial times, 2 members" in said
    assert re.search(r"^24 h, tropics +unit +RMSE", said, re.MULTILINE)
    assert re.search(r"^24 h +unit +RMSE +RMSE persist. +RMSE climat. +ACC", said, re.MULTILINE)
    assert said.endswith("out/scorecard.html\n")
    assert sorted(path.name for path in (stores / "out").iterdir()) == FILES
    rows = list(csv.DictReader((stores / "out" / "scores.csv").read_text().splitlines()))
    results = json.loads((stores / "out" / "scores.json").read_text())
    assert results["lead_hours"] == [0, 6, 24]
    for row in rows:
        level = f"_{row['level']}" if row["level"] else ""
        nested = results["regions"].get(row["region"], results["scores"])
        scores = nested[f"{row['variable']}{level}"][row["score"]]
        value = scores[f"{row['lead_hours']}h"][row["of"]]
        assert value is None if row["value"] == "" else float(row["value"]) == value
    assert {row["of"] for row in rows} == {"forecast", "persistence", "climatology", "truth"}
    assert len(rows) == 2 * 2 * 3 * (3 + 2 + 3 + 2 + 3 + 2 * 3 + 3 + 1)
    assert {row["region"] for row in rows} == {"global", "tropics"}
    ranks = (stores / "out" / "rank_histograms.csv").read_text().splitlines()
    assert len(ranks) == 1 + 2 * 3 * 3
    check_page((stores / "out" / "scorecard.html").read_text(), results)


def check_page(text: str, results: dict[str, object]) -> None:
    """Check that a page is complete, self-contained, and has the JSON's numbers to three digits."""
    page = Page(text)
    assert page.open == []
    assert list(page.tables) == [
        *("card-persistence", "card-climatology"),
        *("rmse", "acc", "bias", "activity", "crps", "crps_500km", "crps_1000km"),
        *("energy_score", "spread"),
        *("rmse-tropics", "acc-tropics"),
    ]
    pictures = [address.split(",")[1] for address in page.addresses]
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert len(pictures) == 9 + 2 * 3 + 1 + 2  # scores, bands of latitude, ranks, maps
    for address, picture in zip(page.addresses, pictures, strict=True):
        content = base64.b64decode(picture)
        if address.startswith("data:image/svg"):
            assert ElementTree.fromstring(content).tag.endswith("svg")
        else:
            assert content.startswith(b"\x89PNG")
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(?!data:)\w", text)
    head, names, *lines = page.tables["rmse"]
    assert head[2:] == ["24 h"]
    assert names == ["field", "unit", "forecast", "persistence", "climatology"]
    scores = results["scores"]
    assert isinstance(scores, dict)
    for line in lines:
        wanted = scores[line[0]]["rmse"]["24h"].values()
        assert [float(cell) for cell in line[2:]] == pytest.approx(list(wanted), rel=6e-3)
    for baseline in ("persistence", "climatology"):
        head, *lines = page.tables[f"card-{baseline}"]
        assert head[2:] == ["6 h", "24 h"]
        assert len(lines) == len(scores)
        for variable, level, early, late in lines:
            errors = scores["_".join([*variable.split(), level]).rstrip("_")]
            for cell, lead in ((early, "6h"), (late, "24h")):
                forecast, other = (errors["rmse"][lead][of] for of in ("forecast", baseline))
                percent = float(cell.replace("\N{MINUS SIGN}", "-"))
                assert percent == pytest.approx(100 * (forecast / other - 1), abs=0.51)


SEA = "sea_surface_temperature"
BAND = "60S to 30S"
LAND = [(0, slice(None)), (2, 3), (4, slice(0, 2))]  # none in the row at 45 degrees south


@pytest.fixture(scope="module")
def sea_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with truth, climatology and forecast of a temperature without values on land."""
    path = tmp_path_factory.mktemp("sea")
    observed = forecasts.truth()[["2m_temperature"]]
    observed[SEA] = observed["2m_temperature"] + 5
    for row, column in LAND:
        observed[SEA].values[:, row, column] = np.nan
    mean = forecasts.climatology(observed.assign_coords(level=[500])).fillna(290)
    # The forecast has values on land, too, which are not scored.
    made = forecasts.forecast(observed.fillna(300))
    for name, data in {"truth": observed, "forecast": made, "climatology": mean}.items():
        forecasts.write(data, path / f"{name}.zarr")
    return path


@pytest.mark.slow
def test_fields_with_points_without_values_have_all_figures(
    monkeypatch: pytest.MonkeyPatch, sea_stores: Path
) -> None:
    code, _, complaints = ask(monkeypatch, sea_stores, f"masked=[{SEA}]")
    assert (code, complaints) == (0, "")
    page = (sea_stores / "new" / "scorecard.html").read_text()
    names = r"all points, or they are all\s*equal: ([^<]*)\.</p>"
    assert re.findall(names, page) == [SEA, SEA]  # of the bands with land in their only row
    assert "This figure could not be drawn" not in page
    made = xr.open_zarr(sea_stores / "forecast.zarr", consolidated=False)
    observed = xr.open_zarr(sea_stores / "truth.zarr", consolidated=False)
    found = list(csv.DictReader((sea_stores / "new" / "spectra.csv").read_text().splitlines()))
    assert {row["variable"] for row in found} == {"2m_temperature", SEA}
    assert {row["band"] for row in found if row["variable"] == SEA and row["truth"]} == {BAND}
    for name in ("2m_temperature", SEA):
        day = made[name].isel(latitude=6).sel(prediction_timedelta=np.timedelta64(24, "h"))
        now = observed[name].isel(latitude=6).sel(time=day["time"] + np.timedelta64(24, "h"))
        rows = [row for row in found if row["variable"] == name and row["band"] == BAND]
        rows = [row for row in rows if row["lead_hours"] == "24"]
        assert [row["wavenumber"] for row in rows] == ["0", "1", "2", "3", "4"]
        for source, field in (("forecast", day), ("truth", now)):
            waves = np.fft.rfft(field.values.astype(float), axis=-1) / 8
            power = (np.abs(waves) ** 2).mean(axis=0) * 2 * np.pi * EARTH_RADIUS * np.sqrt(0.5)
            power[1:] *= 2
            assert [float(row[source]) for row in rows] == pytest.approx(power, rel=1e-9)


@pytest.mark.slow
def test_a_figure_that_fails_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, sea_stores: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such axis")

    monkeypatch.setattr("credit_dp.evaluation.score_folder.draw_spectrum", fail)
    with failing_plots():
        code, said, _ = ask(monkeypatch, sea_stores, f"masked=[{SEA}]", "out=without")
    assert code == 0
    assert said.endswith("without/scorecard.html\n")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    lines = [line.partition(":")[0] for line in warnings]
    assert lines == [f"spectra of {band}" for band in LATITUDE_BANDS]
    page = (sea_stores / "without" / "scorecard.html").read_text()
    assert page.count("This figure could not be drawn") == 3
    assert sorted(path.name for path in (sea_stores / "without").iterdir()) == FILES[1:]


def grib(path: Path) -> Path:
    """Write the ensemble of `forecasts` as GRIB."""
    made = forecasts.forecast(forecasts.truth(), members=2)
    for member, time, lead in product(
        (0, 1), made["time"].values, made["prediction_timedelta"].values
    ):
        state = made.sel(number=member, time=time, prediction_timedelta=lead)
        hours = int(lead / np.timedelta64(1, "h"))
        keys = {"productDefinitionTemplateNumber": 1, "number": member, "stepUnits": 1}
        write_grib(path, state, **keys, forecastTime=hours)
    return path


def test_forecasts_may_be_grib(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    monkeypatch.setattr("credit_dp.evaluation.score_folder.scorecard_page", lambda card: "")
    grib(stores / "f.grib")
    assert ask(monkeypatch, stores, "out=of-zarr")[0] == 0
    assert ask(monkeypatch, stores, "out=of-grib", "forecast=f.grib")[0] == 0
    wanted, found = (
        pandas.read_csv(stores / name / "scores.csv") for name in ("of-zarr", "of-grib")
    )
    pandas.testing.assert_frame_equal(found, wanted, rtol=1e-3)
    folder = stores / "several"
    folder.mkdir()
    shutil.copy(stores / "f.grib", folder)
    for forecast in ("several", "several/*.grib"):
        code, _, complaints = ask(monkeypatch, stores, "out=of-files", f'forecast="{forecast}"')
        assert code == 2
        assert "Join them, as with `cat several/*.grib > all.grib`, and give" in complaints


def test_the_forecast_of_a_run_is_found(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    monkeypatch.setattr("credit_dp.evaluation.score_folder.scorecard_page", lambda card: "")
    run = stores / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    code, _, complaints = ask(monkeypatch, stores, "forecast=run", "out=of-run")
    assert code == 2
    assert "run is the folder of a run without a forecast (forecast.zarr, forec" in complaints
    shutil.copytree(stores / "forecast.zarr", run / "forecast.zarr")
    keys = ("hours=[24]", "levels=[850]", "forecast=run", "out=of-run")
    assert ask(monkeypatch, stores, *keys)[0] == 0
    (run / "forecast.grib").touch()
    code, _, complaints = ask(monkeypatch, stores, "forecast=run", "out=of-two")
    assert code == 2
    assert "run has several forecasts, forecast.zarr, forecast.grib. Set it to one" in complaints
    shutil.rmtree(run)


@pytest.mark.slow
def test_bands_in_files_of_their_own_are_joined(
    monkeypatch: pytest.MonkeyPatch, stores: Path
) -> None:
    made = forecasts.forecast(forecasts.truth(), members=2)
    monkeypatch.setattr("credit_dp.evaluation.score_folder.scorecard_page", lambda card: "")
    (stores / "bands").mkdir()
    for number, rows in enumerate((slice(0, 4), slice(4, 6), slice(6, None))):
        forecasts.write(made.isel(latitude=rows), stores / "bands" / f"{number}.nc")
    assert ask(monkeypatch, stores, "hours=[24]", "levels=[850]", "out=one")[0] == 0
    assert (
        ask(monkeypatch, stores, "hours=[24]", "levels=[850]", "forecast=bands", "out=two")[0] == 0
    )
    one, two = ((stores / name / "scores.csv").read_text() for name in ("one", "two"))
    assert one == two


def test_the_truth_is_by_default_what_a_forecast_started_from(
    monkeypatch: pytest.MonkeyPatch, stores: Path
) -> None:
    """The truth may be several stores."""
    observed = forecasts.truth()
    monkeypatch.setattr("credit_dp.evaluation.score_folder.scorecard_page", lambda card: "")
    forecasts.write(observed[["2m_temperature"]], stores / "surface.zarr")
    forecasts.write(observed.drop_vars("2m_temperature"), stores / "upper.zarr")
    made = forecasts.forecast(observed, members=2)
    made.attrs[SETTINGS_ATTRIBUTE] = json.dumps({"stores": ["upper.zarr", "surface.zarr"]})
    forecasts.write(made, stores / "ours.zarr")
    for keys in (
        ("out=given",),
        ("truth=[upper.zarr,surface.zarr]", "out=both"),
        ("forecast=ours.zarr", "truth=", "out=own"),
    ):
        assert ask(monkeypatch, stores, "hours=[24]", "levels=[850]", *keys)[0] == 0
    given, *others = ((stores / out / "scores.csv").read_text() for out in ("given", "both", "own"))
    assert others == [given, given]


def _outside_cache(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "cache" not in path.parts)


REFUSED = {
    "forecast=nowhere.zarr": "nowhere.zarr: no such zarr store. Set forecast",
    "forecast=empty": "empty: not a zarr group that can be read (No group found). Set fore",
    "forecast=array": "array: not a zarr group that can be read (An array already exists). Se",
    "forecast=truth.zarr": "forecasts need the dims time (initial time)",
    "forecast=~nobody-has-this/x": "forecast: there is no home folder as in ~nobody-has-",
    "truth=~nobody-has-this/x": "truth: there is no home folder as in ~nobody-has-this/x",
    "climatology=~nobody-has-this/x": "climatology: there is no home folder as in",
    "out=~nobody-has-this/x": "out: there is no home folder as in ~nobody-has-this/x",
    "truth=forecast.zarr": "2m_temperature has the dims member, time, prediction_timedelta",
    "levels=[700]": "has no level 700",
    "levels=[low]": "levels: needs a list of whole numbers, like [24,72], got ['low']",
    "dates=[2000-01-02]": "dates: needs [first, last] in ISO format",
    "variables=[wind]": "no forecast of wind",
    "climatology_dates=[2000-01-01,2000-01-02]": "no effect together with climatology=",
    "truht=x": "Did you mean truth?",
    "truth=": "forecast.zarr does not say what it started from",
    "forecast=nowhere.zarr out=": "nowhere.zarr: no such zarr store. Set forecast",
    "out=": "out: needs the folder to write, like out=scores",
    "out=truth.zarr": "truth.zarr: exists already",
    "out=.": ".: exists already",
    "out=deep/er/new truth=nowhere.zarr": "nowhere.zarr: no such zarr store. Set truth",
    "variables=[temperature,temperature]": "^variables: needs each entry once",
    "limits=3": "limits: needs a table in braces, like {NAME:[A,B]}, got '3'",
    "limits={temperature:[9,1]}": "limits.temperature: needs [low, high]",
    "limits={temprature:null}": (
        "limits.temprature: there is no scored variable temprature. Nearest: temp"
    ),
    "out=truth.zarr/zarr.json/x": "can't be created (Not a directory). Change out",
}


def test_refused_in_one_line_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, stores: Path
) -> None:
    before = _outside_cache(stores)
    monkeypatch.chdir(stores)
    monkeypatch.setenv("CREDIT_DP_CACHE", str(stores / "cache"))
    assert_refused(REFUSED, "evaluate", *(f"{key}={value}" for key, value in KEYS.items()))
    code, _, complaints = ask(monkeypatch, stores, "limits={t:[300,400]}")  # after other scores
    assert (code, complaints.count("\n")) == (2, 1)
    assert "its limits are 300 to 400" in complaints
    assert _outside_cache(stores) == before


def test_nothing_is_left_of_what_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch, stores: Path
) -> None:
    """The last field that is read has NaN."""
    made = forecasts.forecast(forecasts.truth(), members=2)
    values = made["2m_temperature"].values.copy()
    values[-1, -1, -1, 0, 0] = float("nan")
    broken = made.assign({"2m_temperature": (made["2m_temperature"].dims, values)})
    forecasts.write(broken, stores / "broken.zarr")
    before = sorted(stores.rglob("*"))
    code, _, complaints = ask(monkeypatch, stores, "forecast=broken.zarr")
    assert (code, complaints.count("\n")) == (2, 1)
    assert "2m_temperature from 2000-01-02T12:00 at 24 h has NaN" in complaints
    assert sorted(stores.rglob("*")) == before


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("credit_dp.evaluation.score_folder.scorecard_page", lambda card: "")
    monkeypatch.setattr(Path, "write_text", full)
    code, _, complaints = ask(monkeypatch, stores, "hours=[6]", "out=full")
    assert (code, complaints.count("\n")) == (2, 1)
    assert "full: can't be written (No space left on device)" in complaints
    assert not list(stores.glob("*full*"))


def test_what_dates_contribute_is_on_the_disk_of_the_output(
    monkeypatch: pytest.MonkeyPatch, stores: Path
) -> None:
    """Not in the system's folder for temporary files, which may be in memory."""
    folders = []

    def note(dir: Path, **options: Any) -> Any:
        folders.append(Path(dir))
        return TemporaryFile(dir=dir, **options)

    monkeypatch.setattr("credit_dp.evaluation.scores_by_date.TemporaryFile", note)
    assert ask(monkeypatch, stores, "out=beside")[0] == 0
    assert [(folder.parent, folder.exists()) for folder in folders] == [(Path(), False)]


def test_help_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, complaints = answer(monkeypatch, "evaluate", "--help", program="credit-dp")
    assert (code, complaints) == (0, "")
    assert said.startswith("credit-dp evaluate forecast=STORE [truth=STORE] out=FOLDER")
