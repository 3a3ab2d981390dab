"""The experiments in conf/ train, on a small store in place of their own data."""

from pathlib import Path

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import Config, DatesConfig
from credit_dp.data.store import Store
from credit_dp.training.console import Screen
from credit_dp.training.monitoring import TrainingMonitor
from tests.tier_cases import every
from tests.training.runs import alone, built, make_store, step_records


def config_of(folder: Path, *overrides: str) -> Config:
    texts = [
        "data=zarr",
        f"data.store='{make_store(folder, 12)}'",
        "data.prognostic=[geopotential,temperature]",
        "data.dates.train=[2000-01-01,2000-01-03]",
        "data.dates.valid=[2000-01-04T00,2000-01-04T06]",
        "data.dates.test=[2000-01-04,2000-01-05]",
        "model=unet_tiny",
        *overrides,
    ]
    parsed = [str(override.input_line) for override in parse_overrides(texts)]
    return Composer("train").compose_config(parsed)


def losses(config: Config, steps: int | None = None) -> list[float]:
    training = built(config, alone())
    watch = TrainingMonitor(config, training, Screen(None), None, None)
    found = []
    with training.loader:
        for record in step_records(training, watch.batches()):
            found += [record.loss] if record.loss is not None else []
            if record.step == steps:
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, ["fast", "debug", "scaling"], pytest.mark.exhaustive))
def test_few_times_of_any_store_are_used(tmp_path, name):
    """Whatever its grid, and however long it is; of the quickstart it is what it was."""
    store = make_store(tmp_path, 12, steps=204)
    lists = ["data.prognostic=[temperature]", "data.levels=[500]"]
    texts = [f"experiment={name}", "data=zarr", f"data.store='{store}'", *lists]
    config = Composer("train").compose_config(texts)
    dates = Store.open(config.data).config.dates
    assert dates.train == ["2000-01-01T00", "2000-01-20T18"]  # of 164 times the first 80
    assert dates.test == ["2000-02-16T00", "2000-02-20T18"]
    if name != "scaling":
        assert len(losses(config)) == config.trainer.steps
    leads = Composer("train").compose_config([*texts, "data.step=12h"]).trainer.evaluate_hours
    assert leads == ([12] if name == "scaling" else [12, 48])
    quickstart = Composer("train").compose_config([f"experiment={name}"])
    assert quickstart.trainer.evaluate_hours == ([6] if name == "scaling" else [6, 24])
    quickstart = quickstart.data
    assert quickstart.grid == ("48x48" if name == "scaling" else "24x48")
    assert quickstart.dates == DatesConfig(
        ["2001-01-01T00", "2001-01-20T18"],
        ["2001-01-31T00", "2001-02-09T18"],
        ["2001-02-10T00", "2001-02-19T18"],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("overfit_one_batch", []),
        ("finetune", ["init_from=/run"]),
        ("ensemble", ["init_from=/run", "data.batch_size=4"]),  # of 4 samples with 8 steps each
    ],
)
def test_an_experiment_trains(tmp_path, name, more):
    config = config_of(tmp_path, f"experiment={name}", *more)
    assert len(losses(config, steps=2)) >= 1


@pytest.mark.slow
def test_one_batch_is_overfitted(tmp_path):
    changes = ["experiment=overfit_one_batch", "optimizer.lr=1e-2"]
    found = losses(config_of(tmp_path / "one", *changes))
    many = losses(config_of(tmp_path / "many", *changes, "trainer.one_batch=false"))
    assert found[-1] < found[0] / 5
    assert many[-1] > 2 * found[-1]
