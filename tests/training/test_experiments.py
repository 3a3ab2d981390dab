"""The experiments in conf/ train, on a small store in place of their own data."""

from pathlib import Path

import pytest

from credit_dp.command.compose import Composer
from credit_dp.command.overrides import parse_overrides
from credit_dp.config import Config
from credit_dp.training.screen import Screen
from credit_dp.training.watch import Watch
from tests.training.runs import alone, built, make_store


def config_of(folder: Path, *overrides: str) -> Config:
    texts = [
        "data=zarr",
        f"data.store='{make_store(folder, 12)}'",
        "data.prognostic=[geopotential,temperature]",
        "data.dates.train=[2000-01-01,2000-01-03]",
        "data.dates.valid=[2000-01-04T00,2000-01-04T06]",
        "data.dates.test=[2000-01-04,2000-01-05]",
        "data.grid=null",
        "model=unet_tiny",
        *overrides,
    ]
    parsed = [str(override.input_line) for override in parse_overrides(texts)]
    return Composer("train").config(parsed)


def losses(config: Config, steps: int | None = None) -> list[float]:
    training = built(config, alone())
    watch = Watch(config, training, Screen(None), None, None)
    found = []
    with training.loader:
        for record in watch.steps(training.trainer.steps(watch.batches())):
            found += [record.loss] if record.loss is not None else []
            if record.step == steps:
                break
    return found


@pytest.mark.parametrize(
    ("name", "more"), [("debug", []), ("overfit_one_batch", []), ("finetune", ["init_from=/run"])]
)
def test_it_trains(tmp_path, name, more):
    config = config_of(tmp_path, f"experiment={name}", *more)
    assert len(losses(config, steps=2)) >= 1


def test_one_batch_is_learned_by_heart(tmp_path):
    changes = ["experiment=overfit_one_batch", "optimizer.lr=1e-2"]
    found = losses(config_of(tmp_path / "one", *changes))
    many = losses(config_of(tmp_path / "many", *changes, "trainer.one_batch=false"))
    assert found[-1] < found[0] / 5
    assert many[-1] > 2 * found[-1]
