"""`credit-dp forecast plot`: what is drawn, of every form of forecast, and wrong keys."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from PIL import Image

from credit_dp.cli.forecast_plot import open_forecast, read_request
from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import figure_style
from credit_dp.evaluation.forecast_maps import Chart, ChartRequest, find_box, usual_name
from credit_dp.evaluation.forecast_series import (
    BANDS,
    SeriesRequest,
    draw_plume,
    find_fields,
    read_series,
)
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.map_projection import Box, box_of
from credit_dp.evaluation.maps import EARTH, SIMULATED
from credit_dp.forecast.format import SETTINGS_ATTRIBUTE
from tests.cli.invocation import answer, assert_refused
from tests.evaluation import forecasts


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a forecast as zarr store, one with members, and a region's."""
    folder = tmp_path_factory.mktemp("stored")
    observed = forecasts.truth()
    made = forecasts.forecast(observed)
    forecasts.write(made, folder / "forecast.zarr")
    forecasts.write(made, folder / "forecast.nc")
    forecasts.write(forecasts.forecast(observed, members=3), folder / "members.zarr")
    region = made.isel(latitude=slice(2, 6), longitude=slice(1, 5))
    forecasts.write(region, folder / "region.zarr")
    forecasts.write(region.isel(longitude=[0]), folder / "column.zarr")
    return folder


def plot(monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str, str]:
    return answer(monkeypatch, "forecast", "plot", *map(str, words), program="credit-dp")


def test_a_map_has_a_name_of_its_own(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = plot(monkeypatch, stored / "forecast.zarr", "edges=3")
    assert (code, err) == (0, "")
    written = stored / "forecast-geopotential-500-24h.png"
    assert out == f"{written}\n"
    with Image.open(written) as picture:
        assert picture.width > 900


def test_different_maps_have_different_names(stored: Path) -> None:
    store = ForecastStore.open(str(stored / "members.zarr"))
    request = request_of(lead="6h", init="2000-01-02T12:00", member=1, region="arctic")
    name = usual_name("a/members.zarr/", store, request, ".png")
    assert name == "members-geopotential-500-2000-01-02T1200-6h-member1-arctic.png"
    assert usual_name("m.nc", store, request_of(), ".gif") == "m-geopotential-500.gif"
    request = request_of(variable="2m_temperature", region="[35,75,-12.5,42]")
    name = usual_name("m.nc", store, request, ".png")
    assert name == "m-2m_temperature-35,75,-12.5,42.png"


def test_an_animation_has_a_frame_for_each_lead_time(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (stored / "forecast.nc", "variable=2m_temperature", f"out={tmp_path}/a.gif")
    code, out, err = plot(monkeypatch, *words)
    assert (code, out, err) == (0, f"{tmp_path}/a.gif (3 lead times)\n", "")
    with Image.open(tmp_path / "a.gif") as picture:
        assert picture.n_frames == len(forecasts.LEADS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


def test_a_chart_shows_the_field_that_it_is_for(stored: Path) -> None:
    """Read one at a time: level, lead time, initial time and member."""
    store = ForecastStore.open(str(stored / "members.zarr"))
    with xr.open_zarr(stored / "members.zarr", consolidated=False) as data:
        init = data["time"].values[1]
        request = ChartRequest("temperature", 850, 6, str(init)[:16], member=2)
        chart = Chart(store, "", request)
        wanted = data["temperature"].sel(level=850, prediction_timedelta="6h", time=init)
        shown = chart._read(chart.leads[0])
        rows = wanted.isel(number=2).transpose("latitude", "longitude").sortby("latitude")[::-1]
        assert shown == pytest.approx(rows.values - 273.15, abs=1e-3)
    with figure_style():
        chart.draw(chart.leads[0])
    assert chart.figure.get_suptitle() == "850 hPa temperature, member 2"
    assert " + 6 h, valid 2000-01-0" in chart.figure.axes[0].get_title(loc="left")


def request_of(**keys: object) -> ChartRequest:
    names = ("variable", "level", "lead", "init", "region", "projection", "contours")
    return read_request({**dict.fromkeys(names, ""), "member": 0, "edges": 0, **keys})


def test_regions_are_boxes_within_the_forecast(stored: Path) -> None:
    def box(name: str, **keys: object) -> Box | None:
        return find_box(ForecastStore.open(str(stored / name)).grid, request_of(**keys))

    assert box("forecast.zarr", region="europe") == Box(35, 75, -12.5, 42.5)
    assert box("forecast.zarr", region="arctic") == Box(60, 90, -180, 180)
    assert box("forecast.zarr", region="[-40,10,170,-150]") == Box(-40, 10, 170, 210)
    assert box("forecast.zarr", projection="polar") == Box(0, 90, -180, 180)
    assert box("forecast.zarr") is None
    found = box("region.zarr", region="[-80,80,10,100]")
    assert found is not None
    whole = box_of(ForecastStore.open(str(stored / "region.zarr")).grid)
    assert (found.south, found.north) == (whole.south, whole.north)
    assert (found.west, found.east) == (whole.west, 100)
    # Once around the globe, from wherever: all of the region.
    for west in (-270, -180, 0, 90):
        found = box("region.zarr", region=f"[-90,90,{west},{west + 360}]")
        assert found is not None
        assert (found.west, found.east) == (whole.west, whole.east), west
    assert box("forecast.zarr", region="[-90,90,0,360]") == Box(-90, 90, 0, 360)


def test_the_longest_lead_time_is_drawn_also_between_hours(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with xr.open_zarr(stored / "forecast.zarr", consolidated=False) as made:
        leads = np.array([0, 30, 90]).astype("m8[m]").astype("m8[ns]")
        short = made.load().assign_coords(prediction_timedelta=leads)
    forecasts.write(short, tmp_path / "short.nc")
    out = f"{tmp_path}/short-geopotential-500-1.5h.png\n"
    assert plot(monkeypatch, tmp_path / "short.nc") == (0, out, "")


def test_each_field_is_read_once(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, found = ForecastStore.read, []

    def counted(store: ForecastStore, *words: object, **keys: object) -> np.ndarray:
        found.append(words)
        return read(store, *words, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(ForecastStore, "read", counted)
    plot(monkeypatch, stored / "forecast.zarr", "lead=all", f"out={tmp_path}/m.gif")
    assert len(found) == len(forecasts.LEADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("members.zarr", "member=1", "lead=6h", "contours=4", "projection=polar"),
        ("region.zarr", "variable=temperature", "contours=true"),
        ("forecast.nc", "region=southern-hemisphere", "projection=equal-earth", "edges=2"),
    ],
)
def test_other_maps_are_drawn(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Sequence[str]
) -> None:
    code, _, err = plot(monkeypatch, stored / words[0], *words[1:], f"out={tmp_path}/m.png")
    assert (code, err) == (0, "")
    assert (tmp_path / "m.png").exists()


def test_lines_are_where_the_user_wants_them(stored: Path) -> None:
    store = ForecastStore.open(str(stored / "forecast.zarr"))

    def lines(**keys: object) -> np.ndarray:
        return Chart(store, "", request_of(lead="24h", **keys))._lines

    assert len(lines()) > 3  # of geopotential, unless told otherwise
    assert not len(lines(contours="false"))
    assert np.diff(lines(contours="0.5")) == pytest.approx(0.5)
    assert not len(lines(variable="temperature"))
    assert len(lines(variable="temperature", contours="true")) > 3


def test_forecasts_of_the_quickstart_have_its_land(tmp_path: Path) -> None:
    made = forecasts.forecast(forecasts.truth())
    text = '{"stores": ["/home/user/quickstart-T21-32x64-b08d.zarr"]}'
    forecasts.write(made.assign_attrs({SETTINGS_ATTRIBUTE: text}), tmp_path / "own.zarr")
    forecasts.write(made, tmp_path / "other.zarr")
    assert open_forecast(str(tmp_path / "own.zarr"))[1] == SIMULATED
    assert open_forecast(str(tmp_path / "other.zarr"))[1] == EARTH


def bilinear(fields: xr.DataArray, latitude: float, longitude: float) -> np.ndarray:
    """Return fields at a place, from the four points around it: `(number, L)`."""
    south = fields["latitude"].values[fields["latitude"] <= latitude].max()
    north = fields["latitude"].values[fields["latitude"] > latitude].min()
    west = fields["longitude"].values[fields["longitude"] <= longitude % 360].max()
    step = 360 / fields.sizes["longitude"]
    up, right = (latitude - south) / (north - south), (longitude % 360 - west) / step
    corners = (
        (south, west, (1 - up) * (1 - right)),
        (south, (west + step) % 360, (1 - up) * right),
        (north, west, up * (1 - right)),
        (north, (west + step) % 360, up * right),
    )
    parts = [
        weight * fields.sel(latitude=y, longitude=x).transpose("number", ...).values.astype("f8")
        for y, x, weight in corners
    ]
    return np.sum(parts, axis=0)


@pytest.mark.parametrize("place", [(46.9, 7.4), (-12.0, -20.0), (46.9, 352.0)])
@pytest.mark.parametrize("rising", [False, True])
def test_a_series_is_the_bilinear_mean_of_the_points_around_a_place(
    stored: Path, tmp_path: Path, place: tuple[float, float], rising: bool
) -> None:
    path = stored / "members.zarr"
    with xr.open_zarr(path, consolidated=False) as data:
        made = data.load().sortby("latitude", ascending=rising)
    store = ForecastStore.open(str(forecasts.write(made, tmp_path / "members.nc")))
    init = made["time"].values[1]
    fields = made["temperature"].sel(level=850, time=init)
    series = read_series(store, "temperature", 850, 1, place)
    assert series.title == "850 hPa temperature"
    expected = bilinear(fields, *place).T - 273.15
    assert series.values.shape == (len(forecasts.LEADS), 3)
    assert series.values == pytest.approx(expected, abs=1e-4)


def test_a_plume_has_bands_of_many_members_and_lines_of_few() -> None:
    members = np.random.default_rng(3).normal(size=(5, 21))  # quantiles fall on members
    ordered = np.sort(members, axis=1)
    axes = Figure().add_subplot()
    draw_plume(axes, np.arange(5.0), members)
    for band, (first, last) in zip(axes.collections, [(0, 20), (2, 18), (5, 15)], strict=True):
        corners = band.get_paths()[0].vertices
        for lead in range(5):
            edges = corners[corners[:, 0] == lead][:, 1]
            assert edges.min() == pytest.approx(ordered[lead, first])
            assert edges.max() == pytest.approx(ordered[lead, last])
    assert [band.get_label() for band in axes.collections] == list(BANDS)
    assert axes.lines[-1].get_ydata() == pytest.approx(ordered[:, 10])

    axes = Figure().add_subplot()
    draw_plume(axes, np.arange(5.0), members[:, :3])
    assert not axes.collections
    assert np.stack([line.get_ydata() for line in axes.lines[:3]], 1) == pytest.approx(
        members[:, :3]
    )
    assert axes.lines[3].get_ydata() == pytest.approx(np.sort(members[:, :3], axis=1)[:, 1])

    axes = Figure().add_subplot()
    draw_plume(axes, np.arange(5.0), members[:, :1])
    assert [line.get_ydata().tolist() for line in axes.lines] == [members[:, 0].tolist()]


def test_a_series_is_drawn_as_png_or_svg(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("place=[46.9,-7.4]", "variable=[geopotential,2m_temperature]", "level=850")
    code, out, err = plot(monkeypatch, stored / "members.zarr", *words)
    written = stored / "members-geopotential-850-2m_temperature-46.9,-7.4.png"
    assert (code, out, err) == (0, f"{written}\n", "")
    with Image.open(written) as picture:
        assert picture.width > 900
    path = tmp_path / "series.svg"
    words = ("place=[46.9,-7.4]", "init=2000-01-02T12", f"out={path}")
    assert plot(monkeypatch, stored / "members.zarr", *words) == (0, f"{path}\n", "")
    text = path.read_text()
    assert "46.9°N, 7.4°W (bilinear), forecast from 2000-01-02 12:00 UTC" in text
    assert "500 hPa geopotential height" in text
    assert "median" in text


def test_a_level_is_that_of_the_variables_that_have_levels(stored: Path) -> None:
    store = ForecastStore.open(str(stored / "forecast.zarr"))
    request = SeriesRequest((0, 0), ("2m_temperature", "temperature"), 850)
    assert find_fields(store, request) == [("2m_temperature", None), ("temperature", 850)]
    assert find_fields(store, SeriesRequest((0, 0))) == [("geopotential", 500)]


def test_a_map_is_written_as_svg(
    stored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "map.svg"
    code, *_ = plot(monkeypatch, stored / "forecast.zarr", "contours=false", f"out={path}")
    assert code == 0
    assert "500 hPa geopotential height" in path.read_text()


def test_a_place_without_any_value_is_refused(stored: Path, tmp_path: Path) -> None:
    with xr.open_zarr(stored / "forecast.zarr", consolidated=False) as data:
        dry = data.load()
    dry["2m_temperature"] = dry["2m_temperature"].where(dry["latitude"] < 0)
    store = ForecastStore.open(str(forecasts.write(dry, tmp_path / "dry.nc")))
    assert np.isfinite(read_series(store, "2m_temperature", None, 0, (-46.9, 7.4)).values).all()
    with pytest.raises(
        UserError, match=r"^place: 2m_temperature of .* no value at 46\.9°N, 7\.4°E"
    ):
        read_series(store, "2m_temperature", None, 0, (46.9, 7.4))


REFUSED = {
    "": "forecast plot: needs the path of one forecast, got 0",
    "nowhere.zarr": "nowhere.zarr: no such zarr store. Set the path to one that exists",
    "F/column.zarr": "column.zarr: maps need at least two columns, the forecast has one",
    "F/forecast.zarr other.zarr": "needs the path of one forecast, got 2",
    "F/forecast.zarr levle=500": "needs keys like variable, .* got 'levle=500'. Did you mean level",
    "F/forecast.zarr variable=geopotentail": (
        "variable: .* has 2m_temperature, geopotential, temperature, got 'geopotentail'. Did you"
    ),
    "F/forecast.zarr level=510": "level: geopotential is on 500, 850, 1000, got 510",
    "F/forecast.zarr level=high": "level: needs a whole number, got 'high'",
    "F/forecast.zarr variable=2m_temperature level=500": "2m_temperature has no levels, got 500",
    "F/forecast.zarr lead=7h": "lead: .* has 0h, 6h, 24h, got 7h",
    "F/forecast.zarr lead=soon": "lead: needs whole hours or days",
    "F/forecast.zarr init=2000-01-09": "init: .* has 2 times from 2000-01-02T00 to .*, got 2000",
    "F/forecast.zarr init=never": "init: needs a date",
    "F/forecast.zarr member=1": "member: needs 0 to 0, .* got 1",
    "F/members.zarr member=x": "member: needs a whole number, got 'x'",
    "F/forecast.zarr region=eurpe": "region: .*europe",
    "F/forecast.zarr region=[1,2,3]": r"region: needs a name, or \[south,north,west,east\]",
    "F/forecast.zarr region=[1,a,3,4]": r"region: needs a name, or \[south,north,west,east\]",
    "F/region.zarr region=antarctic": "region: .* covers latitude .* no part of antarctic",
    "F/forecast.zarr projection=mercator": "projection: .*equal-earth",
    "F/forecast.zarr contours=-1": "contours: needs true, false or a number above 0, got '-1'",
    "F/forecast.zarr contours=1e-9": "contours: 1e-09 gives more than 200 lines. Give a larger",
    "F/forecast.zarr edges=99": "edges: needs 2 to 9 ranks, got 99",
    "F/forecast.zarr out=map.jpg": "out: needs a name that ends in .png or .svg or .gif, got map",
    "F/forecast.zarr lead=all out=map.png": "out: lead=all needs a name that ends in .gif",
    "F/forecast.zarr place=[91,7]": r"place: needs \[latitude,longitude\] in degrees, .*'\[91,7\]'",
    "F/forecast.zarr place=bern": r"place: needs \[latitude,longitude\] in degrees, .* got 'bern'",
    "F/forecast.zarr place=[46.9]": r"place: needs \[latitude,longitude\]",
    "F/region.zarr place=[-80,60]": r"place: .* covers latitude .* longitude .* got \[-80,60\]",
    "F/column.zarr place=[0,45]": "at least two rows and two columns, the forecast has 4 x 1",
    "F/forecast.zarr place=[46.9,7.4] member=0": "member: belongs to maps, and place draws a",
    "F/forecast.zarr place=[46.9,7.4] lead=24h": "lead: belongs to maps",
    "F/forecast.zarr place=[46.9,7.4] out=map.gif": "out: needs .* .png or .svg, got map.gif",
    "F/forecast.zarr place=[46.9,7.4] variable=[temperature,wind]": "variable: .* got 'wind'",
    "F/forecast.zarr place=[46.9,7.4] variable=2m_temperature level=500": "has no levels, got 500",
    "F/forecast.zarr place=[46.9,7.4] init=2000-01-09": "init: .* has 2 times from",
    "F/forecast.zarr place=[46.9,7.4] out=F/missing/map.svg": "could not be written .* change out",
    "F/forecast.zarr out=F/missing/map.png": "the picture could not be written .* change out",
}


def test_mistakes_get_one_line_and_no_picture(stored: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        before = sorted(stored.rglob("*"))
        lines = {typed.replace("F/", f"{stored}/"): said for typed, said in REFUSED.items()}
        assert_refused(lines, "forecast plot")
        assert not list(tmp_path.iterdir())
        assert sorted(stored.rglob("*")) == before
