"""Static fields that only a preset names, in stores without them; names of what is missing."""

import shlex
from pathlib import Path

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.config import DataConfig
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.cli.invocation import answer
from tests.data import stores

SHORT = {"temperature": "t", "geopotential": "z", "2m_temperature": "t2m"}
CHOSEN = ("data.prognostic=[temperature,geopotential,2m_temperature]",)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as of the CDS: short names, and one of the two static fields of `data=zarr`."""
    data = stores.dataset(rows=9, columns=8, steps=60)
    data = data[[*SHORT, "land_sea_mask"]].rename(SHORT | {"land_sea_mask": "lsm"})
    return stores.write(data, tmp_path_factory.mktemp("cds") / "era5.zarr")


def composed(path: Path, *keys: str) -> DataConfig:
    given = ["data=zarr", f"data.store={path}", *keys]
    return Composer("train").compose_config(given).data


def test_absent_ones_are_left_out_if_only_the_preset_names_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        store = Store.open(composed(path, *CHOSEN))
    assert store.channels.static == ("land_sea_mask",)
    assert store.config.static == ["land_sea_mask"]
    assert f"{path} has no geopotential_at_surface: left out of data.static" in caplog.text


def test_those_that_are_named_are_an_error(path: Path) -> None:
    static = "data.static=[geopotential_at_surface,land_sea_mask]"
    with pytest.raises(UserError, match="no variable geopotential_at_surface"):
        Store.open(composed(path, *CHOSEN, static))


def test_only_what_is_missing_is_said_to_be_missing(path: Path) -> None:
    names = "data.prognostic=[temperature,specific_humidity,geopotential,mean_sea_level_pressure]"
    with pytest.raises(UserError) as error:
        Store.open(composed(path, names))
    said = str(error.value)
    assert said.startswith(f"{path}: no variable specific_humidity. ")
    assert "Also missing: mean_sea_level_pressure of data.prognostic. " in said
    Store.open(composed(path, *shlex.split(said.rpartition("leave them out: ")[2])))


@pytest.mark.slow
def test_check_has_a_note(monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path) -> None:
    code, out, err = answer(
        monkeypatch,
        "--check",
        "experiment=fast",
        "data=zarr",
        f"data.store={path}",
        f"run.dir={tmp_path}/run",
        *CHOSEN,
    )
    assert (code, err) == (0, "")
    assert f"note    {path} has no geopotential_at_surface: left out of data.static" in out
