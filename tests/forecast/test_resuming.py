"""An interrupted forecast does not look complete, and resumes to the same bits."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import xarray as xr

from credit_dp.data.rechunk import target
from credit_dp.errors import UserError
from credit_dp.forecast import open_sharded
from credit_dp.forecast.check import check_forecast
from credit_dp.forecast.stored_forecast import ZarrForecast
from credit_dp.training.forecast_step import ForecastStep
from tests.forecast.runs import files, forecast, forecast_config, train_diffusion
from tests.full_disk import full_disk
from tests.ranks import TIMEOUT

FORMATS = ("zarr", "netcdf")
AFTER = 6  # lead times of 8


class StopError(Exception):
    """Stands for a killed process."""


def stop_after(monkeypatch, count: int) -> None:
    """Let the writer stop in the middle of the forecasts."""
    write, done = ZarrForecast.write, []

    def some(self, *field):
        done.append(field)
        if len(done) > count:
            raise StopError
        write(self, *field)

    monkeypatch.setattr(ZarrForecast, "write", some)


def steps_of(monkeypatch) -> list[int]:
    """Return a list to which every forecast step appends."""
    steps: list[int] = []
    step = ForecastStep.__call__

    def counted(*args):
        steps.append(1)
        return step(*args)

    monkeypatch.setattr(ForecastStep, "__call__", counted)
    return steps


@pytest.mark.parametrize("form", FORMATS)
def test_a_forecast_resumes_to_the_same_bits(config, whole, tmp_path, monkeypatch, form):
    settings = forecast_config(config, tmp_path / "f", format=form)
    with monkeypatch.context() as patch:
        stop_after(patch, AFTER)
        with pytest.raises(StopError):
            forecast(settings)
    out = tmp_path / "f"
    assert not out.exists()
    partial = tmp_path / "f.partial"
    finding = check_forecast(str(out))
    assert not finding.complete
    assert finding.forecast.path == partial
    assert len(finding.missing) == 2
    assert "2000-01-04T12 +24h, rows 0 to 16" in "\n".join(finding.lines())
    kept = {path: path.stat().st_mtime_ns for path in partial.rglob("*") if "." in path.name}
    del kept[partial / ".lock"]  # the only lock file, of a process that has ended
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.partial"]
    # What a killed process was writing.
    (partial / "geopotential" / ".c.1.3.0.0.0.123.partial").write_bytes(b"half")
    steps = steps_of(monkeypatch)
    forecast(settings)
    assert len(steps) == 4  # the first time was complete
    assert not list(out.rglob("*.partial"))
    assert not partial.exists()
    assert check_forecast(str(out)).complete
    if form == "zarr":
        same = [path for path in kept if not path.name.endswith(".partial")]
        assert len(same) >= 2
        for path in same:
            assert (out / path.relative_to(partial)).stat().st_mtime_ns == kept[path]
        assert files(out) == files(whole)
    else:
        with open_sharded(out) as found, xr.open_zarr(whole) as wanted:
            assert found.drop_attrs().identical(wanted.drop_attrs())


def test_an_empty_chunk_is_written_again(config, whole, tmp_path, monkeypatch):
    settings = forecast_config(config, tmp_path / "f")
    with monkeypatch.context() as patch:
        stop_after(patch, AFTER)
        with pytest.raises(StopError):
            forecast(settings)
    (tmp_path / "f.partial/temperature/c.0.1.0.0.0").write_bytes(b"")  # the disk was full
    forecast(settings)
    assert files(tmp_path / "f") == files(whole)


def test_a_whole_store_that_lost_a_chunk_is_not_complete(whole, tmp_path):
    assert check_forecast(str(whole)).complete
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(whole, damaged)
    (damaged / "temperature/c.1.2.0.0.0").unlink()
    finding = check_forecast(str(damaged))
    assert not finding.complete
    assert finding.lines()[0].endswith("7 of 8 fields are written")
    assert "2000-01-04T12 +18h, rows 0 to 16" in finding.lines()[1]


def test_other_forecasts_are_not_mixed(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, AFTER)
        with pytest.raises(StopError):
            forecast(forecast_config(config, tmp_path / "f"))
    for keys, word in ({"lead": "12h"}, "lead"), ({"init": "2000-01-04T06"}, "init"):
        with pytest.raises(UserError, match=f"was begun with another {word}|{word}") as refused:
            forecast(forecast_config(config, tmp_path / "f", **keys))
        assert "\n" not in str(refused.value)
    settings = forecast_config(config, tmp_path / "f")
    single = replace(settings, trainer=replace(settings.trainer, dtype="float32"))
    with pytest.raises(UserError, match=r"was begun with trainer\.dtype=float64, not"):
        forecast(single)
    (tmp_path / "g.partial").mkdir()
    with pytest.raises(UserError, match="is not a forecast that was begun"):
        forecast(forecast_config(config, tmp_path / "g"))
    assert xr.open_zarr(forecast(forecast_config(config, tmp_path / "f"))).sizes["time"] == 2


@pytest.mark.slow
def test_other_samples_are_not_mixed(tmp_path, monkeypatch):
    config = train_diffusion(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, AFTER)
        with pytest.raises(StopError):
            forecast(forecast_config(config, tmp_path / "f"))
    fewer = replace(config, model=replace(config.model, sampling_steps=1))
    with pytest.raises(UserError, match=r"was begun with model\.sampling_steps=2, not 1"):
        forecast(forecast_config(fewer, tmp_path / "f"))
    other = replace(config, model=replace(config.model, sigma_data=0.5))
    with pytest.raises(UserError, match=r"was trained with model\.sigma_data=1\.0, the config has"):
        forecast(forecast_config(other, tmp_path / "g"))
    # Another sampler of the same weights.
    assert forecast(forecast_config(fewer, tmp_path / "g")).exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line(config, whole, tmp_path, monkeypatch):
    write, written = target.write_bytes_atomic, []

    def until_full(path, content, **options):
        written.append(path)
        if len(written) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content, **options)

    settings = forecast_config(config, tmp_path / "f")
    with monkeypatch.context() as patch:
        patch.setattr(target, "write_bytes_atomic", until_full)
        with pytest.raises(UserError, match="can't be written") as refused:
            forecast(settings)
    assert "(No space left on device)" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "f").exists()
    assert files(forecast(settings)) == files(whole)


# The last is full when the first file has begun.
@pytest.mark.parametrize(("form", "limit"), [("zarr", 100), ("netcdf", 8000)])
def test_a_disk_that_is_really_full(config, tmp_path, form, limit):
    with full_disk(limit):
        with pytest.raises(UserError, match="can't be written") as refused:
            forecast(forecast_config(config, tmp_path / "f", format=form))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "f").exists()
    assert not (tmp_path / "f.new.partial").exists()


KILLED = """
import os, signal, sys
from credit_dp.cli.entry import dispatch, run_command
from credit_dp.forecast.stored_forecast import ZarrForecast
write, done = ZarrForecast.write, []
def some(*args):
    done.append(1)
    if len(done) > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
ZarrForecast.write = some
sys.exit(run_command(dispatch, sys.argv[1:], "credit-dp"))
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed(config, whole, tmp_path):
    out = tmp_path / "f.zarr"
    words = ["forecast", f"checkpoint={config.run.dir}", "init=2000-01-04/2000-01-04T12/12h"]
    words += ["lead=24h", f"out={out}", "device=cpu"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False, timeout=TIMEOUT)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert Path(f"{out}.partial").is_dir()
    script = "from credit_dp.cli.entry import main; main()"
    subprocess.run([sys.executable, "-c", script, *words], check=True, timeout=TIMEOUT)
    assert files(out) == files(whole)
