import json

import numpy as np
import pytest

from credit_dp.cli.data_commands import stats as command
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from tests.data import stores

NAMES = "[geopotential,2m_temperature,temperature]"


@pytest.fixture
def keys(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    return [
        f"store={path}",
        f"data.prognostic={NAMES}",
        "data.forcing=[day_of_year_sin,solar]",
        "data.dates.train=[2000-01-01,2000-01-02]",
        f"data.cache={tmp_path / 'cache'}",
    ]


def stats(*arguments):
    return command(arguments, "credit-dp data stats")


def refused(*arguments):
    with pytest.raises(UserError) as caught:
        stats(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.slow
def test_the_command_says_what_it_reads_and_how_long_then_writes_the_file(keys, tmp_path, capsys):
    out = tmp_path / "stats.json"
    assert stats(*keys, f"out={out}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 dates, 2000-01-01T00:00 to 2000-01-02T18:00; 24.6 kB of fields" in lines[0]
    assert lines[1] == "variables: geopotential, 2m_temperature, temperature, solar"
    assert lines[2].startswith("expected: ")
    assert "64/64" in lines[-2]
    assert lines[-1] == f"{out}: train with data.statistics={out}"
    assert set(json.loads(out.read_text())["channels"]) >= {"temperature_850", "land_sea_mask"}
    config = stores.config(tmp_path / "store.zarr", statistics=str(out))
    given, computed = (
        prepare_training_data(config),
        prepare_training_data(stores.config(tmp_path / "store.zarr")),
    )
    assert np.array_equal(given.statistics.std, computed.statistics.std)


@pytest.mark.slow
def test_without_out_training_finds_it(keys, tmp_path, monkeypatch):
    assert stats(*keys) == 0
    (file,) = (tmp_path / "cache").glob("statistics-*.json")
    before = file.stat().st_mtime_ns
    prepare_training_data(stores.config(tmp_path / "store.zarr"))
    assert file.stat().st_mtime_ns == before
    assert len(list((tmp_path / "cache").glob("statistics-*.json"))) == 1


@pytest.mark.slow
def test_existing_statistics_are_kept_and_other_files_not_replaced(keys, tmp_path, capsys):
    out = tmp_path / "stats.json"
    assert stats(*keys, f"out={out}", "every=3") == 0
    written = out.read_text()
    capsys.readouterr()
    assert stats(*keys, f"out={out}", "every=3", "workers=1") == 0
    assert capsys.readouterr().out.splitlines() == [f"{out}: train with data.statistics={out}"]
    assert "exists with every=3, not 1. Change out" in refused(*keys, f"out={out}")
    keys[3] = "data.dates.train=[2000-01-01,2000-01-01]"
    assert "has statistics of dates" in refused(*keys, f"out={out}", "every=3")
    assert out.read_text() == written
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert "is no file of statistics" in refused(*keys, f"out={other}")
    assert other.read_text() == "mine"


BAD_INPUT = {
    "every=0": "every: needs a whole number of at least 1",
    "evry=2": "Did you mean every?",
    "scheduler=tcp://127.0.0.1:9": "no dask scheduler answers at tcp://127.0.0.1:9",
    "data.prognostic=[wind]": "no variable wind",
    "climatology=true every=2": "every: can't be used with climatology=true",
}
MORE_BAD_INPUT = {
    "out=/proc/nowhere/stats.json": "cannot be created",
    "workers=x": "workers: needs a whole number",
    "data.dates.train=[2000-01-01T00,2000-01-01T00]": "no two dates of data.dates.train",
    'data.variables.temperature.convert="hPa->Pa"': "temperature needs data.variables",
    "climatology=true out=stats.json": "out: can't be used with climatology=true",
    "climatology=true workers=3": "workers: can't be used with climatology=true",
    "climatology=true scheduler=tcp://127.0.0.1:9": "scheduler: can't be used with climatology=t",
}


@pytest.mark.parametrize(
    "table",
    [BAD_INPUT, pytest.param(MORE_BAD_INPUT, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_bad_input_is_one_line(keys, monkeypatch, table):
    monkeypatch.setattr("credit_dp.data.streaming.CONNECT_SECONDS", 0.2)
    for given, part in table.items():
        assert part in refused(*keys, *given.split()), given


def test_dates_are_chosen_among_those_with_a_whole_sum(keys, tmp_path, capsys):
    without = [key for key in keys if not key.startswith("data.dates")]
    summed = ["data.variables.solar.accumulated=true", "data.step=12h"]
    summed += ["trainer.evaluate_hours=[12]", "data.batch_size=1"]
    assert stats(*without, *summed, f"out={tmp_path / 'all.json'}") == 0
    assert "2 dates, 2000-01-01T12:00 to 2000-01-02T00:00" in capsys.readouterr().out


@pytest.mark.slow
def test_variables_can_be_set(keys, tmp_path):
    for said in ("data.variables.solar.normalise=std", "data.variables={solar: {normalise: std}}"):
        assert stats(*keys, said, f"out={tmp_path / 'std.json'}", "every=3") == 0
        line = "no list of the data config has a variable wind"
        assert line in refused(*keys, said.replace("solar", "wind"))


@pytest.mark.slow
def test_without_dates_it_takes_those_that_training_would(keys, tmp_path, capsys):
    del keys[3]
    short = ("trainer.evaluate_hours=[6]", "data.batch_size=1")
    assert stats(*keys, *short, f"out={tmp_path / 'stats.json'}", "every=2") == 0
    text = capsys.readouterr().out
    assert "5 dates, 2000-01-01T00:00 to 2000-01-03T00:00, every=2" in text
    assert "data.dates: auto: train 2000-01-01T00 to 2000-01-03T00 (9 times), valid" in text
    assert "every=3 is better" in text
    every = "data.dates.train=[2000-01-01,2000-01-03]"
    assert stats(*keys, every, f"out={tmp_path / 'every.json'}") == 0
    assert "12 dates, 2000-01-01T00:00 to 2000-01-03T18:00" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command_key", ["every=1", pytest.param("climatology=true", marks=pytest.mark.slow)]
)
def test_automatic_dates_leave_what_the_run_needs(keys, tmp_path, capsys, command_key):
    """A tenth of 40 times are 4; a forecast of 36 hours needs 7, and one of 12 hours needs 3."""
    stores.write(stores.dataset(steps=40), tmp_path / "long.zarr")
    keys[0] = f"store={tmp_path / 'long.zarr'}"
    del keys[3]
    assert stats(*keys, "trainer.evaluate_hours=[12,36]", "data.batch_size=1", command_key) == 0
    text = capsys.readouterr().out
    assert "auto: train 2000-01-01T00 to 2000-01-08T00 (29 times), valid 2000-01-08T06 to " in text
    assert "(4 times), test 2000-01-09T06 to 2000-01-10T18 (7 times)" in text
    line = refused(*keys, "trainer.evaluate_hours=[240]", "data.batch_size=1", command_key)
    assert "for test. Give it more times, or lower data.batch_size" in line


@pytest.mark.slow
def test_a_cluster_gives_the_same_bits(keys, tmp_path):
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address
        assert stats(*keys, f"out={tmp_path / 'a.json'}", f"scheduler={address}") == 0
    assert stats(*keys, f"out={tmp_path / 'b.json'}") == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
