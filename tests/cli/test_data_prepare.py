import shlex
from pathlib import Path

import pytest

from credit_dp.cli.data_commands import PREPARE_KEYS, format_duration
from credit_dp.cli.overrides import parse_overrides
from credit_dp.data.rechunk import target
from credit_dp.data.sources.prepared import PreparedSource
from tests.cli.invocation import answer
from tests.data import stores

PREPARE = ("data", "prepare")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(target, "DISK_BYTES", 2**16)
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
    assert "4 times (2000-01-01T00 to 2000-01-01T18), 5 channels, 9 x 4" in said
    assert all(f"\n{codec} " in said for codec in target.CODECS)
    assert "3 rows in a chunk" in said
    assert "4 random samples equal" in said
    source = PreparedSource.open(str(tmp_path / "out.zarr"))
    assert len(source.times) == 4
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["o #1", "2020", "a: b", "[x]", "a=b"])
def test_out_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, complaints = answer(
        monkeypatch, *PREPARE, *keys, f"out={name}", "codec=lz4", program=""
    )
    assert (code, complaints) == (0, "")
    assert PreparedSource.open(str(tmp_path / name)).grid == (9, 4)
    typed = shlex.split(said.splitlines()[-1].rpartition("data=prepared ")[2])
    (parsed,) = parse_overrides(typed)
    assert str(parsed.value()) == str(tmp_path / name)


@pytest.mark.slow
def test_tells_which_codec_is_taken(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> None:
    _, said, _ = answer(monkeypatch, *PREPARE, *keys, "codec=zstd", "grid=8x6", program="")
    assert "codec zstd, " in said
    assert "lz4" not in said
    assert "8 x 6" in said


def test_help_names_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = answer(monkeypatch, *PREPARE, "--help", program="")
    assert code == 0
    assert all(f"{key}=" in said for key in PREPARE_KEYS)
    assert all(codec in said for codec in target.CODECS)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["out=/no/such/folder.zarr"], "/no/such: there is no such folder"),
        (["domains=four"], "domains: needs a list of whole numbers"),
        (["dates=2000-01-01"], "dates: needs [first, last]"),
        (["worker=3"], "Did you mean workers?"),
        (["--json"], "has no --json"),
    ],
)
def test_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    tmp_path: Path,
    more: list[str],
    message: str,
) -> None:
    assert message in refusal_of(monkeypatch, *keys, *more)
    assert [path.name for path in tmp_path.iterdir()] == ["in.zarr"]


@pytest.mark.slow
def test_refuses_to_overwrite(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> None:
    assert answer(monkeypatch, *PREPARE, *keys, program="")[0] == 0
    assert "exists already" in refusal_of(monkeypatch, *keys)
    code, said, _ = answer(monkeypatch, *PREPARE, *keys, "overwrite=true", program="")
    assert code == 0, said


@pytest.mark.parametrize(
    ("hours", "text"), [(30.2, "30.2 hours"), (0.5, "30.0 minutes"), (0.001, "3.6 seconds")]
)
def test_durations_have_one_unit(hours: float, text: str) -> None:
    assert format_duration(hours) == text


def refusal_of(monkeypatch: pytest.MonkeyPatch, *keys: str) -> str:
    """Run `prepare`; later keys replace earlier ones."""
    last = {key.partition("=")[0]: key for key in keys}
    monkeypatch.setattr(target, "DISK_BYTES", 2**16)
    code, _, err = answer(monkeypatch, *PREPARE, *last.values(), program="")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
