"""`--again`: a run's folder is enough to repeat the run."""

import csv
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.saved_config import (
    hydra_literal,
    overrides_of_run,
    read_checkpoint_config,
)
from credit_dp.cli.sweep_jobs import first_difference
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.sweeps.read import read_file
from credit_dp.training import checkpoint_files
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from tests.cli.invocation import answer, assert_refused, refusal
from tests.training.runs import make_store

ODD = [
    "experiment=fast",
    "model=unet_tiny",
    "trainer.rollout={0: 1, 100: 2}",
    "loss=huber",
    "loss.variable_weight={2m_temperature: 0.5, geopotential: 1e-3}",
    "parallel.layout={encoder.0: cpu}",
    "logger.project='a \\'b\\' \"c\", d=e'",
    "optimizer.ema=0.99",
    "data.levels=[500, 850]",
    "run.name=first",
]


def parsed(texts: Sequence[str]) -> list[str]:
    return [str(override.input_line) for override in parse_overrides(texts)]


def saved(folder: Path, *overrides: str) -> Config:
    config = Composer("train").compose_config(parsed(overrides))
    (folder / "config.yaml").write_text(f"# a comment\n{resolved_yaml(config)}")
    return config


def again(folder: Path, *overrides: str) -> Config:
    composer = Composer("train")
    earlier = overrides_of_run(str(folder), overrides, composer)
    return composer.compose_config(parsed([*earlier, *overrides]))


def test_the_config_is_the_same_but_for_the_folder(tmp_path: Path) -> None:
    config = saved(tmp_path, *ODD)
    made = again(tmp_path)
    assert made == replace(config, run=made.run)
    assert made.run.name is None


def test_the_paths_of_a_saved_config_are_valid_in_every_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, work = str(Path.home()), str(tmp_path / "work")
    stores = {
        "a.zarr": f"{work}/a.zarr",
        "../b_*.nc": f"{work}/../b_*.nc",
        "~/c.zarr": f"{home}/c.zarr",
        "file://d.zarr": f"{work}/d.zarr",
        "e@branch.main": f"{work}/e@branch.main",
        "zip::file://f.zip": f"zip::file://{work}/f.zip",
        **{
            address: address
            for address in (
                *("/abs/g.zarr", "s3://bucket/h.zarr", "gs://bucket/era5@tag.v1"),
                *("https://host/i.json", "hf://datasets/org/j", "simplecache::s3://bucket/k"),
            )
        },
    }
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    config = saved(
        tmp_path,
        "data=zarr",
        "data.static=[land_sea_mask]",
        f"data.store={list(stores)}",
        "data.statistics=stats",
        "data.cache=cache",
        "init_from=outputs/first",
        "logger.mlflow=mlruns",
    )
    monkeypatch.chdir(tmp_path)
    made = again(tmp_path)
    assert made.data.store == list(stores.values())
    assert made.data.statistics == f"{work}/stats"
    assert made.data.cache == f"{work}/cache"
    assert made.init_from == f"{work}/outputs/first"
    assert made.logger.mlflow == f"{work}/mlruns"
    for resume, expected in (("auto", "auto"), ("outputs/a", f"{tmp_path}/outputs/a")):
        text = resolved_yaml(replace(config, resume=resume, run=replace(config.run, name="a")))
        assert OmegaConf.create(text).resume == expected


def test_a_saved_config_can_not_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved(tmp_path, "experiment=fast")
    monkeypatch.setenv("SECRET", "a-password")
    saved_content = OmegaConf.load(tmp_path / "config.yaml")
    saved_content.run.name = "env"
    for key, value in (
        ("logger.project", "${oc.env:SECRET}"),
        ("data.levels", "${oc.env:SECRET}"),
        ("data.cache", "${oc.decode:${oc.env:SECRET}}"),
        ("model.kind", "${oc.${run.name}:SECRET}"),
    ):
        content = saved_content.copy()
        OmegaConf.update(content, key, [value] if key == "data.levels" else value, force_add=True)
        OmegaConf.save(content, tmp_path / "config.yaml")
        with pytest.MonkeyPatch.context() as patch:
            line = refusal(patch, "--again", str(tmp_path), "--cfg", "job")
        assert f"{key} needs a plain value, got {value!r}" in line
        assert "a-password" not in line


def test_the_config_of_a_checkpoint_can_not_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved(tmp_path, "experiment=fast", "run.name=first")
    content = (tmp_path / "config.yaml").read_text().replace("first", "${oc.env:SECRET}")
    metadata = {"config": content}
    monkeypatch.setattr(checkpoint_files, "read_metadata", lambda key, path: metadata)
    with pytest.raises(UserError, match=r"checkpoint: here: run\.name needs a plain value"):
        read_checkpoint_config(Path("here"))


def test_the_cache_of_the_schema_becomes_that_of_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved(tmp_path, "experiment=fast")
    content = OmegaConf.load(tmp_path / "config.yaml")
    content.data.cache = "${oc.env:CREDIT_DP_CACHE,${oc.env:HOME,.}/.cache/credit_dp}"
    OmegaConf.save(content, tmp_path / "config.yaml")
    monkeypatch.setenv("CREDIT_DP_CACHE", "/mine")
    assert again(tmp_path).data.cache == "/mine"


@pytest.mark.slow
def test_single_keys_and_groups_can_be_changed(tmp_path: Path) -> None:
    config = saved(tmp_path, *ODD, "resume=auto")
    made = again(tmp_path, "seed=7", "model=pangu_small", "trainer.steps=6")
    assert (made.seed, made.trainer.steps, made.model.name) == (7, 6, "pangu")
    assert made.data == config.data
    assert made.resume is None  # a resumed run that is repeated starts from the beginning


@pytest.mark.slow
def test_other_versions_are_noticed(tmp_path: Path) -> None:
    config = saved(tmp_path)
    text = resolved_yaml(config).replace("variable_weight: {}", "variable_weight: {}\n  new: 1")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="new"):
        again(tmp_path)


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    assert_refused({f"--again {tmp_path}": "there is no"})
    for text, part in {"a: [": "can't be read", "a: 1": "is not the config of a run"}.items():
        (tmp_path / "config.yaml").write_text(text)
        assert_refused({f"--again {tmp_path}": part})
    saved(tmp_path)
    line = "^experiment: --again sets every key"
    assert_refused({f"--again {tmp_path} experiment=fast": line})


def test_literals() -> None:
    assert hydra_literal({0: [1.5, None], "a": {"b": True}}) == "{0: [1.5, null], a: {b: true}}"
    assert hydra_literal('a "b"') == '"a \\"b\\""'


def losses(folder: Path) -> list[str]:
    with RunFolder(folder).log.open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


@pytest.mark.slow
def test_the_printed_command_gives_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first run", tmp_path / "second"
    run = [
        "data=zarr",
        f"data.store='{make_store(tmp_path, 12)}'",
        "data.prognostic=[geopotential,temperature]",
        "data.dates.train=[2000-01-01,2000-01-03]",
        "data.dates.valid=[2000-01-04T00,2000-01-04T06]",
        "data.dates.test=[2000-01-04,2000-01-05]",
        "model=unet_tiny",
        "logger=csv",
        "trainer.steps=3",
        "trainer.log_every=1",
        "trainer.evaluate_hours=[6]",
        f"run.dir='{first}'",
        "seed=11",
    ]
    code, out, _ = answer(monkeypatch, *run)
    assert code == 0
    command = RunFolder(first).config.read_text().splitlines()[0].removeprefix("# ")
    assert f"once more    {command}" in out
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("credit-dp", "train")
    assert answer(monkeypatch, *arguments, f"run.dir='{second}'")[0] == 0
    assert losses(first) == losses(second)
    assert len(losses(first)) == 3


def test_a_config_that_would_take_all_memory_is_refused(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).config
    config = Composer("train").compose_config([])
    for text, reason in {
        "a: " + "[" * 20_000: "exceeded maximum nesting depth",
        "a: " + "[" * 60: "has more than 50 tables or lists in each other",
        "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n": r"has an alias, \*a",
    }.items():
        path.write_text(text)
        assert_refused({f"--again {tmp_path}": f"^--again: {path} can't be read .*{reason}"})
        # The folder of a sweep or of a run that is compared may be another user's.
        assert first_difference(path, config) == "config.yaml can't be read"
        assert read_file(path) is None
