"""The config of the run that wrote a checkpoint, with overrides, on a mesh of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.command.again import CHOSEN, as_overrides
from credit_dp.command.compose import Composer, check_overrides
from credit_dp.command.overrides import parse_overrides
from credit_dp.config import Config
from credit_dp.errors import UserError

KEY = "checkpoint"
# Of the run alone: where it wrote, what it started from, and how it was trained, which may be by a
# plug-in that is not here; and its mesh, which may be any.
LEFT_OUT = ("run", "resume", "init_from", "loss", "optimizer", "parallel", "device")


def config_of_checkpoint(path: Path, given: Sequence[str], composer: Composer) -> Config:
    """The config of a checkpoint's run; that of its mesh is the default.

    Args:
        path: of the checkpoint.
        given: overrides. `data.store` makes the quickstart's config one of a store.
        composer: of the command.

    Raises:
        UserError: the checkpoint has no config, or an override is not allowed.
    """
    saved = read(path)
    names = {text.partition("=")[0] for text in given}
    data = saved["data"]
    if "data.store" in names and data.get("name") == "quickstart":
        data |= {"name": "zarr", "grid": None}
    before = as_overrides({k: v for k, v in saved.items() if k not in LEFT_OUT})
    overrides = parse_overrides([*before, *given])
    check_overrides(overrides, composer.groups)
    return composer.config([str(override.input_line) for override in overrides])


def read(path: Path) -> dict[str, Any]:
    """The config that lies in a checkpoint, as plain values.

    Raises:
        UserError: there is none, or it can't be read.
    """
    from credit_dp.training.checkpoint_files import read_numbers

    try:
        saved = OmegaConf.to_container(OmegaConf.create(str(read_numbers(KEY, path)["config"])))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{KEY}: the config in {path} can't be read ({reason}).") from error
    if not isinstance(saved, dict) or not saved.keys() >= {*CHOSEN, "trainer"}:
        raise UserError(f"{KEY}: {path} does not hold the config of a run, which is needed here.")
    return {str(key): value for key, value in saved.items()}
