"""Reads configs of earlier runs: of a run's folder for `--again`, or from a checkpoint.

A saved config becomes overrides, as if a user had typed them. So it is checked in the same way, and
keys that are newer than the run get their defaults.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.checks import expand_home
from credit_dp.cli.compose import Composer
from credit_dp.config import Config, DataConfig, as_dict, by_dotted_key
from credit_dp.errors import UserError, quote
from credit_dp.training.run_folder import RunFolder

# Groups with a key `name`, which is the name of the choice.
NAMED_GROUPS = ("model", "data", "loss", "optimizer")
FOLDER_GROUPS = ("run",)  # where a run writes: the repeated run writes to another folder


def overrides_of_run(folder: str, given: Sequence[str], composer: Composer) -> list[str]:
    """Return overrides that reproduce the config of an earlier run, except for its folder.

    Groups that the overrides `given` choose are left out.
    """
    names = [text.lstrip("+").partition("=")[0] for text in given]
    if "experiment" in names:
        raise UserError(
            "experiment: --again sets every key as in the earlier run. Give single keys instead."
        )
    path = RunFolder(expand_home("--again", folder)).config
    saved = read_run_config(path)
    texts = as_overrides(saved)
    parsed_texts = [str(override.input_line) for override in composer.parse(texts)]
    check_reproduced(path, saved, composer.compose_config(parsed_texts))
    groups = {name for name in names if name in composer.groups}
    return as_overrides({key: value for key, value in saved.items() if key not in groups})


def read_run_config(path: Path) -> dict[str, Any]:
    """Return the config in a run's folder, without keys of that folder."""
    try:
        saved = checks.load_yaml(path)
    except FileNotFoundError:
        raise UserError(f"--again: needs the folder of a run, but there is no {path}") from None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--again: {path} can't be read ({reason})") from error
    if not isinstance(saved, dict) or not saved.keys() >= {*NAMED_GROUPS, "trainer"}:
        raise UserError(f"--again: {path} is not the config of a run")
    refuse_interpolations(f"--again: {path}", saved)
    config = {str(key): value for key, value in saved.items() if key not in FOLDER_GROUPS}
    # `auto` resumes from a checkpoint in the run's folder, and the new folder has none.
    if config.get("resume") == "auto":
        del config["resume"]
    return config


def refuse_interpolations(where: str, saved: Mapping[Any, Any]) -> None:
    """Refuse interpolations in a saved config, which has none as a run writes it.

    One that has the cache as the schema gives it gets the cache of this user.
    """
    data = saved["data"]
    if isinstance(data, dict) and data.get("cache") == DataConfig.cache:
        del data["cache"]
    checks.no_interpolation(where, saved)


def as_overrides(saved: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for a whole config, choices of groups first."""
    texts = [f"{group}={saved[group]['name']}" for group in NAMED_GROUPS if group in saved]
    for key, value in saved.items():
        if isinstance(value, dict):
            texts += [f"{key}.{name}={hydra_literal(entry)}" for name, entry in value.items()]
        else:
            texts.append(f"{key}={hydra_literal(value)}")
    return texts


def hydra_literal(value: object) -> str:
    """Return a value in the syntax of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {hydra_literal(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(hydra_literal, value))}]"
    return repr(value)


def check_reproduced(path: Path, saved: Mapping[str, Any], composed: Config) -> None:
    """Check that the composed config is that of the run."""
    reproduced = values_by_key(as_dict(composed))
    for key, value in values_by_key(saved).items():
        found = reproduced.get(key)
        if found != value:
            raise UserError(
                f"--again: {path} has {key}={value!r}, but here it becomes {found!r}. The version "
                "of credit_dp or the files in conf/ have changed."
            )


def values_by_key(table: Mapping[Any, Any]) -> dict[str, object]:
    """Return all values by dotted key, with tuples as lists."""
    return {key: _tuples_to_lists(value) for key, value in by_dotted_key(table).items()}


def _tuples_to_lists(value: object) -> object:
    return (
        [_tuples_to_lists(entry) for entry in value] if isinstance(value, list | tuple) else value
    )


CHECKPOINT_KEY = "checkpoint"
# Keys that a forecast does not take over: where the run wrote, what it started from, its mesh, and
# how it was trained, which may need a plug-in that is not installed here.
RUN_ONLY_KEYS = ("run", "resume", "init_from", "loss", "optimizer", "parallel", "device")


def config_of_checkpoint(path: Path, given: Sequence[str], composer: Composer) -> Config:
    """Return the config of a checkpoint's run, with overrides, for use on any mesh.

    With `data.store` among them, a quickstart's config becomes that of a store.
    """
    saved = read_checkpoint_config(path)
    names = {text.partition("=")[0] for text in given}
    data = saved["data"]
    if "data.store" in names and data.get("name") == "quickstart":
        data |= {"name": "zarr", "grid": None, "regrid": None}
    saved["trainer"].pop("callbacks", None)  # may need a plug-in, too
    left_out = set(RUN_ONLY_KEYS)
    if saved["trainer"].get("members", 1) > 1:
        left_out.remove("loss")  # one of this package, without which members are refused
    saved_overrides = as_overrides({k: v for k, v in saved.items() if k not in left_out})
    overrides = composer.parse([*saved_overrides, *given])
    return composer.compose_config([str(override.input_line) for override in overrides])


def read_checkpoint_config(path: Path) -> dict[str, Any]:
    """Return the config in a checkpoint, as plain values."""
    from credit_dp.training.checkpoint_files import read_metadata

    text = read_metadata(CHECKPOINT_KEY, path)["config"]
    saved = OmegaConf.to_container(OmegaConf.create(str(text)))
    if not isinstance(saved, dict) or not saved.keys() >= {*NAMED_GROUPS, "trainer"}:
        raise UserError(
            f"{CHECKPOINT_KEY}: {path} does not hold the config of a run, which a forecast needs."
        )
    refuse_interpolations(f"{CHECKPOINT_KEY}: {path}", saved)
    return {str(key): value for key, value in saved.items()}
