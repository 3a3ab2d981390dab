"""Chunks that expand to far more bytes than their values have: refused before they fill memory."""

import bz2
import gzip
import itertools
import json
import lzma
import resource
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pytest
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_single_source
from credit_dp.data.sources.stacked import TensorStoreReader, open_shard_reader
from credit_dp.data.sources.storage import declared_size, decode_bounded, open_zarr_store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

SIZE = 200 * 2**20  # of each chunk that is too large; its values have 384 bytes
ALLOWED = 40 * 2**10  # kB: more than all reads of a small store need, far less than one such chunk
VARIABLE = "2m_temperature"


def without_size(frame: bytes) -> bytes:
    """Return a Zstandard frame whose header states no size, but a window of 128 kB."""
    single = bool(frame[4] & 0x20)
    length = (int(single), 2, 4, 8)[frame[4] >> 6]
    return frame[:4] + bytes([frame[4] & 0x1F, 0x38]) + frame[6 - single + length :]


def zstd(size: int) -> bytes:
    return numcodecs.Zstd(1).encode(bytes(size))


CONTENTS = {
    "gzip": lambda size: gzip.compress(bytes(size)),
    "gzip in two parts": lambda size: 2 * gzip.compress(bytes(size // 2)),
    "zlib": lambda size: zlib.compress(bytes(size)),
    "bz2": lambda size: bz2.compress(bytes(size)),
    "lzma": lambda size: lzma.compress(bytes(size)),
    "zstd": zstd,
    "zstd without its size": lambda size: without_size(zstd(size)),
    "blosc": lambda size: numcodecs.Blosc("zstd").encode(bytes(size)),
    "lz4": lambda size: numcodecs.LZ4().encode(bytes(size)),
}
CODECS_2 = {
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "bz2": numcodecs.BZ2(),
    "lzma": numcodecs.LZMA(),
    "zstd": numcodecs.Zstd(),
    "blosc": numcodecs.Blosc("zstd"),
    "lz4": numcodecs.LZ4(),
}
CODECS_3 = {"gzip": GzipCodec(), "zstd": ZstdCodec(), "blosc": BloscCodec(cname="zstd")}
CASES = [
    *((2, name) for name in CONTENTS),
    *((form, name) for form in (3, "shards") for name in CONTENTS if name.split()[0] in CODECS_3),
]


def write(folder: Path, form: int | str, name: str, size: int) -> Path:
    """Write a store in which the chunk of the first temperature has `size` bytes of zeros."""
    codec = (CODECS_2 if form == 2 else CODECS_3)[name.split()[0]]
    data = stores.dataset()[[VARIABLE]].drop_vars("level", errors="ignore")
    encoding = {"chunks": (1, 12, 8), "compressors": (codec,)}
    if form == "shards":
        encoding["shards"] = (2, 12, 8)
    path = folder / f"{name} {form}.zarr"
    version = 2 if form == 2 else 3
    data.to_zarr(path, zarr_format=version, consolidated=False, encoding={VARIABLE: encoding})
    content = CONTENTS[name](size)
    if form == "shards":
        index = np.array([0, len(content), 0, len(content)], "<u8").tobytes()
        content += index + google_crc32c.value(index).to_bytes(4, "little")
    file = path / VARIABLE / ("0.0.0" if form == 2 else "c/0/0/0")
    assert file.exists()
    file.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    if "shards" in path.name and find_spec(
        "tensorstore"
    ):  # by tensorstore, before zarr says what is wrong
        reader = open_shard_reader(str(path), VARIABLE, open_zarr_store(str(path)))
        assert isinstance(reader, TensorStoreReader)
        assert reader.read((slice(0, 1), slice(None), slice(None))) is None
    source = open_single_source(str(path))
    with pytest.raises(UserError) as error:
        source.read([Channel(VARIABLE)], slice(0, 1), slice(None))
    return str(error.value)


def peak() -> int:
    """Return the most memory that this process has had, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(paths: list[str]) -> None:
    """Print the refusal and the rise of memory of each store, as JSON."""
    refusal(Path(paths[0]))  # imports what reading needs
    results = []
    for path in paths[1:]:
        before = peak()
        results.append([refusal(Path(path)), peak() - before])
    print(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    paths = [str(write(folder, *case, SIZE)) for case in CASES]
    small = write(folder / "first", "shards", "gzip", 2**12)
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(small), *paths]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(CASES, json.loads(output), strict=True))


@pytest.mark.exhaustive
@each("case", CASES)
def test_a_chunk_that_expands_too_far_is_refused_before_it_fills_memory(results, case):
    text, rise = results[case]
    assert f"{VARIABLE} at 2000-01-01T00:00 can't be read" in text
    assert "expands to more than its 784 bytes" in text
    assert "\n" not in text
    assert rise < ALLOWED


FEW = [(2, "gzip"), (3, "zstd"), ("shards", "blosc")]
few_or_all = pytest.mark.parametrize(
    "cases", [FEW, pytest.param(CASES, marks=pytest.mark.exhaustive)], ids=["few", "all"]
)


@few_or_all
def test_a_chunk_that_expands_a_little_too_far_is_refused(tmp_path, cases):
    for case in cases:
        line = refusal(write(tmp_path, *case, 4096))
        assert "expands to more than its 784 bytes" in line, case


@few_or_all
def test_a_whole_chunk_is_read(tmp_path, cases):
    for case in cases:
        check_whole_chunk(tmp_path, case)


def check_whole_chunk(tmp_path, case):
    source = open_single_source(str(write(tmp_path, *case, 12 * 8 * 4)))
    fields = source.read([Channel(VARIABLE)], slice(0, 1), slice(None))
    np.testing.assert_array_equal(fields, np.zeros((1, 1, 12, 8)))


@pytest.mark.exhaustive
@each("name, size", itertools.product(["zstd", "blosc", "lz4"], [1, 255, 256, 65791, 65792, 2**20]))
def test_the_size_in_the_header_is_the_decoded_size(name, size):
    content = CONTENTS[name](size)
    assert declared_size(name, content) == size
    assert len(decode_bounded(name, content, size)) == size


def test_values_that_do_not_shrink_are_read(tmp_path):
    data = stores.dataset()[[VARIABLE]]
    for name, codecs in {"gzip": (GzipCodec(),), "two": (ZstdCodec(), Crc32cCodec())}.items():
        encoding = {VARIABLE: {"compressors": codecs}}
        data.to_zarr(tmp_path / name, zarr_format=3, consolidated=False, encoding=encoding)
        fields = open_single_source(str(tmp_path / name)).read(
            [Channel(VARIABLE)], slice(None), slice(None)
        )
        np.testing.assert_array_equal(fields[:, 0], data[VARIABLE].values)


if __name__ == "__main__":
    measure(sys.argv[1:])
