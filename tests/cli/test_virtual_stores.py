"""All commands on Icechunk repositories and kerchunk references, as on zarr of the same data."""

from pathlib import Path

import pytest

from credit_dp.training.run_folder import RunFolder
from tests.cli.invocation import answer
from tests.data import stores, virtual_stores

DATA = stores.dataset(16, 32, steps=24)
RUN = (
    *("data=zarr", "model=unet_tiny", "logger=csv", "seed=11"),
    *("data.prognostic=[geopotential,temperature]", "trainer.steps=3", "trainer.log_every=1"),
    *("trainer.evaluate_hours=[6]", "data.dates.train=[2000-01-01,2000-01-04]"),
    *("data.dates.valid=[2000-01-05,2000-01-05]", "data.dates.test=[2000-01-06,2000-01-06]"),
)


def write_icechunk(data, folder: Path) -> str:
    repository = virtual_stores.repository(folder / "era5")
    session = repository.writable_session("main")
    data.to_zarr(session.store, consolidated=False)
    repository.create_tag("v1", session.commit("All times"))
    return f"{folder}/era5@tag.v1"


FORMS = {
    "icechunk": write_icechunk,
    "icechunk, virtual": virtual_stores.write_icechunk,
    "kerchunk": virtual_stores.write_json,
    "kerchunk, parquet": virtual_stores.write_parquet,
}


def command(monkeypatch, folder: Path, program: str, *words: object) -> str:
    monkeypatch.setenv("CREDIT_DP_CACHE", str(folder / "cache"))
    name = "train" if program == "train" else "credit-dp"
    texts = [*map(str, words)] if program == "train" else [*program.split(), *map(str, words)]
    code, out, err = answer(monkeypatch, *texts, program=name)
    assert code == 0, err
    return out


def train(monkeypatch, folder: Path, store: object, ranks: int) -> tuple[Path, list[str]]:
    """Train on a store; return the run's folder and the rows of its log without their times."""
    run = folder / f"run-{Path(str(store)).name}-{ranks}"
    keys = (f"data.store='{store}'", f"parallel.domain={ranks}", f"run.dir='{run}'")
    command(monkeypatch, folder, "train", *RUN, *keys)
    header, *rows = RunFolder(run).log.read_text().splitlines()
    names = header.split(",")
    kept = [names.index(name) for name in names if name == "step" or "loss" in name]
    assert len(kept) > 1
    return run, [",".join(row.split(",")[i] for i in kept) for row in rows]


def test_a_run_on_a_repository_equals_one_on_zarr(monkeypatch, tmp_path):
    plain = stores.write(DATA, tmp_path / "plain.zarr")
    expected = train(monkeypatch, tmp_path, plain, 2)[1]
    assert len(expected) >= 3
    assert train(monkeypatch, tmp_path, write_icechunk(DATA, tmp_path), 2)[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_command_takes_it_as_the_zarr_store(monkeypatch, tmp_path, form):
    plain = stores.write(DATA, tmp_path / "plain.zarr")
    store = FORMS[form](DATA, tmp_path)
    inspected = command(monkeypatch, tmp_path, "data inspect", f"store='{store}'", "domain=2")
    assert str(store) in inspected
    keys = (*RUN, f"data.store='{store}'")
    assert f"data    {store}: 24 times" in command(monkeypatch, tmp_path, "train", "--check", *keys)
    for ranks in (1, 2, 3):
        expected = train(monkeypatch, tmp_path, plain, ranks)[1]
        run, log = train(monkeypatch, tmp_path, store, ranks)
        assert log == expected
    out = tmp_path / "forecast.zarr"
    words = (f"checkpoint='{run}'", "init=2000-01-06", "lead=6h", f"out='{out}'", "device=cpu")
    command(monkeypatch, tmp_path, "forecast", *words)
    scores = []
    for truth in (store, plain):
        place = tmp_path / f"scores-{Path(str(truth)).name}"
        words = (f"forecast='{out}'", f"truth='{truth}'", f"out='{place}'")
        command(monkeypatch, tmp_path, "evaluate", *words)
        scores.append((place / "scores.csv").read_text())
    assert scores[0] == scores[1]
