"""Maps and the plots of a run: their data, collected on bands of rows, and the figures."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from credit_dp.config import Config
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import (
    PALE,
    SERIES,
    figure_style,
    superscript,
    title_text,
    unit_label,
)
from credit_dp.evaluation.held_out import (
    HeldOutData,
    LastLeadAccumulator,
    LastLeadDiagnostics,
    evaluate,
)
from credit_dp.evaluation.metrics import latitude_band_weights, region_wavelength
from credit_dp.evaluation.score_folder import spread_error_ratio
from credit_dp.evaluation.score_plots import (
    NO_SPECTRUM,
    add_legend,
    channels_to_draw,
    create_panels,
    draw_rank_histogram,
    draw_scores,
    draw_spectra,
    draw_spectrum,
    draw_spread_error,
    free_corners,
    legend_columns,
    lowest_power,
    start_at_zero,
)
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.sphere import EARTH_RADIUS
from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep
from credit_dp.training.loggers import FIRST_COLUMNS
from credit_dp.training.loss_curve import curve_points, draw_curve, draw_loss
from tests.data import stores
from tests.ranks import on_processes, on_threads
from tests.training.runs import alone, make_config, make_store


def test_exponents_are_raised_however_they_are_written():
    units = ("m2 s-2", "m**2 s**-2", "m^2 s^-2", "1")
    for write in (unit_label, superscript):
        assert list(map(write, units)) == ["m² s⁻²"] * 3 + ["1"], write


ROWS = 13


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("plots")
    config = make_config(make_store(folder, ROWS, columns=8), folder / "run")
    prepare_training_data(config.data)
    return config


def rise(x: torch.Tensor) -> torch.Tensor:
    return x[:, :7] * 0 + 0.5 * x[:, 7:8]


def collected(
    manager: DomainParallelManager, config: Config
) -> tuple[HeldOutScores, LastLeadDiagnostics]:
    prepared = prepare_training_data(config.data)
    like = torch.zeros((), dtype=torch.float64)
    dates = HeldOutData(config, prepared, manager.rows(ROWS), like)
    step = ForecastStep(rise, torch.ones(7, 1, 1, dtype=torch.float64))
    rollout = EnsembleForecast(step).rollout
    sums = LastLeadAccumulator(dates, manager)
    scores = evaluate(rollout, dates, manager, 4, lambda _: None, sums)
    return scores, sums.result()


@pytest.mark.slow
def test_spectra_and_error_maps_are_those_of_the_definition(config: Config) -> None:
    scores, last = collected(alone(), config)
    store, statistics = (prepared := prepare_training_data(config.data)).store, prepared.statistics
    whole, six = slice(0, ROWS), np.timedelta64(6, "h")
    starts = store.times[store.times >= np.datetime64("2000-01-04")][:-2]
    forcing = sum(store.read_forcing(starts + k * six, whole)[:, :1] for k in (0, 1))
    moved = 0.5 * forcing * statistics.std[:, None, None]
    forecast = store.read_states(starts, whole) + moved
    truth = store.read_states(starts + 2 * six, whole)
    error = forecast.astype(np.float64) - truth
    assert last.hours == 12
    assert last.bias == pytest.approx(error[:, last.map_channel].mean(axis=0), rel=1e-5, abs=1e-2)
    wanted = np.sqrt((error[:, last.map_channel] ** 2).mean(axis=0))
    assert last.rmse == pytest.approx(wanted, rel=1e-5)
    north = latitude_band_weights(store.grid).numpy()[0]
    circles = 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(store.latitude))
    for source, fields in enumerate((forecast, truth)):
        waves = np.fft.rfft(fields[:, last.spectra_channels[1]].astype(np.float64), norm="forward")
        power = 2 * circles[:, None] * (np.abs(waves) ** 2).mean(axis=0)
        power = (north @ power)[1:] / north.sum()
        assert last.spectra[source, 1, 0, 1:] == pytest.approx(power, rel=1e-4)
    assert scores.rmse.shape == (3, 2, 7)
    kinds = [scores.channels[c] for c in channels_to_draw(scores, last)]
    assert kinds[0] == "geopotential_500"
    assert "geopotential" not in kinds[1]


def test_spread_over_error_is_one_of_a_reliable_ensemble() -> None:
    """Of normal numbers, whose members and truth are alike; up to where the truth ends."""
    random = np.random.default_rng(2)
    shape, decay = (2000, 5, 9), np.append(np.arange(1, 8) ** -1.0, [1e-9, 1e-9])
    members = random.normal(size=shape) * decay
    truth = random.normal(size=(shape[0], 9)) * decay
    mean = members.mean(axis=1)
    powers = {
        "forecast": (members**2).mean(axis=(0, 1)),
        "truth": (truth**2).mean(axis=0),
        "mean": (mean**2).mean(axis=0),
        "spread": members.var(axis=1, ddof=1).mean(axis=0),
        "error": ((mean - truth) ** 2).mean(axis=0),
    }
    ratio = spread_error_ratio(powers, 5)
    assert len(ratio) == 7
    assert ratio == pytest.approx(1, abs=0.05)
    half = spread_error_ratio({**powers, "spread": powers["spread"] / 4}, 5)
    assert half == pytest.approx(ratio / 2, rel=1e-12)
    exact = spread_error_ratio({**powers, "error": 0 * powers["error"]}, 5)
    assert np.isnan(exact).all()
    nothing = spread_error_ratio({name: x * np.nan for name, x in powers.items()}, 5)
    assert np.isnan(nothing).all()
    for wavelength, label, places in (
        (None, "zonal wavenumber", [1, 2, 3, 4, 5, 6]),
        (600_000.0, "wavelength (km)", [600, 300, 200, 150, 120, 100]),
    ):
        figure, (axes,) = create_panels(1)
        draw_spread_error(axes, {"24 h": ratio, "72 h": half}, "2m_temperature", wavelength)
        _, day, third = axes.lines
        assert axes.get_xlabel() == label
        assert (day.get_label(), third.get_label()) == ("24 h", "72 h")
        np.testing.assert_allclose(day.get_xdata(), places)
        np.testing.assert_array_equal(third.get_ydata(), half[1:])
        figure.draw_without_rendering()


def check_same(found: LastLeadDiagnostics, wanted: LastLeadDiagnostics) -> None:
    for name in ("rmse", "bias", "spectra"):
        value = getattr(found, name)
        # On the rim of a region no point is scored: NaN.
        close = pytest.approx(getattr(wanted, name), rel=1e-10, abs=1e-9, nan_ok=True)
        assert value == close, name


@pytest.mark.slow
def test_bands_collect_the_same(config: Config) -> None:
    _, wanted = collected(alone(), config)
    for _, found in on_threads(3, collected, config):
        check_same(found, wanted)


@pytest.mark.exhaustive
def test_any_mesh_collects_the_same(config: Config) -> None:
    _, wanted = collected(alone(), config)
    for _, found in on_processes(4, collected, config, domain=2):
        check_same(found, wanted)


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A box of 13 rows with a rim of two rows and columns."""
    folder = tmp_path_factory.mktemp("region")
    data = stores.dataset(ROWS, 9, 20).assign_coords(
        latitude=60 - 1.5 * np.arange(ROWS), longitude=10 + 2.0 * np.arange(9)
    )
    config = make_config(stores.write(data, folder / "box.zarr"), folder / "run")
    config = replace(config, data=replace(config.data, boundary=2))
    prepare_training_data(config.data)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_bands_of_a_region_collect_the_same(region: Config, ranks: int) -> None:
    """The spectra of the truth are those of its cosines; of 7 ranks, the first has only rim."""
    scores, wanted = collected(alone(), region)
    store = prepare_training_data(region.data).store
    starts = store.times[store.times >= np.datetime64("2000-01-04")][:-2]
    truth = store.read_states(starts + 2 * np.timedelta64(6, "h"), slice(0, ROWS))
    inside = truth[:, wanted.spectra_channels, 2:-2, 2:-2].astype(np.float64)
    assert wanted.spectra.shape[:3] == (2, len(wanted.spectra_channels), 1)
    variance = wanted.spectra[:, :, 0, 1:].sum(axis=-1)
    assert variance[1] == pytest.approx(inside.var(axis=(2, 3)).mean(axis=0), rel=1e-4)
    assert wanted.wavelength == region_wavelength(store.grid, 2)
    for _, found in on_threads(ranks, collected, region):
        check_same(found, wanted)
    draw_spectra(scores, wanted, Path(region.run.dir).with_name("spectra.png"))
    assert imread(Path(region.run.dir).with_name("spectra.png")).shape[1] > 600


@pytest.mark.slow
def test_any_mesh_collects_the_same_of_a_region(region: Config) -> None:
    _, wanted = collected(alone(), region)
    for _, found in on_processes(4, collected, region, domain=2):
        check_same(found, wanted)


def log(path: Path, rows: list[str], header: str = "validation_rmse") -> Path:
    path.write_text("\n".join([",".join([*FIRST_COLUMNS, header]), *rows, ""]))
    return path


@pytest.mark.slow
def test_a_loss_curve_is_drawn_of_the_logged_steps(tmp_path: Path) -> None:
    one = log(tmp_path / "one.csv", ["1,0.9,1e-3,1.0,0.1,"])
    draw_loss(one, tmp_path / "one.png")
    rows = [f"{k},{1 / k},1e-3,1.0,0.1,{0.1 / k if k % 50 == 0 else ''}" for k in range(1, 301)]
    draw_loss(log(tmp_path / "many.csv", rows), tmp_path / "many.png")
    small, large = (imread(tmp_path / name).shape[0] for name in ("one.png", "many.png"))
    assert large > 1.5 * small  # with a panel for the validation
    draw_loss(tmp_path / "absent.csv", tmp_path / "none.png")
    draw_loss(log(tmp_path / "empty.csv", []), tmp_path / "none.png")
    draw_loss(log(tmp_path / "nan.csv", ["1,nan,1e-3,nan,0.1,", "2,,,,,"]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()  # without numbers


def test_the_loss_is_beside_that_of_persistence_and_the_validation_has_its_own_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(
        "credit_dp.training.loss_curve.save_figure", lambda figure, _: kept.append(figure)
    )
    rows = ["1,0.9,1e-3,1.0,0.1,", "2,0.5,1e-3,1.0,0.1,0.2", "3,0.4,1e-3,1.0,0.1,0.1"]
    for persistence in (1.0, None):
        draw_loss(log(tmp_path / "log.csv", rows), tmp_path / "loss.png", persistence)
        loss, validation = kept.pop().axes
        assert [line.get_label() for line in loss.lines][1:] == ["persistence"] * bool(persistence)
        assert all(set(line.get_ydata()) == {1.0} for line in loss.lines[1:])
        assert loss.get_ylim()[1] >= (persistence or 0.9)
        assert [text.get_text() for text in loss.texts] == ["persistence"] * bool(persistence)
        assert set(loss.get_yticks()) <= {0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
        (line,) = validation.lines
        assert line.get_xydata().tolist() == [[2, 0.2], [3, 0.1]]
        assert line.get_marker() != loss.lines[0].get_marker()


def test_only_numbers_above_zero_are_on_a_log_scale() -> None:
    rows = [{"step": str(k), "loss": text} for k, text in enumerate(["1.5", "", "inf", "0", "2"])]
    assert curve_points(rows, "loss").tolist() == [[0, 1.5], [4, 2.0]]
    assert curve_points(rows, "validation_rmse").shape == (0, 2)


def test_many_steps_have_a_running_mean() -> None:
    for count, width in ((200, 10), (45, 5)):
        steps = np.arange(1.0, count + 1)
        axes = Figure().subplots()
        draw_curve(axes, steps, 1 / steps)
        curve, mean = axes.lines
        assert len(curve.get_xdata()) == count
        x, y = mean.get_data()
        assert x.tolist() == steps.tolist()
        assert y[30] == pytest.approx(
            np.mean(1 / (x[30] + np.arange(-(width // 2), -(-width // 2))))
        )
        assert y[0] == pytest.approx(np.mean(1 / steps[: -(-width // 2)])), count
        assert (curve.get_color(), mean.get_color()) == (PALE, SERIES[0])
        assert curve.get_linewidth() < mean.get_linewidth()
        assert axes.get_yscale() == "log"
    axes = Figure().subplots()
    draw_curve(axes, np.arange(1.0, 20), np.arange(1.0, 20))
    assert len(axes.lines) == 1  # of few steps


def power(*values: float) -> np.ndarray:
    """The power of wavenumbers 0, 1, 2, ..."""
    return np.array(values)


def test_the_axis_of_a_spectrum_ends_where_it_means_something() -> None:
    for forecast, truth, lowest in (
        # The truth ends at wavenumber 3, where the forecast has 300: a thirtieth of that.
        (power(1e9, 9e4, 3e3, 300), power(1e9, 9e4, 3e3, 1e-9), 10.0),
        # Rounding of 6 values: a sixth of float32's epsilon squared, 1.4e-14, of the mean's power.
        (power(1e15, 9e4, 3e3, 0.5), power(1e15, 9e4, 200, 0.5), 1e15 * 2.0**-46 / 6),
        (power(1e9, 9e4, 3e3, 100), power(1e9, 9e4, 3e3, 300), None),
        (power(0, 9e4, np.nan, 100), power(0, 9e4, np.nan, 300), None),
    ):
        wanted = lowest and pytest.approx(lowest)
        assert lowest_power(np.stack([forecast, truth])) == wanted
        axes = Figure().subplots()
        draw_spectrum(axes, {"forecast": forecast, "truth": truth}, "x", "K")
        assert not lowest or axes.get_ylim()[0] == wanted
    ended = power(1e9, 9e4, 3e3, 300, 1e-9, 1e-9)
    for forecast, truth, last in (
        (power(1e9, 9e4, 3e3, 300, 100, 90), ended, 3),
        (ended, power(1e9, 9e4, 3e3, 300, 100, 90), 5),  # of a forecast that is too smooth, all
        (power(1e9, 9e4, 90, 90, 90, 90), power(1e9, 9e4, 0, 0, 0, 0), 5),
    ):
        for wavelength in (None, 6e6):
            axes = Figure().subplots()
            powers = {"forecast": forecast, "truth": truth}
            draw_spectrum(axes, powers, "x", "K", wavelength)
            waves = np.arange(1, last + 1)
            places = waves if wavelength is None else 6e3 / waves
            for line in axes.lines:
                assert line.get_xdata().tolist() == pytest.approx(places.tolist())
    for empty in (np.nan, 0.0):
        axes = Figure().subplots()
        draw_spectrum(axes, {"forecast": np.full(5, empty), "truth": np.full(5, empty)}, "x", "K")
        assert [text.get_text() for text in axes.texts] == [NO_SPECTRUM]
        axes.figure.savefig(BytesIO())


def spectra_of(present: list[list[bool]]) -> tuple[HeldOutScores, LastLeadDiagnostics]:
    """Channels of the same unit with power in these of three bands; NaN in the others."""
    count = len(present)
    names = tuple(f"x{number}" for number in range(count))
    scores = HeldOutScores(names, ("K",) * count, (6,), {"rmse": np.ones((3, 1, count))}, 2)
    spectra = np.where(np.array(present)[None, :, :, None], np.ones((2, count, 3, 5)), np.nan)
    globe = np.zeros((4, 8))
    return scores, LastLeadDiagnostics(6, tuple(range(count)), 0, spectra, globe, globe)


def test_channels_that_lack_a_spectrum_are_drawn_only_without_others(tmp_path: Path) -> None:
    nowhere, south, everywhere = [False] * 3, [False, False, True], [True] * 3
    assert channels_to_draw(*spectra_of([nowhere, everywhere, south, everywhere])) == [1, 3]
    assert channels_to_draw(*spectra_of([nowhere, south, south])) == [1, 2]
    draw_spectra(*spectra_of([nowhere, south]), tmp_path / "spectra.png")
    assert (tmp_path / "spectra.png").exists()
    with pytest.raises(UserError, match="no variable has"):
        draw_spectra(*spectra_of([nowhere]), tmp_path / "spectra.png")


def test_long_titles_have_several_lines() -> None:
    assert title_text("a_short_name, 30N to 60N") == "a_short_name, 30N to 60N"
    assert title_text("one two three, four", 10) == "one two\nthree,\nfour"
    assert title_text("without$marks", 5) == r"without\$marks"


def test_legends_of_long_names_have_few_columns() -> None:
    assert legend_columns(["forecast", "truth"], 10.8) == 4
    assert legend_columns(["x" * 60] * 9, 10.8) == 2
    assert legend_columns(["x" * 300], 10.8) == 1
    # Nine lines of a legend are above the panels, two are inside one.
    few, many = (create_panels(3, labels=["x" * 90] * count)[0] for count in (2, 9))
    assert many.get_figheight() - few.get_figheight() == pytest.approx(9 * 0.18)


def test_short_legends_are_inside_a_panel_and_long_ones_above_all() -> None:
    for count, inside in ((3, True), (9, False)):
        labels = [f"model {number}" for number in range(count)]
        figure, panels = create_panels(2, labels=labels)
        for axes in panels:
            for label in labels:
                axes.plot([1, 2], [1, 2], label=label)
        add_legend(figure, panels)
        (legend,) = [panels[0].get_legend()] if inside else figure.legends
        assert [text.get_text() for text in legend.get_texts()] == labels
        assert bool(figure.legends) != inside
        figure.draw_without_rendering()
        box, panel = legend.get_window_extent(), panels[0].get_window_extent()
        assert (panel.y0 < box.y0 and box.y1 < panel.y1) if inside else box.y0 > panel.y1


@figure_style()
def test_a_legend_covers_no_curve_and_changes_no_axis() -> None:
    leads = np.array([6, 12, 18, 24])
    for rising, constant, title, inside in (
        ([60, 100, 200, 600], 300, "", True),
        ([180, 340, 480, 600], 890, "", False),  # without a free corner
        ([180, 340, 480, 600], 890, "RMSE over 2 initial times", False),
    ):
        figure, panels = create_panels(3, title)
        for axes in panels:
            values = {
                "forecast": np.array([50, 95, 140, 180]),
                "persistence": np.array(rising),
                "climatology": np.full(4, constant),
            }
            draw_scores(axes, leads.tolist(), values, "x", "RMSE")
            axes.set_ylim(bottom=0)
        before = [axes.bbox.size.tolist() for axes in panels]
        add_legend(figure, panels)
        figure.draw_without_rendering()
        assert len({axes.get_ylim() for axes in panels}) == 1
        assert [axes.bbox.size.tolist() for axes in panels] == [pytest.approx(x) for x in before]
        legends = [*(axes.get_legend() for axes in panels), *figure.legends]
        (legend,) = [each for each in legends if each is not None]
        box = legend.get_window_extent()
        assert (legend.axes is not None) == inside
        for axes in panels:
            for line in axes.lines:
                path = line.get_path().transformed(axes.transData)
                assert not path.intersects_bbox(box, filled=False)
        above = [axes._left_title.get_window_extent() for axes in panels]
        for text in [*above, *(each.get_window_extent() for each in figure.texts)]:
            assert not box.overlaps(text)


def test_letters_have_the_same_size_in_figures_of_few_and_many_panels() -> None:
    sizes = []
    for count in (1, 2, 3):
        figure, panels = create_panels(count)
        size = panels[0].get_position().size * figure.get_size_inches()
        sizes.append((figure.get_figwidth(), *size))
    assert sizes == [pytest.approx(sizes[0])] * len(sizes)


def test_lead_times_are_in_days_beyond_two_and_hours_below() -> None:
    for hours, places, label, ticks in (
        ((6, 12, 18, 24), [6, 12, 18, 24], "lead time (hours)", {6, 12, 18, 24}),
        ((12, 120, 240), [0.5, 5, 10], "lead time (days)", {2, 4, 6, 8, 10}),
    ):
        axes = Figure().subplots()
        values = {
            source: np.arange(1.0, 1 + len(hours)) * scale
            for source, scale in (("forecast", 1), ("persistence", 2), ("climatology", 3))
        }
        draw_scores(axes, hours, values, "x", "RMSE (K)")
        assert [line.get_label() for line in axes.lines] == list(values)
        for line, scores in zip(axes.lines, values.values(), strict=True):
            assert list(line.get_xdata()) == places
            assert list(line.get_ydata()) == list(scores)
        assert axes.get_xlabel() == label
        shown = set(axes.get_xticks())
        assert ticks <= shown
        assert all(float(tick).is_integer() for tick in shown)


def test_a_curve_keeps_its_distance_from_the_top_of_an_axis_from_zero() -> None:
    for values in ([600.0, 692.0], [1.0, 1.0]):
        axes = Figure().add_subplot()
        axes.plot([0, 24], values)
        start_at_zero(axes)
        assert axes.get_ylim() == pytest.approx((0, 1.05 * max(values)))


@pytest.mark.parametrize("highest", [4.0, 60.0])
def test_a_spectrum_of_little_power_has_ticks_without_small_exponents(highest: float) -> None:
    axes = Figure().add_subplot()
    power = np.linspace(highest, 1, 9) * 1e4
    draw_spectrum(axes, {"forecast": power, "truth": power}, "x", "K")
    low, high = axes.get_ylim()
    places = [place for place in axes.yaxis.get_majorticklocs() if low <= place <= high]
    shown = axes.yaxis.get_major_formatter().format_ticks(places)
    assert len(shown) >= 3
    assert set(shown) <= {"5000", *(f"{x}0000" for x in (1, 2, 3, 5, 10, 20, 30, 50, 100))}


def test_a_legend_covers_no_histogram() -> None:
    _, panels = create_panels(3)
    hump = np.array([1, 1, 1, 1, 6, 6, 1, 1, 1, 1]) / 20
    draw_rank_histogram(panels[0], {"24 h": hump}, "x")
    assert {"upper left", "upper right"} <= set(free_corners(panels[0], ["24 h"]))
    draw_rank_histogram(panels[1], {"24 h": np.roll(hump, 5)}, "x")
    assert not {"upper left", "upper right"} & set(free_corners(panels[1], ["24 h"]))
