"""The forecast command: `credit-dp forecast checkpoint=... init=... lead=240h`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import common_parser, parse_arguments
from credit_dp.cli.compose import Composer, check_overrides, check_rows
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.saved_config import config_of_checkpoint
from credit_dp.config import Config
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.forecast.request import ForecastConfig


HELP = """\
{program} checkpoint=RUN init=TIME lead=240h KEY=VALUE ...: forecasts with a trained model.
{program} check PATH: says whether a forecast is complete, or what of it is missing.

  checkpoint=RUN    the folder of a run, whose newest checkpoint is taken, or of one checkpoint, of
                    any mesh; forecasts use the averages of the weights, if there are any
  init=TIME         initial times: 2001-02-10T06, or [2001-02-10,2001-02-11T12], or
                    FIRST/LAST/STRIDE, like 2001-02-10/2001-02-14/24h
  lead=240h         how far, in hours or days
  every=24h         the lead times that are written; every step unless given
  out=PATH          what to write; forecast.zarr in the run's folder unless given
  format=zarr       one zarr store; or netcdf: a folder of files, one for each rank; or
                    netcdf_file: one file
  members=10 perturb=0.1   an ensemble from initial states that are perturbed by smooth random
                    fields, of so many standard deviations of each field
  perturb_seed=0    what these are drawn from

All other keys are those of the config, and are as in the run; but for those of the mesh, which may
be any: parallel.domain=2 parallel.data=2. Initial states are read from the run's data, or from
data.store=STORE.

Killed at any point, it goes on where it stopped when it is started again. Until it is complete,
PATH is called PATH.partial.

  --help, -h    this text

Exit code: 0 if it is done, or complete; 1 if a check says that it is not; 2 if something that was
given is wrong.
"""

FORECAST_KEYS: Mapping[str, Any] = {
    "checkpoint": "",
    "init": "",
    "lead": "",
    "out": "",
    "every": "",
    "format": "zarr",
    "members": 0,
    "perturb": 0.0,
    "perturb_seed": 0,
}
REQUIRED_KEYS = {
    "checkpoint": "the folder of a run or of a checkpoint",
    "init": "initial times, like init=2001-02-10",
    "lead": "how far, like lead=240h",
}
CONFIG_PREFIXES = ("parallel.", "data.", "trainer.", "model.")  # what keys of the config begin with
TOP_LEVEL_KEYS = ("device", "compile")  # keys of it that stand alone


def forecast(arguments: Sequence[str], program: str) -> int:
    """Forecast, or check a forecast; the exit code.

    Raises:
        UserError: a key is wrong, or something is not as needed.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(HELP.format(program=program))
        return 0
    if args.overrides[:1] == ["check"]:
        return report_completeness(args.overrides[1:], program)
    config = forecast_config(args.overrides, program)
    from credit_dp.distributed import launch

    return launch(config, "credit_dp.forecast.run:run")


def report_completeness(paths: Sequence[str], program: str) -> int:
    """Say whether a forecast is complete; 1 if not.

    Raises:
        UserError: there is none.
    """
    if len(paths) != 1:
        raise UserError(f"{program} check: needs the path of one forecast, got {len(paths)}.")
    from credit_dp.forecast.check import check_forecast

    finding = check_forecast(paths[0])
    sys.stdout.write("\n".join([*finding.lines(), ""]))
    return 0 if finding.complete else 1


def forecast_config(given: Sequence[str], program: str) -> "ForecastConfig":
    """The config of the run, what was given changed, and what to forecast.

    Raises:
        UserError: a key or a value does not exist, is not allowed, or there is no checkpoint.
    """
    own, rest = split_arguments(given, program)
    for key, what in REQUIRED_KEYS.items():
        if not own[key]:
            raise UserError(f"{key}: needs {what}, got nothing. Give it.")
    path, run = find_checkpoint_and_run(own["checkpoint"])
    composer = Composer(program.rpartition(" ")[2])
    check_overrides(parse_overrides(rest), composer.groups)
    config = config_of_checkpoint(path, rest, composer)
    from credit_dp.forecast.request import ForecastConfig, ForecastRequest

    endings = {"netcdf": "forecast-netcdf", "netcdf_file": "forecast.nc"}
    out = own["out"] or str(run / endings.get(own["format"], "forecast.zarr"))
    request = ForecastRequest(**{**own, "checkpoint": str(path), "out": out})
    request.check(config.data.step_hours)
    request.initial_times()
    target = request.target
    if checks.existing_path(str(target)) is not None:
        raise UserError(f"{target}: is there already. Change out.")
    config = without_training_settings(config)
    check_rows(replace(config, data=replace(config.data, grid=checkpoint_grid(path))))
    values = {field.name: getattr(config, field.name) for field in fields(Config)}
    return ForecastConfig(**values, request=request)


def find_checkpoint_and_run(value: str) -> tuple[Path, Path]:
    """A checkpoint, and the folder of its run.

    Raises:
        UserError: there is none.
    """
    from credit_dp.training.checkpoint_files import locate_checkpoint, run_folder_of

    if checks.existing_path(value) is None:
        raise UserError(
            f"checkpoint: needs the folder of a run or of a checkpoint, but {value} does not "
            "exist. Change checkpoint."
        )
    path = locate_checkpoint("checkpoint", value).absolute()
    return path, run_folder_of(path)


def checkpoint_grid(path: Path) -> str | None:
    """`ROWSxCOLUMNS` that a checkpoint was trained on, if it says."""
    from credit_dp.training.checkpoint_files import read_metadata

    grid = read_metadata("checkpoint", path)["data"].get("data.grid")
    return grid if isinstance(grid, str) else None


def without_training_settings(config: Config) -> Config:
    """The config without what only training needs, with a sample for each copy of the model."""
    from credit_dp.config import microbatches_per_step

    trainer = replace(config.trainer, accumulate=1, checkpoint_activations=False, freeze=[])
    config = replace(config, trainer=trainer, resume=None, init_from=None)
    batch = count_data_ranks(config) * microbatches_per_step(config)
    return replace(config, data=replace(config.data, batch_size=batch))


def count_data_ranks(config: Config) -> int:
    """How many copies of the model there will be, as the launcher counts them.

    Raises:
        UserError: the mesh does not fit the ranks that were started.
    """
    from credit_dp.distributed import placement
    from credit_dp.distributed.launcher import find_launcher

    launcher = find_launcher(os.environ)
    if launcher is not None:
        return placement.data_ranks_of_launcher(config.parallel, launcher)
    gpus = 0 if config.device == "cpu" or config.parallel.data else placement.count_visible_gpus()
    return placement.data_ranks_on_gpus(config.parallel, gpus // config.parallel.gpus_per_rank)


def split_arguments(given: Sequence[str], program: str) -> tuple[dict[str, Any], list[str]]:
    """The command's own keys with their values, and the overrides of the config.

    Raises:
        UserError: a key that is neither, or a value of another type.
    """
    own, rest = dict(FORECAST_KEYS), []
    for text in given:
        key, equals, value = text.partition("=")
        if equals and key in FORECAST_KEYS:
            own[key] = _parse_value(key, value)
        elif equals and (key.startswith(CONFIG_PREFIXES) or key in TOP_LEVEL_KEYS):
            rest.append(text)
        else:
            raise UserError(
                f"{program}: needs keys like {', '.join(FORECAST_KEYS)}, or parallel.NAME and "
                "data.NAME, got "
                f"{text!r}.{did_you_mean(key, FORECAST_KEYS)}"
            )
    return own, rest


def _parse_value(key: str, text: str) -> Any:
    """The text as the type of the key's default.

    Raises:
        UserError: it is not of that type.
    """
    kind = type(FORECAST_KEYS[key])
    if kind is str:
        return text[1:-1] if text[:1] in "'\"" and text[:1] == text[-1:] and len(text) > 1 else text
    try:
        return kind(text)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise UserError(f"{key}: needs {number}, got {text!r}") from None
