"""`--check`: the report on a run's data, and the exit code where they can't be reached."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_dp.cli import check_run
from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.data.store import Store
from credit_dp.training.run_folder import resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.cli.invocation import answer, assert_refused, refusal
from tests.data import stores
from tests.training.runs import alone, built

# A run on `stores.dataset` with 40 times.
RUN = (
    "data=zarr",
    "model=unet_tiny",
    "data.prognostic=[geopotential,temperature]",
    "data.dates.train=[2000-01-01,2000-01-07]",
    "data.dates.valid=[2000-01-08,2000-01-08]",
    "data.dates.test=[2000-01-09,2000-01-10]",
    "data.batch_size=4",
    "trainer.evaluate_stride_hours=6",
)


def data_with(present: list[int] | None = None) -> xr.Dataset:
    data = stores.dataset(16, 32, steps=40)
    return data if present is None else data.isel(time=present)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stores.write(data_with(), tmp_path_factory.mktemp("data") / "s.zarr", zarr_format=2)


def run_on(where: object, *more: str) -> list[str]:
    """Return the command line of a run; later keys replace earlier ones."""
    keys = {text.partition("=")[0]: text for text in (*RUN, f"data.store='{where}'", *more)}
    return ["--check", *keys.values()]


def test_a_check_reports_the_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = answer(monkeypatch, *run_on(store))
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == [
        "The config is valid.",
        f"data    {store}: 40 times, 2000-01-01T00:00 to 2000-01-10T18:00, "
        "6 fields on 16 x 32 points",
        "samples 27 for training, 6 steps of 4 in an epoch; 4 forecasts to 24 h for testing",
    ]
    assert "\nmodel   unet, " in out
    assert "\nmemory  each rank: about " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_check_says_which_dates_are_chosen(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    out = answer(monkeypatch, *run_on(store), "data.dates=auto", "trainer.evaluate_hours=[6]")[1]
    assert "dates   auto: train 2000-01-01T00 to 2000-01-08T18 (32 times), valid" in out


def test_a_run_on_few_times_passes_or_is_told_all_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(count: int, *more: str) -> tuple[int, str, str]:
        path = tmp_path / f"{count}.zarr"
        if not path.exists():
            stores.write(data_with([*range(count)]), path)
        given = run_on(path, "experiment=fast", *more)
        return answer(monkeypatch, *(text for text in given if ".dates." not in text))

    # Batches of 4 pairs need 5 times, and forecasts to 24 h too; validations are not made.
    assert check(10)[0] == 0
    code, _, err = check(9)
    assert (code, err.count("\n")) == (2, 1)
    assert "This run needs 10: 5 for train, 5 for test." in err
    assert "with 1, {0: 1} and [6] it needs 4." in err
    assert check(4, "data.batch_size=1", "trainer.evaluate_hours=[6]")[0] == 0
    validated = ("data.batch_size=1", "trainer.evaluate_hours=[6]", "trainer.validate_every=1")
    assert "This run needs 6: 2 for train, 2 for valid, 2 for test." in check(4, *validated)[2]


@pytest.mark.slow
def test_a_check_says_what_gaps_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    present = [i for i in range(40) if i not in (3, 10, 11)]
    path = stores.write(data_with(present), tmp_path / "s.zarr")
    out = answer(monkeypatch, *run_on(path))[1]
    assert "samples 22 for training" in out
    assert "2 in the times, missing: 3 times; skipped across them: 2 training samples\n" in out


@pytest.mark.slow
def test_a_check_says_which_sums_are_incomplete(
    monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    sums = ("data.variables.solar.accumulated=true", "data.forcing=[solar]", "data.step=12h")
    out = answer(monkeypatch, *run_on(store, *sums, "trainer.evaluate_hours=[12]"))[1]
    assert "sums    left out, as some hours of their sums are missing: 1 time\n" in out


@pytest.mark.exhaustive
def test_a_check_opens_a_netcdf_file_with_text_several_times(tmp_path: Path) -> None:
    """In a process of its own: the HDF5 library crashed at the third opening."""
    data_with().assign(note="a text").to_netcdf(tmp_path / "s.nc")
    ensemble = ("parallel.ensemble=2", "trainer.members=2", "model.noise=4", "loss=crps")
    command = ["-m", "credit_dp", "train", *run_on(tmp_path / "s.nc", *ensemble)]
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "ensemble 2" in found.stdout


def with_gap(data: xr.Dataset) -> xr.Dataset:
    values = data["temperature"].values.copy()
    values[0, 1, 5, 2] = np.nan
    return data.assign(temperature=(stores.DIMS, values))


def in_celsius(data: xr.Dataset) -> xr.Dataset:
    return data.assign(temperature=data["temperature"].assign_attrs(units="degC"))


REFUSED = {
    "data.prognostic=[temprature]": "no variable temprature. Nearest",
    "data.variables.tempurature.fill=0": "data.variables.tempurature: no list",
    "data.dates.test=[2000-01-09,2000-01-20]": (
        "holds 2000-01-01T00:00 to 2000-01-10T18:00, but data.dates.test asks for"
    ),
    "data.step=9h": "data.step",
    "data.batch_size=28": "one batch needs 28 samples, but .* has 27",
    "trainer.evaluate_hours=[48]": "no forecast of 48 hours fits into",
    "trainer.validate_every=1 data.dates.valid=[2000-01-08T00,2000-01-08T00]": (
        "fits into data.dates.valid"
    ),
    "parallel.domain=9": "parallel.domain: the model's coarsest level",
    "data.regrid=rows": "data.regrid=rows is for cells in rows of",
    "data.regrid=bilinear": "data.regrid: bilinear needs a grid",
    "data.statistics=/nope.json": "/nope.json: no such file",
    "resume=tests": "resume: tests holds no checkpoint of a run",
    "init_from=/nope": "init_from: needs the path of a checkpoint",
    "optimizer=muon optimizer.adamw=[heads.*]": (  # weights of no layer
        r"optimizer.adamw: .* 'heads.\*' matches none of \d+\. Did you mean head\.|Names are like"
    ),
    "trainer.freeze=[nothing.*]": "trainer.freeze: .* Names are like stem",
    "\"trainer.freeze=['*']\"": "trainer.freeze: leaves no parameter to train",
    "loss.variable_weight={temprature:2}": (
        "loss.variable_weight: needs names from data.prognostic or data.diagnostic, got 'temprat"
    ),
    "data.cache=pyproject.toml/cache": (
        "data.cache: .*pyproject.toml is not a folder. Set data.cache to another folder."
    ),
    "run.dir=pyproject.toml/runs": (
        "run.dir: .*pyproject.toml is not a folder. Set run.dir to another folder.|"
        "run.dir: cannot read pyproject.toml/runs"
    ),
    f"run.dir=/tmp/{'a' * 256}": (
        "run.dir: cannot read /tmp/a+ .File name too long.. Give another run.dir."
    ),
    f"data.cache=/tmp/{'a' * 256}": (
        "data.cache: cannot read /tmp/a+ .File name too long.. Give another data.cache."
    ),
    "data.store=/nope.zarr": "/nope.zarr: no such zarr store",
}


@pytest.mark.slow
def test_what_a_run_would_refuse(store: Path) -> None:
    assert_refused(REFUSED, "train", *run_on(store))


@pytest.mark.slow
def test_the_first_fields_and_their_units_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, (change, needed) in enumerate(((with_gap, "temperature"), (in_celsius, "degC"))):
        path = stores.write(change(data_with()), tmp_path / f"{number}.zarr")
        assert needed in refusal(monkeypatch, *run_on(path))
        if change is with_gap:
            monkeypatch.setattr(check_run, "READ_BYTES", 0)
            assert "values  not read" in answer(monkeypatch, *run_on(path))[1]


@pytest.mark.slow
def test_the_first_middle_and_last_dates_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path
) -> None:
    line = "values  read at 2000-01-01T00:00, 2000-01-04T06:00, 2000-01-07T18:00, "
    assert line in answer(monkeypatch, *run_on(store))[1]
    # The splits may share dates.
    dates = "[2000-01-02,2000-01-02T18]"
    few = [f"data.dates.{split}={dates}" for split in ("train", "test")]
    few += ["trainer.evaluate_hours=[6]", "data.batch_size=1", "trainer.validate_every=0"]
    out = answer(monkeypatch, *run_on(store, *few))[1]
    assert "2000-01-02T18:00; not read at 1 other date\n" in out
    for index in (13, 27, 39):
        data = data_with()
        values = data["temperature"].values.copy()
        values[index, 1, 5, 2] = np.nan
        data = data.assign(temperature=(stores.DIMS, values))
        path = stores.write(data, tmp_path / f"{index}.zarr")
        day = str(data["time"].values[index].astype("M8[m]"))
        assert f"temperature has NaN at {day}" in refusal(monkeypatch, *run_on(path))


@pytest.mark.slow
def test_the_quickstart_is_checked_without_making_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CREDIT_DP_CACHE", str(tmp_path))
    line = refusal(monkeypatch, "--check", "data.quickstart.runs=2")
    assert "but data.dates.train asks for 2001-01-01T00 to 2003-03-01T18" in line
    line = refusal(monkeypatch, "--check", "data.levels=[50000]")
    assert "has no level 50000" in line
    assert line.endswith("did you mean data.levels=[500]?")
    chosen = ("data.quickstart.runs=2", "data.dates=auto")
    assert "dates" not in answer(monkeypatch, "--check", *chosen)[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_checkpoint_has_to_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path
) -> None:
    texts = [*run_on(store)[1:], f"run.dir={tmp_path}", f"data.cache={tmp_path / 'cache'}"]
    parsed = [str(override.input_line) for override in parse_overrides(texts)]
    config = Composer("train").compose_config(parsed)
    training = built(config, alone())
    with training.loader:
        save_checkpoint(tmp_path / "checkpoint", training.trainer.state, resolved_yaml(config))
    assert "holds the checkpoint of an earlier run" in refusal(monkeypatch, "--check", *texts)
    on = [*texts, "resume=auto"]
    code, out, err = answer(monkeypatch, "--check", *on)
    assert (code, err) == (0, "")
    assert f"resume  after step 0 from {tmp_path}/checkpoint/step-00000000\n" in out
    for change, needed in {
        "data.prognostic=[temperature,geopotential]": "was trained with data.prognostic=",
        "model.channels=[8,24]": "trained with model.channels=[8,16], the config has [8,24]",
        "data.dates.train=[2000-01-01,2000-01-06]": "the checkpoint was made with count=27",
        "seed=5": "seed=0, but this run has 5",
    }.items():
        assert needed in refusal(monkeypatch, "--check", *on, change)


@pytest.mark.slow
def test_a_sweep_opens_each_store_once(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    opened = []

    def open_and_count(*arguments: Any) -> Store:
        opened.append(arguments)
        return original(*arguments)

    original = Store.open
    monkeypatch.setattr(Store, "open", open_and_count)
    line = refusal(monkeypatch, "-m", *run_on(store), "seed=1,2", "trainer.evaluate_hours=[6],[72]")
    assert "no forecast of 72 hours" in line
    assert len(opened) == 1
    out = answer(monkeypatch, "-m", *run_on(store), "seed=1,2")[1]
    assert out.startswith("The configs of all 2 runs are valid.\ndata    ")


class Refusing(BaseHTTPRequestHandler):
    """A server that denies all access."""

    def do_GET(self) -> None:
        self.send_error(403)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def address(store: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    handlers = {"files": partial(Quiet, directory=str(store.parent)), "refusing": Refusing}
    with ThreadingHTTPServer(("127.0.0.1", 0), handlers[request.param]) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["files"], indirect=True)
def test_a_store_elsewhere_is_opened(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    code, out, _ = answer(monkeypatch, *run_on(f"{address}/s.zarr"))
    assert (code, "values  read at 2000-01-01T00:00, " in out) == (0, True)
    monkeypatch.setattr(check_run, "REMOTE_READ_BYTES", 0)
    out = answer(monkeypatch, *run_on(f"{address}/s.zarr"))[1]
    assert "values  not read: the fields of 2000-01-01T00:00 take" in out
    line = refusal(monkeypatch, *run_on(f"{address}/t.zarr"))
    assert f"{address}/t.zarr: not a zarr group" in line
    assert "no variable x" in refusal(monkeypatch, *run_on(f"{address}/s.zarr", "data.static=[x]"))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["refusing"], indirect=True)
def test_a_store_that_nobody_may_read_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for sweep in ((), ("-m", "seed=1,2")):
        code, out, err = answer(monkeypatch, *sweep, *run_on(f"{address}/s.zarr"))
        assert (code, err) == (3, ""), sweep
        assert f"{address}/s.zarr: can't be reached from here (403" in out


def test_an_unknown_host_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    code, out, err = answer(monkeypatch, *run_on("https://nobody.invalid/s.zarr"))
    assert (code, err) == (3, "")
    assert out.startswith(
        "The config is valid.\nThere is no plan, because the data can't be read: "
    )
    assert "nobody.invalid/s.zarr: can't be reached from here (nobody.invalid: " in out
    assert out.count("\n") == 2


@pytest.mark.slow
def test_a_host_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_run, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"http://127.0.0.1:{server.getsockname()[1]}/s.zarr"
        code, out, _ = answer(monkeypatch, *run_on(where))
    assert code == 3
    assert "can't be reached from here (no answer within 0.5 seconds)" in out
