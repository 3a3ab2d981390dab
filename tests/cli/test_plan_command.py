"""`credit-dp plan`: a table or JSON; what can't be sharded is listed, with exit code 1."""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from credit_dp.cli.plan import group_identical_layers
from credit_dp.data.store import Store
from credit_dp.domain_parallel.count_transport import RankTraffic
from credit_dp.domain_parallel.decide import LayerTraffic
from tests.cli.invocation import SMALL, assert_refused, hide_coarsest_rows, plan, store_overrides
from tests.data import stores
from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_json_holds_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = plan(monkeypatch, "--json", *SMALL, "parallel.domain=5", "data.batch_size=2")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["input_shapes"] == [[2, 18, 24, 48]]
    assert report["rollout"] == 1
    assert (report["model"], report["dtype"], report["ranks"]) == ("unet", "float32", 5)
    level = next(level for level in report["levels"] if level["rows"] == 12)
    assert (level["bands"], level["imbalance"], level["excess"]) == ([3, 3, 2, 2, 2], 1.25, 1.0)
    assert level["sent_bytes"] == level["least_bytes"] > 0
    exchanged = sum(sent["bytes"] for way in ("forward", "backward") for sent in report[way])
    assert sum(level["sent_bytes"] for level in report["levels"]) == exchanged
    assert report["problems"] == []
    for way in ("forward", "backward"):
        assert len(report[way]) == 5
        for rank, sent in enumerate(report[way]):
            for kind in ("messages", "bytes", "collectives", "collective_bytes"):
                assert sent[kind] == sum(layer[way][rank][kind] for layer in report["layers"])
    assert report["forward"][0]["bytes"] < report["forward"][1]["bytes"]
    assert len(report["saved_bytes"]) == 5
    assert report["parameter_bytes"] == 4 * report["parameters"]
    of_text = ["model", "parameters", "ranks", "layers", "levels", "saved_bytes", "problems"]
    assert [key for key in report if key in of_text] == of_text


def test_the_table_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = plan(monkeypatch, *SMALL, "parallel.domain=3", "trainer.dtype=float64")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "input   4 x 18 x 24 x 48, float64" in lines
    assert "ranks   3, in converted layers" in lines
    bands = next(line.split() for line in lines if line.startswith("  24 "))
    assert bands[:4] == ["24", "8", "8", "1.000"]
    assert bands[4:6] == bands[6:8]
    assert bands[8] == "1.00"
    stem = next(line.split() for line in lines if line.startswith("stem "))
    row = 4 * 18 * 48 * 8 / 1000
    assert stem[1:] == [
        *("DomainParallelPeriodicConv2d", "1", "2", f"{2 * row:.1f}", "kB"),
        *("0", "B", f"{4 * row:.0f}", "kB", "-"),
    ]
    assert "\nsaved for backward: " in out
    assert " on the fullest rank, " in out


@pytest.mark.slow
def test_the_tables_of_a_rollout_say_that_they_are_of_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for more in ([], ["--up-to", "2"]):
        words = [*SMALL, "trainer.rollout={0:1,2:3}", *more]
        _, out, _ = plan(monkeypatch, *words)
        line = "rollout up to 3 forecast steps in a training step; the tables are of one"
        assert line in out, more
        _, without, _ = plan(monkeypatch, *SMALL, *more)
        assert out.splitlines()[-3:] == without.splitlines()[-3:], more
        assert "rollout" not in without


@pytest.mark.slow
def test_layers_that_send_the_same_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = plan(monkeypatch, *SMALL, "model.blocks=3", "parallel.domain=3")
    lines = out[out.index("\nlayers ") :].splitlines()[2:]
    table = [line.split() for line in lines[: lines.index("")] if "DomainParallel" in line]
    shown = {path: int(count) for path, _, count, *_ in table}
    assert shown["encoder.*.*.conv2"] == 6
    assert len(shown) < 15
    everything = next(line.split() for line in lines if line.startswith("all "))
    assert int(everything[1]) == sum(shown.values()) > 20


def test_one_path_for_each_line() -> None:
    few, many = (RankTraffic(1, 8),), (RankTraffic(1, 16),)
    at = {"a.0.x": few, "a.1.x": many, "a.2.x": few, "a.3.x": many, "b.0": few, "b.1": few}
    layers = [LayerTraffic(path, "Conv", sent, sent) for path, sent in at.items()]
    found = {path: len(group) for path, group in group_identical_layers(layers).items()}
    assert found == {"a.0.x": 1, "a.1.x": 1, "a.2.x": 1, "a.3.x": 1, "b.*": 2}


@pytest.mark.slow
def test_one_rank_is_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = plan(monkeypatch, *SMALL)
    assert (code, err) == (0, "")
    assert re.search(r"\n\nsaved for backward: [0-9.]+ MB\nlaunched: [0-9,]+ kernels .*\n$", out)
    assert "layer" not in out


@pytest.mark.slow
def test_data_ranks_share_the_batch_and_levels_are_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = "data.levels=[50,250,500,850]"
    code, out, _ = plan(monkeypatch, *SMALL, "parallel.domain=2", "parallel.data=4", levels)
    assert code == 0
    assert "input   1 x 22 x 24 x 48" in out


@pytest.mark.slow
def test_a_users_store_gives_channels_and_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = stores.write(stores.dataset(), tmp_path / "store.zarr")
    arguments = (*store_overrides(store), "parallel.domain=3", "parallel.data=1")
    code, out, err = plan(monkeypatch, *arguments)
    assert (code, err) == (0, "")
    config = stores.config(store)
    inputs = Store.open(config).channels.fields().inputs
    assert f"input   {config.batch_size} x {inputs} x 12 x 8" in out
    code, out, _ = plan(monkeypatch, *arguments, "data.grid=24x48")
    assert code == 0
    assert f" x {inputs} x 24 x 48" in out
    code, out, err = plan(monkeypatch, *arguments, "parallel.domain=13")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "of the grid's 12 rows, too few for 13 ranks" in err


@pytest.mark.slow
def test_a_level_with_too_few_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with hide_coarsest_rows():
        _check_named_level(monkeypatch)


def _check_named_level(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = ("data.grid=24x48", "parallel.domain=16")
    code, out, err = plan(monkeypatch, *few_rows)
    assert (code, err) == (0, "")
    assert "one by one, because of this:\n  down.0: 12 rows can't be shared by 16" in out
    assert "none runs whole" in out


REFUSED = {
    "data.grid=3x6": "data.grid: the quickstart climate needs at least 4",
    "data.prognostic=[temprature]": (
        "data.prognostic: the quickstart climate has no variable temprature. Nearest: temperature"
    ),
    "parallel.domain=2,3": "parallel.domain: several values need",
    "--yaml": "--yaml",
}
MORE_REFUSED = {
    "data.grid=4x8": "model.channels: 3 levels need at least",
    "parallel.data=3": "data.batch_size: needs a multiple of",
    "data=zarr data.store=/nope": "/nope: no such zarr store",
}


@pytest.mark.parametrize(
    "table", [REFUSED, pytest.param(MORE_REFUSED, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_one_line(table: dict[str, str]) -> None:
    assert_refused(table, "plan")


@pytest.mark.slow
def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from credit_dp.cli.entry import dispatch, run_command\n"
        "for command in ('plan', 'verify'):\n"
        "    assert run_command(dispatch, [command, '--help'], 'credit-dp') == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("plan", "verify"):
        assert f"credit-dp {command} KEY=VALUE ...: " in done.stdout


@pytest.mark.slow
def test_era5_on_64_ranks_in_seconds_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, out, _ = plan(
        monkeypatch, "model=unet_base", "data.grid=721x1440", "parallel.domain=64", "--json"
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert code == 0
    assert time.process_time() - began < 30
    assert grown < 300e3  # kB; its parameters alone are 300 MB, its activations 100 GB
    assert sum(json.loads(out)["saved_bytes"]) > 100e9
