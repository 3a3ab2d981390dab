"""Every file in conf/ composes to a checked config; a user's own files are found."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from credit_dp.cli import compose, start_run
from credit_dp.cli import train as train_command
from credit_dp.cli.compose import CONFIG_GROUPS, SCHEMAS, Composer, conf_folder, without_hydra
from credit_dp.cli.entry import run_command
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import (
    Config,
    DataConfig,
    DatesConfig,
    TrainerConfig,
    by_dotted_key,
    flatten_keys,
)
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.cli.invocation import answer, assert_refused
from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
FILES = sorted(conf_folder().glob("*/*.yaml"))
NEEDS = {
    "data=zarr": ["data.store=/x.zarr"],
    "data=anemoi": ["data.store=/x.zarr"],
    "data=prepared": ["data.store=/x.zarr"],
    "experiment=finetune": ["init_from=/run"],
    "experiment=ensemble": ["init_from=/run"],
    "loss=crps": ["trainer.members=2", "model.noise=8"],
}


def choice_of(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def test_every_file_composes_and_every_model_builds() -> None:
    """Each file with files of other groups, so that there are as many compositions as models."""
    import torch

    def choices(group: str) -> list[str]:
        return [choice_of(path) for path in FILES if path.parent.name == group]

    models, experiments = choices("model"), choices("experiment")
    others = [choices(group) for group in CONFIG_GROUPS - {"model", "experiment"}]
    last = [None] * (len(models) - len(experiments)) + experiments  # they choose other files, too
    for row in zip_longest(models, last, *others):
        chosen = [choice for choice in row if choice]
        needed = [key for choice in chosen for key in NEEDS.get(choice, [])]
        config = Composer("train").compose_config([*chosen, *needed])
        with torch.device("meta"):
            model = build_model(config.model, Fields(((0, 1), (2, 3)), (4,), 2), (64, 128))
        assert sum(parameter.numel() for parameter in model.parameters()) > 0, chosen


def test_no_file_names_a_class_to_import() -> None:
    assert [path for path in conf_folder().rglob("*.yaml") if "_target_" in path.read_text()] == []


def test_every_file_names_its_schema() -> None:
    for path in FILES:
        first = yaml.safe_load(path.read_text())["defaults"][0]
        assert path.parent.name == "experiment" or str(first).startswith("schema"), path


# The schemas of our default choices, and the keys in which these differ from them on purpose.
DEFAULTS = {
    "model=unet": ("schema_unet", set()),
    "model=pangu": ("schema_pangu", set()),
    "model=crossformer": ("schema_crossformer", set()),
    "model=sfno": ("schema_sfno", set()),
    "data=quickstart": (
        "schema",
        {"name", "prognostic", "forcing", "static", "batch_size"}
        | {f"dates.{split}" for split in ("train", "valid", "test")},
    ),
    "parallel=default": ("schema", set()),
    "trainer=default": ("schema", set()),
    "loss=mse": ("schema", set()),
    "optimizer=adamw": ("schema", set()),
    "optimizer=lion": ("schema_lion", set()),
    "optimizer=muon": ("schema_muon", set()),
    "logger=wandb": ("schema", set()),
}


def keys_of(composed: DictConfig, group: str) -> dict[str, Any]:
    table = OmegaConf.to_container(composed[group])
    assert isinstance(table, dict)
    return by_dotted_key(table)


def test_schemas_and_files_have_the_same_defaults() -> None:
    """The default choices of all groups are composed at once, and so are their schemas."""
    by_schema = dict[str, list[str]]()
    for choice in DEFAULTS:
        by_schema.setdefault(choice.partition("=")[0], []).append(choice)
    for number in range(max(map(len, by_schema.values()))):
        chosen = [each[number % len(each)] for each in by_schema.values()]
        schemas = [f"{c.partition('=')[0]}={DEFAULTS[c][0]}" for c in chosen]
        ours, bare = (Composer("train").compose(texts) for texts in (chosen, schemas))
        for choice in chosen:
            group = choice.partition("=")[0]
            found, default = keys_of(ours, group), keys_of(bare, group)
            assert found.keys() == default.keys(), choice
            # The quickstart's roles and dates have no default: OmegaConf writes ??? for them.
            differ = {key for key, value in found.items() if value != default[key]}
            assert differ == DEFAULTS[choice][1], choice


def test_no_file_repeats_a_default() -> None:
    assert FILES
    for path in FILES:
        values = yaml.safe_load(path.read_text())
        defaults = values.pop("defaults")
        experiment = path.parent.name == "experiment"
        group = None if experiment else path.parent.name
        schema = OmegaConf.structured(SCHEMAS[group, "schema" if experiment else defaults[0]])
        if experiment:  # groups are MISSING there
            chosen = {key[0]: node for key, node in SCHEMAS.items() if key[1] == "schema"}
            chosen.pop(None)
            schema = OmegaConf.merge(OmegaConf.to_container(schema), chosen)
        for key, value in flatten_keys(values):
            name = ".".join(map(str, key))
            default = OmegaConf.select(schema, name, default=...)
            assert key[0] == "hydra" or default != value, (path, name)


def test_every_group_has_its_defaults_compared() -> None:
    first = yaml.safe_load((conf_folder() / "config.yaml").read_text())["defaults"]
    chosen = {f"{k}={v}" for entry in first if isinstance(entry, dict) for k, v in entry.items()}
    ours = {choice for choice in chosen if choice.partition("=")[0] in CONFIG_GROUPS}
    assert ours - {"experiment=None"} <= DEFAULTS.keys()


def test_keys_outside_of_groups_have_their_defaults_in_the_schema() -> None:
    composed, schema = Composer("train").compose([]), OmegaConf.structured(Config)
    single = [key for key in schema if key not in CONFIG_GROUPS]
    assert {key: composed[key] for key in single} == {key: schema[key] for key in single}


def test_a_users_files_are_found_and_have_our_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for group, text in {
        "loss": "defaults: [schema, _self_]\nname: mae\n",
        "model": "defaults: [unet, _self_]\nchannels: [8, 24]\n",
    }.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    composer = Composer("train")
    config = composer.compose_config(["loss=mine", "model=mine"])
    assert config.loss == composer.compose_config(["loss=mae"]).loss
    assert config.model.channels == [8, 24]


@pytest.mark.slow
def test_cfg_job_is_the_config_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = answer(monkeypatch, "--cfg", "job", "parallel.domain=3", "seed=5")
    assert (code, err) == (0, "")
    shown = OmegaConf.create(out)
    assert (shown.parallel.domain, shown.seed, "hydra" in shown) == (3, 5, False)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def command(arguments: Sequence[str], program: str) -> int:
        found.append(Composer("train").compose_config(arguments).data.cache)
        return 0

    for variable, folder in {"CREDIT_DP_CACHE": "/me/.cache/credit_dp", "HOME": "/cache"}.items():
        monkeypatch.setenv("CREDIT_DP_CACHE", "/cache")
        monkeypatch.setenv("HOME", "/me")
        monkeypatch.setenv(variable, "")
        assert run_command(command, [], "train") == 0
        assert found.pop() == folder
        assert variable not in os.environ
    assert_refused({"data.cache=": "^data.cache: needs a folder, got an empty text.$"})


@pytest.mark.slow
def test_the_fast_experiment_is_for_every_model() -> None:
    config = Composer("train").compose_config(["experiment=fast"])
    assert (config.model.channels, config.trainer.steps) == ([8, 16], 5)
    for name in ("crossformer_small", "diffusion", "pangu_small", "sfno_small", "swin_small"):
        chosen = Composer("train").compose_config([f"model={name}"]).model
        config = Composer("train").compose_config([f"model={name}", "experiment=fast"])
        assert (config.model, config.trainer.steps) == (chosen, 5)


@pytest.mark.slow
def test_check_plans_and_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = answer(monkeypatch, "--check", "experiment=fast", "parallel.domain=2")
    assert code == 0
    assert out.startswith("The config is valid.\n")
    assert "mesh    pipeline 1 x data 1 x domain 2" in out
    assert "memory  each rank: about 2." in out
    assert "activations 2.0 MB" in out
    longer = answer(
        monkeypatch, "--check", "experiment=fast", "parallel.domain=2", "trainer.rollout={0: 3}"
    )[1]
    assert "activations 6.0 MB" in longer
    half = answer(
        monkeypatch, "--check", "experiment=fast", "parallel.domain=2", "trainer.autocast=bfloat16"
    )[1]
    assert "activations 99" in half  # kB
    assert "weights in bfloat16" in half


@pytest.mark.slow
def test_help_names_groups_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = answer(monkeypatch, "--help")
    assert code == 0
    models = sorted(path.stem for path in conf_folder().glob("model/*.yaml"))
    assert {"crossformer", "pangu", "unet", "unet_base"} <= set(models)
    assert f"  model: {', '.join(models)}\n" in out
    assert "schema" not in out
    assert f"{'  batch_size: 4':<36}  # samples of all ranks together, whatever the mesh\n" in out
    keys = out[out.index("\nmodel:\n") :].strip()
    assert OmegaConf.create(keys) == without_hydra(Composer("train").compose([]))
    lines = keys.splitlines()
    assert [line for line in lines if not line.endswith(":") and "  # " not in line] == []


def test_the_console_script_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, expected in {
        (): "credit-dp doctor",
        ("--help",): "credit-dp train",
        ("doctor", "--help"): "--json",
        ("--version",): "credit_dp 0.",
    }.items():
        code, out, _ = answer(monkeypatch, *arguments, program="credit-dp")
        assert (code, expected in out) == (0, True), arguments
    assert_refused(
        {
            "trian": "Did you mean train?",
            "export outputs/a": (
                "^credit-dp: 'export' is a part of a command. Use credit-dp checkpoint export.$"
            ),
        },
        "",
    )


def test_ctrl_c_waits_for_the_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omegaconf would turn a KeyboardInterrupt into an AttributeError of its own."""
    stored: list[str] = []

    def interrupted_store(self: ConfigStore, name: str, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stored.append(name)

    monkeypatch.setattr(ConfigStore, "store", interrupted_store)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Composer("train")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert len(stored) > 10


def test_ctrl_c_while_commands_are_imported() -> None:
    code = """
import os, signal, sys
from credit_dp import cli

class InterruptImports:
    def find_spec(self, name, *args):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, InterruptImports())
cli.{function}()
"""
    for function in ("main", "train_main"):
        words = [sys.executable, "-c", code.replace("{function}", function)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_the_fork_server_first_imports_nothing_else_of_the_package() -> None:
    first = "credit_dp.distributed.forkserver"
    code = f"import sys, {first}; print(*[n for n in sys.modules if 'credit' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["credit_dp", "credit_dp.distributed", first]


@pytest.mark.slow
def test_a_users_choice_goes_before_ours_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    (own / "fast.yaml").write_text("# @package _global_\ntrainer: {steps: 77}\n")
    (tmp_path / "conf" / "config.yaml").write_text("of: another program\n")
    (tmp_path / "conf" / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 5\n")
    monkeypatch.chdir(tmp_path)
    config = Composer("train").compose_config(["experiment=fast"])
    assert (config.trainer.steps, config.data.grid, config.seed) == (77, None, 0)
    assert Composer("train", config_name="mine").compose_config([]).seed == 5


def test_a_root_file_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    unknown = "^conf/mine.yaml: seeed: no such key. Did you mean seed[?] Allowed here: model, "
    for text, line in {
        "defaults: [config, _self_]\nseeed: 5\n": unknown,  # OmegaConf refuses the key
        "defaults: [_self_, config]\nseeed: 5\n": unknown,  # merged before the schema
        "of: another program\n": (
            "^conf/mine.yaml: needs `schema` or `config` as the first entry of its defaults, but "
            "has neither .its keys: of.. Change defaults or --config-name."
        ),
    }.items():
        (tmp_path / "conf" / "mine.yaml").write_text(text)
        assert_refused({"--config-name=mine": line})


def data_of(*texts: str) -> DataConfig:
    overrides = [str(override.input_line) for override in parse_overrides(texts)]
    return Composer("train").compose_config(overrides).data


@pytest.mark.slow
def test_dates_of_a_preset_differ_from_given_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dates of a preset are replaced if a store lacks them; a user's dates are not."""
    own = tmp_path / "conf" / "data"
    own.mkdir(parents=True)
    changed = "dates: {test: ['2021-01-01', '2021-12-31']}\n"
    (own / "mine.yaml").write_text(f"defaults: [weatherbench2, _self_]\n{changed}")
    monkeypatch.chdir(tmp_path)
    train = ["1979-01-01", "2017-12-31"]
    assert data_of("data=weatherbench2").dates.preset == ["train", "valid", "test"]
    assert data_of("data=mine").dates.preset == ["train", "valid"]
    given = data_of("data=weatherbench2", f"data.dates.train=[{','.join(train)}]").dates
    assert (given.train, given.preset) == (train, ["valid", "test"])
    assert data_of("data=quickstart").dates.preset == []


@pytest.mark.slow
def test_dates_can_be_left_to_the_store() -> None:
    every = data_of("data=weatherbench2", "data.dates=auto").dates
    assert every == DatesConfig("auto", "auto", "auto")
    assert data_of("data=zarr", "data.store=x").dates == every
    some = data_of("data=zarr", "data.store=x", "data.dates.train=[19790101,20171231]").dates
    assert (some.train, some.valid) == (["19790101", "20171231"], "auto")


def test_a_start_composes_converts_and_checks_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []

    def count(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    launched: list[Config] = []
    monkeypatch.setattr(start_run, "launch", lambda config, **_: launched.append(config) or 0)
    count(ConfigLoaderImpl, "_load_configuration_impl")
    count(compose, "to_config")
    count(train_command, "check_run_config")
    count(DataConfig, "__post_init__")
    count(TrainerConfig, "__post_init__")
    # Without an experiment: its interpolations build a `DataConfig`, too.
    assert answer(monkeypatch, "run.name=x", "data.dates.train=[2001-01-01,2001-02-01]")[0] == 0
    assert sorted(calls) == sorted(
        ["_load_configuration_impl", "to_config", "check_run_config", *["__post_init__"] * 2]
    )
    assert launched[0].run.dir == str(tmp_path / "outputs/x")
    assert (tmp_path / "outputs/x/.hydra/config.yaml").exists()


def test_composed_configs_are_copies_and_have_overrides_of_hydra() -> None:
    composer = Composer("train")
    overrides = ["seed=3", "hydra.run.dir=/tmp/elsewhere"]
    composer.compose(overrides).seed = 4
    composed = composer.compose(overrides)
    assert (composed.seed, composed.hydra.run.dir) == (3, "/tmp/elsewhere")


def test_a_job_of_a_sweep_knows_which_dates_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    launched: list[Config] = []
    monkeypatch.setattr(start_run, "launch", lambda config, **_: launched.append(config) or 0)
    dates = "data.dates.train=[1979-01-01,2017-12-31]"
    assert answer(monkeypatch, "-m", "data=weatherbench2", dates, "run.name=x")[0] == 0
    assert [config.data.dates.preset for config in launched] == [["valid", "test"]]


@pytest.mark.slow
def test_help_and_errors_import_nothing_heavy() -> None:
    """Without torch, `--help` is fast on any machine."""
    code = (
        "import sys; from credit_dp.cli.entry import run_command; "
        "from credit_dp.cli.train import train\n"
        "assert run_command(train, ['--cfg', 'job'], 'train') == 0\n"
        "assert run_command(train, ['--help'], 'train') == 0\n"
        "heavy = {'torch', 'xarray', 'zarr', 'wandb', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_preset_does_to_variables_of_no_list_is_dropped() -> None:
    anemoi = ("data=anemoi", "data.store=x")
    for texts, kept in (
        ((*anemoi, "data.diagnostic=[tp]"), ["tp"]),
        # Keys under another name of the variable replace the preset's.
        ((*anemoi, "data.variables.tp.normalise=std"), ["total_precipitation"]),
        # The sum over six hours is another variable.
        (("data=weatherbench2", "data.diagnostic=[tp]"), []),
        (
            (
                "data=weatherbench2",
                "data.diagnostic=[]",
                "data.variables.total_precipitation_6hr.normalise=std",
                "data.variables.2m_temprature.fill=0",
            ),
            ["2m_temprature"],
        ),
    ):
        assert list(data_of(*texts).variables) == kept, texts
