"""Configs of earlier runs: repeated with `--again`, or read from a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.checks import expand_home
from credit_dp.cli.compose import Composer, check_overrides
from credit_dp.cli.overrides import parse_overrides, quote
from credit_dp.config import Config, as_dict
from credit_dp.config.model import with_legacy_defaults
from credit_dp.errors import UserError
from credit_dp.training.run_folder import RunFolder

# Groups whose choice has the name that is in the config.
NAMED_GROUPS = ("model", "data", "loss", "optimizer")
FOLDER_GROUPS = ("run",)  # keys of where a run writes: another run writes elsewhere


def overrides_of_run(folder: str, given: Sequence[str], composer: Composer) -> list[str]:
    """The overrides that make the config of an earlier run, but for where it wrote.

    Args:
        folder: of the run.
        given: overrides that come after them; a group chosen there is left to them.
        composer: of this command.

    Raises:
        UserError: the folder has no config, this version makes another one of it, or an
            experiment is given, which could not change it.
    """
    names = [text.lstrip("+").partition("=")[0] for text in given]
    if "experiment" in names:
        raise UserError(
            "experiment: --again takes every key from the earlier run. Give single keys instead."
        )
    path = RunFolder(expand_home("--again", folder)).config
    saved = read_run_config(path)
    made = as_overrides(saved)
    overrides = parse_overrides(made)
    check_overrides(overrides, composer.groups)
    parsed = [str(override.input_line) for override in overrides]
    check_reproduced(path, saved, composer.config(parsed))
    groups = {name for name in names if name in composer.groups}
    return as_overrides({key: value for key, value in saved.items() if key not in groups})


def read_run_config(path: Path) -> dict[str, Any]:
    """The config of a run, without what is its own.

    Raises:
        UserError: there is none, or it can't be read.
    """
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"--again: needs the folder of a run, but there is no {path}") from None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--again: {path} can't be read ({reason})") from error
    if not isinstance(saved, dict) or not saved.keys() >= {*NAMED_GROUPS, "trainer"}:
        raise UserError(f"--again: {path} is not the config of a run")
    found = {str(key): value for key, value in saved.items() if key not in FOLDER_GROUPS}
    if found.get("resume") == "auto":  # of the same folder
        del found["resume"]
    return found


def as_overrides(saved: Mapping[str, Any]) -> list[str]:
    """KEY=VALUE for all of a config, choices of groups first.

    Keys of the model that did not exist yet have the values that it was made with.
    """
    if "model" in saved:
        model = with_legacy_defaults(saved["model"]["name"], saved["model"])
        saved = {**saved, "model": model}
    texts = [f"{group}={saved[group]['name']}" for group in NAMED_GROUPS if group in saved]
    for key, value in saved.items():
        if isinstance(value, dict):
            texts += [f"{key}.{name}={hydra_literal(entry)}" for name, entry in value.items()]
        else:
            texts.append(f"{key}={hydra_literal(value)}")
    return texts


def hydra_literal(value: object) -> str:
    """A value as it is written after KEY=."""
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


def check_reproduced(path: Path, saved: Mapping[str, Any], made: Config) -> None:
    """Refuse to pass another config for that of the run.

    Raises:
        UserError: a key has another value.
    """
    now = as_dict(made)
    for key, value in flatten_keys(saved):
        found: Any = now
        for name in key:
            found = found.get(name) if isinstance(found, dict) else None
        if tuples_to_lists(found) != tuples_to_lists(value):
            raise UserError(
                f"--again: {path} has {'.'.join(map(str, key))}={value!r}, of which {found!r} is "
                "made here. The version of credit_dp or the files in conf/ have changed."
            )


def flatten_keys(
    table: Mapping[Any, Any], above: tuple[Any, ...] = ()
) -> list[tuple[tuple[Any, ...], Any]]:
    """All values of nested tables with their keys; empty tables count as values."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    for key, value in table.items():
        nested = isinstance(value, dict) and value
        found += flatten_keys(value, (*above, key)) if nested else [((*above, key), value)]
    return found


def tuples_to_lists(value: object) -> object:
    """Tuples as lists, all the way down."""
    return [tuples_to_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


KEY = "checkpoint"
# Of the run alone: where it wrote, what it started from, and how it was trained, which may be by a
# plug-in that is not here; and its mesh, which may be any.
RUN_ONLY_KEYS = ("run", "resume", "init_from", "loss", "optimizer", "parallel", "device")


def config_of_checkpoint(path: Path, given: Sequence[str], composer: Composer) -> Config:
    """The config of a checkpoint's run; that of its mesh is the default.

    Args:
        path: of the checkpoint.
        given: overrides. `data.store` makes the quickstart's config one of a store.
        composer: of the command.

    Raises:
        UserError: the checkpoint has no config, or an override is not allowed.
    """
    saved = read_checkpoint_config(path)
    names = {text.partition("=")[0] for text in given}
    data = saved["data"]
    if "data.store" in names and data.get("name") == "quickstart":
        data |= {"name": "zarr", "grid": None}
    before = as_overrides({k: v for k, v in saved.items() if k not in RUN_ONLY_KEYS})
    overrides = parse_overrides([*before, *given])
    check_overrides(overrides, composer.groups)
    return composer.config([str(override.input_line) for override in overrides])


def read_checkpoint_config(path: Path) -> dict[str, Any]:
    """The config that lies in a checkpoint, as plain values.

    Raises:
        UserError: there is none, or it can't be read.
    """
    from credit_dp.training.checkpoint_files import read_metadata

    try:
        saved = OmegaConf.to_container(OmegaConf.create(str(read_metadata(KEY, path)["config"])))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{KEY}: the config in {path} can't be read ({reason}).") from error
    if not isinstance(saved, dict) or not saved.keys() >= {*NAMED_GROUPS, "trainer"}:
        raise UserError(f"{KEY}: {path} does not hold the config of a run, which is needed here.")
    return {str(key): value for key, value in saved.items()}
