from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

from credit_dp.data.channels import Channel
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE, PreparedSource
from credit_dp.data.sources.stacked import StackedArray
from credit_dp.data.sources.storage import StoreChangeDetector
from credit_dp.errors import UserError
from tests.data import prepared_stores, stores
from tests.tables import each

DATA = stores.dataset(rows=11)
CHANNELS = prepared_stores.channels_of(DATA)
FIELDS = prepared_stores.stacked(DATA, CHANNELS)
SHARD = "fields/c.3.0.0.0"
TIMES = (slice(0, 1), slice(2, 9, 3), np.array([7, 2, 3]), slice(0, 12))
ROWS = (slice(0, 11), slice(4, 8), slice(3, 9), slice(10, 11))


@pytest.fixture
def path(tmp_path):
    return prepared_stores.write(DATA, tmp_path / "prepared.zarr")


def opened(path):
    return PreparedSource.open(str(path))


@each("wanted", [[0, 1, 2], [2, 5, 1], [7], [0, 2, 4, 6], list(range(8))])
def test_fields_are_what_was_written(path, wanted):
    source = opened(path)
    for times, rows in product(TIMES, ROWS):
        fields = source.read([CHANNELS[place] for place in wanted], times, rows)
        assert fields.dtype == np.float32
        assert np.array_equal(fields, FIELDS[times][:, wanted, rows])


def test_what_it_says_of_itself(path):
    source = opened(path)
    assert np.array_equal(source.times, DATA["time"].values)
    assert np.array_equal(source.latitude, DATA["latitude"].values)
    assert np.array_equal(source.longitude, DATA["longitude"].values)
    temperature = source.variables["temperature"]
    assert (temperature.levels, temperature.units) == (stores.LEVELS, "K")
    assert (temperature.has_time, temperature.standard_name) == (True, "t")
    assert source.variables["2m_temperature"].levels == ()
    assert not source.variables["land_sea_mask"].has_time
    assert source.group_by_chunk(CHANNELS) == [list(CHANNELS)]
    assert source.times_per_file(CHANNELS[0]) == 1
    assert source.chunk_shape(CHANNELS[0]) == (1, 8, 4, 8)
    assert source.description(["solar"]) == opened(path).description(["solar"])
    assert source.description(["solar"]) != source.description(["2m_temperature"])


def test_statics(path):
    fields = opened(path).read(
        [Channel("land_sea_mask"), Channel("geopotential_at_surface")], slice(0, 1), slice(2, 5)
    )
    expected = [DATA[name].values[2:5] for name in ("land_sea_mask", "geopotential_at_surface")]
    assert np.array_equal(fields, [expected])


@pytest.mark.slow
def test_no_statics_at_all(tmp_path):
    source = opened(prepared_stores.write(DATA, tmp_path / "s.zarr", static=False))
    assert "land_sea_mask" not in source.variables
    assert np.array_equal(source.read(CHANNELS[:2], slice(0, 1), slice(0, 2)), FIELDS[:1, :2, :2])


def test_a_band_on_chunk_edges_reads_its_own_bytes_only_and_once(path):
    source = opened(path)
    source.read(CHANNELS, slice(5, 7), slice(4, 8))
    checksum, index = 4, 3 * 16 + 4  # of each shard; tensorstore counts its index, too
    assert source.chunk_reads == 2
    assert source.bytes_read == 2 * (8 * 4 * 8 * 4 + checksum + index)
    source.read([CHANNELS[5], CHANNELS[0], CHANNELS[1]], np.array([9, 5]), slice(4, 8))
    assert source.chunk_reads == 4


@pytest.mark.slow
def test_many_threads_read_at_once(path):
    source = opened(path)
    with ThreadPoolExecutor(8) as threads:
        bands = threads.map(
            lambda n: source.read(CHANNELS, slice(n % 12, n % 12 + 1), ROWS[n % 4]), range(48)
        )
        for n, fields in enumerate(bands):
            assert np.array_equal(fields[0], FIELDS[n % 12][:, ROWS[n % 4]])


def damage_middle(file):
    content = bytearray(file.read_bytes())
    content[700] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "short": lambda file: file.write_bytes(file.read_bytes()[:20]),
    "checksum": damage_middle,
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@each("damage", DAMAGES)
def test_a_damaged_shard_is_named(tmp_path, damage):
    path = prepared_stores.write(DATA, tmp_path / "prepared.zarr")
    DAMAGES[damage](path / SHARD)
    source = opened(path)
    for times in (slice(0, 12), np.array([1, 3, 8]), slice(3, 4)):
        with pytest.raises(UserError) as caught:
            source.read([CHANNELS[4], CHANNELS[0]], times, slice(0, 4))
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"{path}: {SHARD} with all variables at 2000-01-01T18:00")
        assert "data.dates.train" in message
        assert ("is missing" in message) == (damage in ("missing", "folder"))
        # zarr 3.4 says that a shard is truncated before it compares a checksum.
        is_damaged = "checksum" in message or "truncated" in message
        assert is_damaged != ("is missing" in message)


def test_damage_elsewhere_does_not_matter(path):
    damage_middle(path / SHARD)
    fields = opened(path).read(CHANNELS, slice(2, 5, 2), slice(0, 11))
    assert np.array_equal(fields, FIELDS[2:5:2])
    # Byte 700 is in the first rows: those of another band are intact.
    fields = opened(path).read(CHANNELS, slice(3, 4), slice(8, 11))
    assert np.array_equal(fields, FIELDS[3:4, :, 8:])


def test_damaged_statics_are_named(path):
    (path / "static" / "c.0.0.0").unlink()
    with pytest.raises(UserError, match=r"static/c\.0\.0\.0 with the static fields can't be read"):
        opened(path).read([Channel("land_sea_mask")], slice(0, 1), slice(0, 11))


def attributes(**changes):
    return lambda group: group.attrs.update(
        {METADATA_ATTRIBUTE: {**dict(group.attrs[METADATA_ATTRIBUTE]), **changes}}
    )


def replace(name, values):
    def change(group):
        del group[name]
        group.create_array(name, data=values)

    return change


BAD = {
    "form": (attributes(form=2), "format version 1"),
    "channels": (attributes(channels=[{"name": "t"}]), "format version 1"),
    "fewer channels": (attributes(channels=[{"variable": "t", "level": None}]), "needs the shape"),
    "fewer statics": (attributes(static=["a"]), "needs the shape"),
    "times": (replace("time", np.arange(11)), "needs the shape"),
    "twice": (replace("time", np.arange(12) // 2), "must increase"),
    "rising rows": (replace("latitude", np.linspace(-90, 90, 11)), "latitude has to decrease"),
    "no rows": (lambda group: group.__delitem__("latitude"), "has no array latitude"),
    "no fields": (lambda group: group.__delitem__("fields"), "has no array fields"),
}


@each("case", BAD)
def test_other_forms_are_refused_in_one_line(tmp_path, case):
    change, expected = BAD[case]
    path = prepared_stores.write(DATA, tmp_path / "prepared.zarr")
    change(zarr.open_group(path, mode="r+"))
    with pytest.raises(UserError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_store(tmp_path):
    with pytest.raises(UserError, match="no such zarr store"):
        opened(tmp_path / "nothing.zarr")
    (tmp_path / "text").mkdir()
    with pytest.raises(UserError, match="not a zarr group"):
        opened(tmp_path / "text")


def test_a_store_written_anew_meanwhile_is_noticed(path):
    source = opened(path)
    (path / "fields" / "zarr.json").write_text("{}")
    (path / SHARD).unlink()
    with pytest.raises(UserError, match="has changed since it was opened"):
        source.read(CHANNELS, slice(3, 4), slice(0, 11))


def test_the_date_is_named_where_a_file_holds_several(tmp_path):
    options = {"shape": FIELDS.shape, "chunks": (1, 8, 11, 8), "shards": (4, 8, 11, 8)}
    array = zarr.create_array(
        tmp_path / "s.zarr", compressors=(Crc32cCodec(),), dtype="f4", fill_value=0, **options
    )
    array[:] = FIELDS
    file = tmp_path / "s.zarr" / "c" / "1" / "0" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[content.index(FIELDS[6].tobytes()) + 9] ^= 1
    file.write_bytes(content)
    watch = StoreChangeDetector(str(tmp_path / "s.zarr"), [])
    stacked = StackedArray(zarr.open_array(tmp_path / "s.zarr"), "s.zarr", DATA.time.values, watch)
    everywhere = (slice(0, 11), slice(None))
    assert np.array_equal(stacked.read(slice(0, 6), range(8), everywhere), FIELDS[:6])
    with pytest.raises(UserError, match=r"c/1/0/0/0 with all variables at 2000-01-02T12:00"):
        stacked.read(slice(4, 8), range(8), everywhere)
