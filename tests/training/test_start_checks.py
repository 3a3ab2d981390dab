"""What a run refuses `--check` refuses, with the same line, before any statistics are computed."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import Config
from credit_dp.data import setup
from credit_dp.data.dates import times_needed
from credit_dp.data.store import Store
from credit_dp.distributed.launcher import RankInfo
from credit_dp.errors import UserError
from credit_dp.training.run import run
from credit_dp.training.run_folder import resolved_yaml
from credit_dp.training.start_checks import start_notes, validation_times, with_validation
from tests.checkpoints import save_checkpoint
from tests.cli.invocation import refusal
from tests.data import stores
from tests.training.runs import alone, built

RUN = (
    "data=zarr",
    "model=unet_tiny",
    "data.prognostic=[geopotential,temperature]",
    "data.dates.train=[2000-01-01,2000-01-07]",
    "data.dates.valid=[2000-01-08,2000-01-08]",
    "data.dates.test=[2000-01-09,2000-01-10]",
    "data.batch_size=4",
    "trainer.evaluate_hours=[6]",
    "logger.wandb=disabled",
    "device=cpu",
)
# FOLDER stands for a folder with `globe.zarr`, `region.zarr` and the checkpoint `step-00000000`.
ON_REGION = "data.store=FOLDER/region.zarr"
RESUMED = "resume=FOLDER/step-00000000"
# Of each kind of check one.
MISTAKES = {
    "a mirrored region": [ON_REGION, "trainer.mirror=0.5"],
    "a spectrum of a region": [ON_REGION, "loss.spectrum=1"],
    "a grid too small for the model": ["model.channels=[8,8,8,8,8,8]"],
    "weights of another model": ["init_from=FOLDER/step-00000000", "model=sfno_small"],
    "resumed with another model": [RESUMED, "model.channels=[8,24]"],
    "resumed with another optimizer": [RESUMED, "optimizer=muon"],
    "long leads": ["trainer.evaluate_hours=[480]"],
    "nothing to freeze": ["trainer.freeze=[nothing.*]"],
    "no key of wandb": ["logger.wandb=online", "logger.trackers=[wandb]"],
}
MORE_MISTAKES = {
    "a validation by an unknown score": ["trainer.validation_scores={rmsee:1}"],
    "a part of other dates": ["trainer.validation_dates={early:[2000-01-01,2000-01-02]}"],
    "resumed with other variables": [RESUMED, "data.prognostic=[temperature]"],
    "resumed with another seed": [RESUMED, "seed=5"],
    "few samples": ["data.batch_size=400"],
    "a weight of no variable": ["loss.variable_weight={temprature:2}"],
    "bounds of no variable": ["model.fixers=[bounds]", "model.bounds={temprature:[200,300]}"],
    "a rim on the quickstart's globe": ["data=quickstart", "data.boundary=3"],
    "a rim on a globe": ["data.boundary=3"],
    "harmonics of a region": [ON_REGION, "model=sfno_small"],
    "weights from nowhere": ["init_from=FOLDER/nowhere"],
    "a lead between two times": ["trainer.evaluate_hours=[7]"],
    "no room to validate": [
        "data.dates.valid=[2000-01-08,2000-01-08T00]",
        "trainer.validate_every=2",
    ],
    "no weights for AdamW": ["optimizer=muon", "optimizer.adamw=[haed.*]"],
}


def overrides(folder: Path, *more: str) -> list[str]:
    given = [text.replace("FOLDER", str(folder)) for text in more]
    texts = [*RUN, f"data.store={folder}/globe.zarr", f"data.cache={folder}/cache"]
    return [*{t.partition("=")[0]: t for t in [*texts, f"run.dir={folder}/run", *given]}.values()]


def composed(folder: Path, *more: str) -> Config:
    parsed = parse_overrides(overrides(folder, *more))
    return Composer("train").compose_config([str(each.input_line) for each in parsed])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    data = stores.dataset(16, 32, steps=40)
    stores.write(data, folder / "globe.zarr")
    region = data.assign_coords(latitude=np.linspace(60, 30, 16), longitude=np.arange(32) * 1.0)
    stores.write(region, folder / "region.zarr")
    config = composed(folder)
    training = built(config, alone())
    with training.loader:
        save_checkpoint(folder, training.trainer.state, resolved_yaml(config))
    return folder


@pytest.mark.parametrize(
    "mistakes",
    [MISTAKES, pytest.param(MORE_MISTAKES, marks=pytest.mark.slow)],
    ids=["each", "more"],
)
def test_check_and_run_refuse_before_statistics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mistakes: dict[str, list[str]]
) -> None:
    def compute(*_: object, **__: object) -> None:
        raise AssertionError("statistics are computed")

    configs: dict[str, Config] = {}
    lines: dict[str, str] = {}
    compose_config = Composer.compose_config
    for mistake, more in mistakes.items():

        def composed_once(self: Composer, *words: Any, mistake: str = mistake) -> Config:
            config = compose_config(self, *words)
            configs[mistake] = copy.deepcopy(config)
            return config

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Composer, "compose_config", composed_once)
            without_key(patch)
            lines[mistake] = refusal(patch, "--check", *overrides(folder, *more))
    without_key(monkeypatch)
    for name in ("with_masks", "load_or_fit_climatology"):
        monkeypatch.setattr(setup, name, compute)
    for mistake, more in mistakes.items():
        with pytest.raises(UserError) as error:
            # Some values are refused while the config is composed.
            run(configs.get(mistake) or composed(folder, *more), RankInfo())
        assert str(error.value) == lines[mistake], mistake
        assert any(text.partition("=")[0] in lines[mistake] for text in more), lines[mistake]
    assert not (folder / "run").exists()


def without_key(patch: pytest.MonkeyPatch) -> None:
    """Let wandb be switched on and have no API key."""
    patch.delenv("WANDB_MODE", raising=False)
    wandb = SimpleNamespace(login=lambda prompt: prompt)
    patch.setattr("credit_dp.training.loggers.import_wandb", lambda: wandb)


@pytest.mark.parametrize(
    ("more", "every"),
    [
        (["trainer.steps=19"], 0),
        (["trainer.steps=20"], 20),
        (["trainer.steps=450"], 50),  # 45, as a multiple of trainer.log_every
        (["trainer.steps=450", "trainer.log_every=1"], 45),
        # Of 8 forecasts of 10 steps, 80 forward passes: a twentieth of 3 passes for each of 4
        # samples a step.
        (["trainer.steps=450", "trainer.evaluate_hours=[60]"], 140),
        (["trainer.steps=450", "trainer.validate_every=7"], 7),
        (["trainer.steps=450", "trainer.validate_every=0"], 0),
        (["trainer.steps=450", "data.dates.valid=[2000-01-09,2000-01-10]"], 0),  # those of test
        (["trainer.steps=450", "trainer.evaluate_hours=[240]"], 0),  # longer than the dates
    ],
)
def test_a_run_validates_about_ten_times_if_it_has_dates_for_it(
    folder: Path, more: list[str], every: int
) -> None:
    valid = ["data.dates.valid=[2000-01-04,2000-01-08]"]
    config = composed(folder, *valid, *more)
    assert with_validation(config, Store.open(config.data)).trainer.validate_every == every


@pytest.mark.parametrize(("key", "value"), [("keep_best", "true"), ("patience", "2")])
def test_best_checkpoint_and_early_stop_need_validations(
    folder: Path, key: str, value: str
) -> None:
    keys = [f"trainer.{key}={value}", "trainer.steps=19"]
    config = composed(folder, *keys)
    with pytest.raises(UserError, match=rf"^trainer\.{key}: needs validations, .* 19 steps"):
        with_validation(config, Store.open(config.data))
    long = composed(folder, f"trainer.{key}={value}", "trainer.steps=40")
    assert with_validation(long, Store.open(long.data)).trainer.validate_every == 20
    # Dates that are chosen leave some for them.
    config = composed(folder, *keys, "data.dates=auto")
    assert times_needed(config)["valid"].number == 2


def test_parts_of_the_validation_dates_are_within_them(folder: Path) -> None:
    def found(dates: str) -> list[list[str]]:
        config = composed(folder, f"trainer.validation_dates={{{dates}}}")
        times = validation_times(config, Store.open(config.data))
        return [[str(time)[8:13] for time in part] for part in times]

    both = found("day:[2000-01-08,2000-01-08],night:[2000-01-08T00,2000-01-08T06]")
    assert both == [["08T00", "08T06", "08T12"], ["08T00"]]
    for dates, line in (
        ("2000-01-07,2000-01-08", "needs dates within data.dates.valid, which are 2000-01-08 to "),
        ("2000-01-08,2000-01-09", "needs dates within data.dates.valid, which are 2000-01-08 to "),
        ("2000-01-08T06,2000-01-08T06", "no forecast of 6 hours fits into trainer.validation_"),
    ):
        with pytest.raises(UserError, match=line) as error:
            found(f"day:[{dates}]")
        assert "trainer.validation_dates.day" in str(error.value)


def test_a_warm_up_that_never_ends_is_noted(folder: Path) -> None:
    for warmup, steps, noted in ((50, 50, True), (50, 51, False), (0, 1, False), (1, 1, False)):
        keys = (f"optimizer.warmup_steps={warmup}", f"trainer.steps={steps}")
        notes = start_notes(composed(folder, *keys))
        assert len(notes) == noted, keys
        assert all(f"warmup_steps: {warmup} " in x and f"which is {steps}:" in x for x in notes)
