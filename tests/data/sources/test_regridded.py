"""Stores that are regridded while they are read, against loops over cells."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.grid import row_weights
from credit_dp.data.regrid import Regridder, regular_grid
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.rows import CellRows
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import cell_stores, region_stores, stores
from tests.data.cell_stores import NAMES, Cells, bounds, means_over_areas
from tests.tables import each

CELLS = {
    "O4": cell_stores.octahedral(4),
    "O4 from the south": cell_stores.octahedral(4),
    "HEALPix": cell_stores.healpix(2),
}
GRIDS = [(9, 8), (4, 6), (33, 16)]
STATE = [Channel(name) for name in NAMES]
TIMES = slice(3, 6)


def cells_config(case: str, folder, **changes):
    """Write ten days on cells; return the config that reads them."""
    cells = CELLS[case]
    if "south" in case:
        cells = Cells(cells.latitude[::-1], cells.lengths[::-1], cells.firsts[::-1])
    write = cell_stores.zarr if case == "HEALPix" else cell_stores.anemoi
    names = {"prognostic": list(NAMES), "forcing": [], "static": []}
    return stores.config(write(folder, cells), **names, **changes)


def cell_values(case: str) -> np.ndarray:
    """Return the fields of the test at three times from the north, `(T, C, N)`."""
    cells = CELLS[case]
    stored = cells if "south" not in case else Cells(cells.latitude[::-1], *cells[1:])
    data = cell_stores.waves(stored)
    values = np.stack([data[name].values[TIMES] for name in NAMES], axis=1).astype(float)
    if "south" not in case:
        return values
    parts = np.split(values, np.cumsum(cells.lengths[::-1])[:-1], axis=-1)
    return np.concatenate(parts[::-1], axis=-1)


@each("case, grid", zip(CELLS, GRIDS, strict=True))
def test_cells_become_means_over_areas(tmp_path, case, grid):
    source = open_source(cells_config(case, tmp_path, grid="x".join(map(str, grid))))
    assert source.grid.difference(regular_grid(*grid), 0) is None
    found = source.read(STATE, TIMES, slice(0, grid[0]))
    values = cell_values(case)
    for time, channel in ((0, 0), (2, 1)):
        wanted = means_over_areas(CELLS[case], values[time, channel], grid)
        np.testing.assert_allclose(found[time, channel], wanted, rtol=3e-7)


@each("case", ["O4", "HEALPix"])
def test_the_global_mean_of_cells_stays(case):
    cells = CELLS[case]
    layout = CellRows(cells.latitudes, cells.longitudes, "a.zarr").layout
    values = np.random.default_rng(1).normal(280, 20, len(cells.latitudes))
    rows = np.split(values, np.cumsum(cells.lengths)[:-1])
    areas = -np.diff(cells.edges) / 2
    mean = sum(area * row.mean() for area, row in zip(areas, rows, strict=True))
    if case == "HEALPix":
        assert mean == pytest.approx(values.mean(), rel=1e-13)  # cells are equally large
    for grid in [*GRIDS, (181, 360), (2, 1)]:
        regrid = Regridder(layout, regular_grid(*grid))
        found = (-np.diff(bounds(regrid.grid.latitude)) / 2) @ regrid(values).mean(axis=1)
        assert abs(found - mean) <= 1e-12 * mean
        constant = regrid(np.full(len(values), 273.15))
        np.testing.assert_allclose(constant, 273.15, rtol=1e-14)


@pytest.mark.slow
def test_rows_of_healpix_have_the_area_of_their_cells():
    for nside in (1, 2, 8, 64):
        cells = cell_stores.healpix(nside)
        wanted = np.array(cells.lengths) / np.mean(cells.lengths)
        for latitude, weights in ((cells.latitude, wanted), (-cells.latitude, wanted[::-1])):
            np.testing.assert_allclose(row_weights(latitude), weights, rtol=1e-12)
            rounded = latitude.astype("f4").astype(float)
            np.testing.assert_allclose(row_weights(rounded), weights, rtol=1e-12)


REGULAR = {
    "from the south": {"rising": True},
    "from 0.5 degrees": {"west": 0.5},
    "westward": {"west": 0.0, "step": -1},
}


def regular_store(folder, rising=False, west=0.0, step=1, **options):
    data = stores.dataset(12, 8)
    data = data.assign_coords(longitude=west + step * data["longitude"].values)
    # A sea, without values on land.
    land = np.random.default_rng(5).random((12, 8)) < 0.3
    data["2m_temperature"] = data["2m_temperature"].where(~land)
    data = data.sortby("latitude", ascending=rising)
    return data.sortby("latitude", ascending=False), stores.write(
        data, folder / "a.zarr", **options
    )


@each(
    "case, grid",
    [("from the south", (7, 5)), ("from 0.5 degrees", (24, 8)), ("westward", (5, 20))],
)
def test_a_regular_store_becomes_means_over_areas(tmp_path, case, grid):
    data, path = regular_store(tmp_path, **REGULAR[case])
    source = open_source(stores.config(path, grid="x".join(map(str, grid))))
    found = source.read(
        [Channel("temperature", 850), Channel("2m_temperature")], TIMES, slice(0, grid[0])
    )
    static = source.read([Channel("land_sea_mask")], slice(0, 1), slice(0, grid[0]))
    # Cells of a row in the order of their longitudes, from the westernmost.
    data = data.assign_coords(longitude=data["longitude"] % 360).sortby("longitude")
    latitude, longitude = data["latitude"].values, data["longitude"].values
    cells = Cells(latitude, (8,) * 12, np.full(12, longitude[0]))
    fields = {
        "temperature": (found[1, 0], data["temperature"].sel(level=850)[TIMES][1]),
        "gaps": (found[1, 1], data["2m_temperature"][TIMES][1]),
        "static": (static[0, 0], data["land_sea_mask"]),
    }
    for is_in, field in fields.values():
        values = field.transpose("latitude", "longitude").values.ravel().astype(float)
        wanted = means_over_areas(cells, values, grid)
        np.testing.assert_allclose(is_in, wanted, rtol=1e-6, atol=1e-6)


@each(
    "case, method",
    [
        ("O4 from the south", "conservative"),
        ("HEALPix", "bilinear"),
        ("gaps", "conservative"),
        ("gaps", "bilinear"),
    ],
)
def test_bands_have_the_bits_of_the_globe(tmp_path, case, method):
    grid = {"grid": "13x10", "regrid": method}
    channels = STATE
    if case in CELLS:
        source = open_source(cells_config(case, tmp_path, **grid))
    else:
        _, path = regular_store(tmp_path)
        source = open_source(stores.config(path, **grid))
        channels = [Channel("2m_temperature" if case == "gaps" else "solar")]
    globe = source.read(channels, TIMES, slice(0, 13))
    assert np.isnan(globe).any() == (case == "gaps")
    for ranks in (2, 3, 13):
        edges = np.linspace(0, 13, ranks + 1).astype(int)
        bands = [source.read(channels, TIMES, slice(*x)) for x in pairwise(edges)]
        assert np.concatenate(bands, axis=2).tobytes() == globe.tobytes()


def test_a_band_reads_only_its_rows(tmp_path):
    _, path = regular_store(tmp_path, chunks={"time": 1, "latitude": 1})
    source = open_source(stores.config(path, grid="6x8"))
    source.read([Channel("solar")], slice(0, 1), slice(2, 3))
    # From 30 degrees to the equator: edges of rows are at 32.7, 16.4 and 0 degrees.
    assert source.bytes_read == 2 * 8 * 4


def test_points_between_rows_and_columns(tmp_path):
    """Bilinear, by numpy's interpolation along each row, round the globe, then between rows."""
    data, path = regular_store(tmp_path, west=0.5)
    source = open_source(stores.config(path, grid="9x20", regrid="bilinear"))
    found = source.read([Channel("solar")], slice(0, 1), slice(0, 9))[0, 0]
    field = data["solar"].values[0].astype(float)
    longitude = np.arange(20) * 18.0
    rows = [np.interp(longitude, data["longitude"].values, row, period=360) for row in field]
    rising = slice(None, None, -1)
    wanted = np.transpose(
        [
            np.interp(source.latitude, data["latitude"].values[rising], column[rising])
            for column in np.transpose(rows)
        ]
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_store_on_the_grid_is_read_as_it_is(tmp_path):
    data = stores.dataset(12, 8).assign_coords(latitude=regular_grid(12, 8).latitude)
    path = stores.write(data, tmp_path / "a.zarr")
    as_it_is, on_grid = (
        open_source(stores.config(path, **grid)) for grid in ({}, {"grid": "12x8"})
    )
    assert type(on_grid) is type(as_it_is)
    names = ["solar"]
    assert on_grid.description(names) == as_it_is.description(names)
    described = [
        open_source(stores.config(path, **grid)).description(names)
        for grid in ({}, {"grid": "8x8"}, {"grid": "8x8", "regrid": "bilinear"}, {"grid": "9x8"})
    ]
    assert all(first != other for first, other in combinations(described, 2))


def test_statistics_are_those_of_the_grid(tmp_path):
    config = cells_config("O4", tmp_path, grid="9x8", train=["2000-01-01", "2000-01-08"])
    found = prepare_training_data(config).statistics
    data = cell_stores.waves(CELLS["O4"])
    fields = means_over_areas(CELLS["O4"], data[NAMES[0]].values[:32], (9, 8))
    areas = -np.diff(bounds(np.linspace(90, -90, 9))) / 2
    mean = areas @ fields.mean(axis=(0, 2))
    assert found.mean[0] == pytest.approx(mean, rel=1e-6)
    assert found.std[0] == pytest.approx(
        np.sqrt(areas @ ((fields - mean) ** 2).mean(axis=(0, 2))), rel=1e-5
    )


def test_stores_on_different_grids_are_joined_on_one(tmp_path):
    data = stores.dataset(12, 8)
    coarse = stores.dataset(6, 8)[["solar"]]
    paths = [
        str(stores.write(data.drop_vars("solar"), tmp_path / "a.zarr")),
        str(stores.write(coarse, tmp_path / "b.zarr")),
    ]
    config = replace(stores.config(paths[0], grid="9x8"), store=paths)
    assert Store.open(config).grid == (9, 8)
    with pytest.raises(UserError, match="is not on the grid of"):
        Store.open(replace(config, grid=None))


@pytest.mark.slow
def test_a_message_names_the_chunk_of_a_regridded_value(tmp_path):
    _, path = regular_store(tmp_path, chunks={"time": 1, "latitude": 3})
    source = open_source(stores.config(path, grid="4x8"))
    assert source.location(Channel("solar"), 5, 3, 0).endswith("chunk solar/c/5/3/0")


@each("kind", ["box", "lambert"])
def test_a_region_is_not_regridded(tmp_path, kind):
    path = region_stores.write(kind, tmp_path)
    with pytest.raises(UserError, match=r"data.grid=9x8: a global grid is needed .* Leave data.gr"):
        open_source(stores.config(path, grid="9x8"))
