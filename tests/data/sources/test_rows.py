"""Reduced Gaussian grids and HEALPix as rows. The right values are those of `numpy.interp`."""

import itertools

import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.data.sources.rows import CellRows
from credit_dp.errors import UserError
from tests.data import cell_stores, stores
from tests.tables import each

# Cells, rows and longest row, as ECMWF and the HEALPix papers give them.
GRIDS = {
    "O96": (lambda: cell_stores.octahedral(96), (40320, 192, 400)),
    "N320": (lambda: cell_stores.classic(320), (542080, 640, 1280)),
    "HEALPix 1": (lambda: cell_stores.healpix(1), (12, 3, 4)),
    "HEALPix 8": (lambda: cell_stores.healpix(8), (768, 31, 32)),
    "HEALPix 64": (lambda: cell_stores.healpix(64), (49152, 255, 256)),
}


def made(name):
    return GRIDS[name][0]()


def rows_of(cells):
    return CellRows(cells.latitudes, cells.longitudes, "a.zarr")


@pytest.mark.slow
@each("name", GRIDS)
def test_sizes_of_known_grids(name):
    make, (count, height, width) = GRIDS[name]
    cells = make()
    assert len(cells.latitudes) == count
    grid = rows_of(cells).grid
    assert grid.shape == (height, width)
    assert np.array_equal(grid.latitude, cells.latitude)
    assert np.array_equal(grid.longitude, np.arange(width) * 360 / width)


@each(
    "name, rising, stored_as",
    zip(GRIDS, itertools.cycle([False, True]), ["f4", "f4", "f8", "f8", "f4"], strict=False),
)
def test_rows_are_interpolated_as_by_numpy(name, rising, stored_as):
    cells = made(name)
    values = np.random.default_rng(0).normal(size=(2, len(cells.latitudes))).astype("f4")
    wanted = np.stack([cells.on_rows(field) for field in values])
    order = np.arange(values.shape[1])
    if rising:  # rows from the south, each still eastward
        order = np.concatenate(np.split(order, np.cumsum(cells.lengths)[:-1])[::-1])
    coordinates = (x[order].astype(stored_as) for x in (cells.latitudes, cells.longitudes))
    rows = CellRows(*(x.astype(float) for x in coordinates), "a.zarr")
    stored = values[:, order]
    height = len(cells.latitude)
    for band in (slice(0, height), slice(0, 1), slice(height // 3, height // 3 + 2)):
        part = rows.cells(band)
        found = rows.fields(stored[:, part], band)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted[:, band], rtol=0, atol=2e-6)
        # A rank reads the cells of its rows only.
        assert part.stop - part.start == sum(cells.lengths[band])


@pytest.mark.slow
@each("name", GRIDS)
def test_constants_and_whole_rows_stay_bit_for_bit(name):
    cells = made(name)
    rows, whole = rows_of(cells), slice(None)
    constant = np.full((1, len(cells.latitudes)), 273.16, "f4")
    assert np.unique(rows.fields(constant, whole)) == constant[0, :1]
    values = np.random.default_rng(1).normal(size=len(cells.latitudes)).astype("f4")
    values[::7] = -0.0
    found = rows.fields(values, whole)
    full = [
        row
        for row, (first, length) in enumerate(zip(cells.firsts, cells.lengths, strict=True))
        if length == max(cells.lengths) and first == 0
    ]
    assert full
    parts = np.split(values, np.cumsum(cells.lengths)[:-1])
    assert all(found[row].tobytes() == parts[row].tobytes() for row in full)


@each("cells", [cell_stores.octahedral(16), cell_stores.healpix(4)])
def test_a_missing_cell_leaves_its_weight_to_the_other(cells):
    values = np.random.default_rng(2).normal(size=len(cells.latitudes)).astype("f4")
    values[np.random.default_rng(3).random(len(values)) < 0.3] = np.nan
    found = rows_of(cells).fields(values, slice(None))
    parts = np.split(values, np.cumsum(cells.lengths)[:-1])
    width = max(cells.lengths)
    for row, (first, part) in enumerate(zip(cells.firsts, parts, strict=True)):
        for column in range(width):
            place = (column * 360 / width - first) * len(part) / 360
            near = round(place)
            if abs(place - near) < 1e-9:
                wanted = part[near % len(part)]
            else:
                west = int(np.floor(place))
                pair = np.array([part[west % len(part)], part[(west + 1) % len(part)]])
                weights = np.array([west + 1 - place, place - west]) * ~np.isnan(pair)
                wanted = np.nan if not weights.any() else np.nansum(pair * weights) / weights.sum()
            np.testing.assert_allclose(found[row, column], wanted, rtol=1e-5, atol=1e-6)


@each("nside", [2, 4, 16])
def test_nested_cells_are_those_of_ring_order(nside):
    cells, order = cell_stores.healpix(nside), cell_stores.nested(nside)
    if nside == 2:  # as in the documentation of healpy
        assert order[:10].tolist() == [13, 5, 4, 0, 15, 7, 6, 1, 17, 9]
    found = CellRows(cells.latitudes[order], cells.longitudes[order], "a.zarr")
    values = np.random.default_rng(0).normal(size=len(order)).astype("f4")
    height = 4 * nside - 1
    for rows in (slice(0, height), slice(0, 1), slice(2, 5), slice(height - 2, height)):
        stored = values[order][found.cells(rows)]
        wanted = rows_of(cells).fields(values[rows_of(cells).cells(rows)], rows)
        assert np.array_equal(found.fields(found.in_order(stored, rows), rows), wanted)
    for row, column in ((0, 0), (3, 5), (height - 1, 1)):
        assert order[found.cell(row, column)] == rows_of(cells).cell(row, column)


@pytest.mark.slow
def test_a_store_of_nested_cells_is_read_as_one_in_ring_order(tmp_path, caplog):
    data = cell_stores.waves(cell_stores.healpix(4))
    data.to_netcdf(tmp_path / "ring.nc")
    data.isel(values=cell_stores.nested(4)).to_netcdf(tmp_path / "nested.nc")
    caplog.set_level("INFO")
    keys = {"prognostic": list(cell_stores.NAMES), "static": [], "forcing": []}
    for grid in (None, "9x8"):
        ring, nested = (
            open_source(stores.config(tmp_path / f"{name}.nc", grid=grid, **keys))
            for name in ("ring", "nested")
        )
        for rows in (slice(0, 9), slice(2, 4)):
            fields = [
                source.read([Channel(cell_stores.NAMES[0])], slice(1, 4), rows)
                for source in (ring, nested)
            ]
            assert np.array_equal(*fields)
    assert "nested.nc: is on an irregular grid of 192 cells in NESTED order, all" in caplog.text
    assert "read as 15 rows of 16 columns" in caplog.text


def shuffled(nside=4):
    cells = cell_stores.healpix(nside)
    order = np.random.default_rng(0).permutation(len(cells.latitudes))
    return cells.latitudes[order], cells.longitudes[order]


def with_hole():
    cells = cell_stores.octahedral(16)
    return np.delete(cells.latitudes, 70), np.delete(cells.longitudes, 70)


def westward():
    cells = cell_stores.octahedral(16)
    return cells.latitudes, -cells.longitudes


def regional():
    cells = cell_stores.octahedral(16)
    north = cells.latitudes > 0
    return cells.latitudes[north], cells.longitudes[north]


def without_a_latitude():
    cells = cell_stores.octahedral(16)
    latitudes = cells.latitudes
    latitudes[70] = np.nan
    return latitudes, cells.longitudes


BAD = {
    "shuffled": (shuffled, "HEALPix in NESTED order: they go back from latitude"),
    "hole": (with_hole, "the row at latitude 74.7445 has 27, not in equal steps eastward"),
    "westward": (westward, "not in equal steps eastward round the globe"),
    "NaN": (lambda: (regional()[0], regional()[1] * np.nan), "not in equal steps"),
    "NaN latitude": (without_a_latitude, "they go nan degrees north or south"),
}


@each("case", BAD)
def test_cells_without_whole_rows_are_one_line(case):
    make, expected = BAD[case]
    with pytest.raises(UserError) as caught:
        CellRows(*make(), "a.zarr")
    message = str(caught.value)
    assert message.startswith("a.zarr: is on ")
    assert expected in message
    assert "\n" not in message


FORMS = {
    "anemoi": (cell_stores.anemoi, cell_stores.octahedral(16)),
    "netCDF": (cell_stores.netcdf, cell_stores.octahedral(16)),
    "zarr": (cell_stores.zarr, cell_stores.healpix(8)),
}


@each("form", FORMS)
def test_stores_of_cells_are_read_as_rows(tmp_path, form):
    write, cells = FORMS[form]
    source = open_single_source(str(write(tmp_path, cells)))
    assert source.grid == (len(cells.latitude), max(cells.lengths))
    data = cell_stores.waves(cells)
    channels = [Channel(name) for name in reversed(cell_stores.NAMES)]
    for times in (slice(2, 3), slice(1, 9, 4), np.array([4, 1])):
        for rows in (slice(0, source.grid[0]), slice(0, 1), slice(9, 20)):
            found = source.read(channels, times, rows)
            wanted = [
                [cells.on_rows(field)[rows] for field in data[channel.variable].values[times]]
                for channel in channels
            ]
            np.testing.assert_allclose(found, np.swapaxes(wanted, 0, 1), rtol=1e-6)


@pytest.mark.slow
@each("form", FORMS)
def test_only_caches_of_healpix_depend_on_the_areas_of_its_rows(tmp_path, form):
    write, cells = FORMS[form]
    path, width = write(tmp_path, cells), max(cells.lengths)
    for grid in (None, "9x8"):
        keys = {"prognostic": list(cell_stores.NAMES), "static": [], "forcing": []}
        source = open_source(stores.config(path, grid=grid, **keys))
        _, _, *described = source.description(["2m_temperature"])
        latitude, longitude = described.pop(0), described.pop(0)
        np.testing.assert_allclose(latitude, cells.latitude, rtol=0, atol=1e-5)
        np.testing.assert_allclose(longitude, np.arange(width) * 360 / width)
        assert ("areas of HEALPix" in described) == (form == "zarr")


def test_a_region_of_cells_is_refused(tmp_path):
    data = cell_stores.waves(cell_stores.octahedral(16))
    data.isel(values=data["latitude"].values > 0).to_netcdf(tmp_path / "north.nc")
    with pytest.raises(UserError, match=r"north\.nc: a global grid is needed here"):
        open_single_source(str(tmp_path / "north.nc"))


@each("form", ["N32", "ring", "nested"])
def test_grib_of_cells_is_read_as_rows(tmp_path, form):
    cells = cell_stores.classic(32) if form == "N32" else cell_stores.healpix(8)
    path = cell_stores.grib(tmp_path, cells, 2, form)
    source = open_source(stores.config(path, static=[], forcing=[]))
    np.testing.assert_allclose(source.latitude, cells.latitude, atol=1e-5)
    for name in cell_stores.NAMES:
        found = source.read([Channel(name)], slice(0, 2), slice(3, 27))[:, 0]
        fields = cell_stores.waves(cells, 2)[name].values
        wanted = np.stack([cells.on_rows(field) for field in fields])[:, 3:27]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
