import shlex
from pathlib import Path

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.data_commands import PREPARE_KEYS, format_duration
from credit_dp.cli.overrides import parse_overrides
from credit_dp.data.rechunk import target
from credit_dp.data.selection import select_channels
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedSource
from tests.cli.invocation import answer, assert_refused
from tests.data import stores
from tests.data.rechunk.requests import tree

PREPARE = ("data", "prepare")
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    store = stores.write(stores.dataset(rows=9, columns=4, steps=5), tmp_path / "in.zarr")
    return [
        f"store={store}",
        f"out={tmp_path / 'out.zarr'}",
        "data.prognostic=[geopotential,2m_temperature]",
        "data.forcing=[day_of_year_sin,solar]",
        "data.static=[land_sea_mask]",
        "workers=1",
    ]


@pytest.mark.slow
def test_prepares_and_says_how(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], tmp_path: Path
) -> None:
    code, said, complaints = answer(
        monkeypatch, *PREPARE, *keys, "domains=[1,3]", "dates=[2000-01-01,2000-01-01]", program=""
    )
    assert (code, complaints) == (0, "")
    assert "4 times (2000-01-01T00 to 2000-01-01T18), 5 fields, 9 x 4" in said
    assert "codec zstd, 3 rows in a chunk: " in said
    assert "4 random samples equal" in said
    source = PreparedSource.open(str(tmp_path / "out.zarr"))
    assert len(source.times) == 4
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize(
    "name", ["o #1", *(pytest.param(n, marks=EXHAUSTIVE) for n in ("2020", "a: b", "[x]", "a=b"))]
)
def test_out_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, complaints = answer(
        monkeypatch, *PREPARE, *keys, f"out={name}", "codec=lz4", "grid=8x6", program=""
    )
    assert (code, complaints) == (0, "")
    assert "codec lz4, " in said
    assert "zstd" not in said
    assert "8 x 6" in said
    assert PreparedSource.open(str(tmp_path / name)).grid == (8, 6)
    parsed = parse_overrides(training_keys(said))
    assert str(parsed[1].value()) == str(tmp_path / name)


def training_keys(said: str) -> list[str]:
    """Return the keys in the last line, as a shell reads them."""
    return shlex.split(said.splitlines()[-1].partition("Train with ")[2])


def test_the_last_line_trains_on_what_was_copied(
    monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    # A preset whose variables differ from those of data=prepared, as copies of few fields do.
    transform = "data.variables.2m_temperature.normalise=minmax"
    more = (transform, "data.step=12h", "codec=none")
    code, said, _ = answer(monkeypatch, *PREPARE, *keys, *more, program="")
    assert code == 0
    composer = Composer("train")
    texts = [str(override.input_line) for override in composer.parse(training_keys(said))]
    config = composer.compose_config(texts).data
    assert config.name == "prepared"
    assert config.variables["2m_temperature"].normalise == "minmax"
    assert config.step == "12h"
    channels = select_channels(open_source(config), config)
    names = {channel.variable for channel in channels.prognostic}
    assert names == {"geopotential", "2m_temperature"}
    assert channels.forcing == ("day_of_year_sin", "solar")
    assert channels.static == ("land_sea_mask",)


def test_help_names_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = answer(monkeypatch, *PREPARE, "--help", program="")
    assert code == 0
    assert all(f"{key}=" in said for key in PREPARE_KEYS)
    assert all(codec in said for codec in target.CODECS)


def test_refused_in_one_line(keys: list[str], tmp_path: Path) -> None:
    table = {
        "out=/no/such/folder.zarr": "/no/such: there is no such folder",
        "domains=four": "domains: needs a list of whole numbers",
        "dates=2000-01-01": "dates: needs [first, last]",
        "worker=3": "Did you mean workers?",
        "--json": "has no --json",
    }
    assert_refused(table, "data prepare", *keys)
    assert [path.name for path in tmp_path.iterdir()] == ["in.zarr"]


@pytest.mark.slow
def test_overwrites_only_if_it_may(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], tmp_path: Path
) -> None:
    assert answer(monkeypatch, *PREPARE, *keys, program="")[0] == 0
    before = tree(tmp_path / "out.zarr")
    assert_refused({"": "exists already. Change out, or say overwrite=true"}, "data prepare", *keys)
    assert tree(tmp_path / "out.zarr") == before
    more = ("overwrite=true", "codec=none")
    code, said, _ = answer(monkeypatch, *PREPARE, *keys, *more, program="")
    assert code == 0, said
    assert tree(tmp_path / "out.zarr") != before


def test_durations_have_one_unit() -> None:
    texts = [format_duration(hours) for hours in (30.2, 0.5, 0.001)]
    assert texts == ["30.2 hours", "30.0 minutes", "3.6 seconds"]
