"""The forecast command: `credit-dp forecast checkpoint=... init=... lead=240h`."""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, final

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import common_parser, parse_arguments, split_keys
from credit_dp.cli.compose import Composer, check_rows
from credit_dp.cli.forecast_plot import plot
from credit_dp.cli.output import print_lines
from credit_dp.cli.saved_config import config_of_checkpoint
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import locate_checkpoint, read_metadata, run_folder_of

if TYPE_CHECKING:
    from credit_dp.data.calendar import Calendar
    from credit_dp.forecast.request import ForecastConfig


HELP = """\
{program} checkpoint=RUN init=TIME lead=240h KEY=VALUE ...: forecasts with a trained model.
{program} check PATH: says whether a forecast is complete, and which parts are missing.
{program} plot PATH KEY=VALUE ...: draws a map or an animation of a forecast; see plot --help.

  checkpoint=RUN    the folder of a run, whose newest checkpoint is used, or of one checkpoint, of
                    any mesh; forecasts use the average of the weights, if there is one
  init=TIME         initial times: 2001-02-10T06, or [2001-02-10,2001-02-11T12], or
                    FIRST/LAST/STRIDE, like 2001-02-10/2001-02-14/24h
  init_file=STATE.grib   initial states from GRIB or netCDF files, [A,B] for several; init is then
                    their time, and need not be given
  regrid=bilinear   how states of init_file come to the model's grid from another one:
                    conservative (cell means) or bilinear; by default as data.regrid
  grid=source       write on the cells of the data, as of O96; with format=zarr or grib
  boundary=DRIVER.zarr   of a model of a region with data.boundary: what gives the rim: a forecast
                    or analysis of a larger model, interpolated bilinearly in space and linearly in
                    time, [A,B] for several files; or truth, the rim in the run's data
  lead=240h         how far, in hours or days
  every=24h         the lead times to write; by default every step
  out=PATH          the forecast to write; by default forecast.zarr in the run's folder
  format=zarr       one zarr store; or netcdf: a folder of files, one for each rank; or
                    netcdf_file: one file; or grib: one file of GRIB edition 2
  members=10        an ensemble of a model with model.noise, or of a diffusion model
  model.sampling_steps=4   of a diffusion model: fewer steps, or other keys of its sampler
  members=10 perturb=0.1   an ensemble; its initial states are perturbed by smooth random fields,
                    with this many standard deviations of each field
  perturb_seed=0    seed of the random fields and of the model's noise
  diagnostics=[z,msl,tcw]   fields to derive and write beside the model's: geopotential, mean sea
                    level pressure, column water (tcw), column water vapour (tcwv); and what
                    model.fixers changed: dry_air_correction, water_correction, energy_correction
  pressure_levels=[500,850]   write fields on these pressure levels, in hPa, not on model levels

All other keys are those of the config, and have the values of the run. The mesh may be any other:
parallel.domain=2 parallel.data=2. Initial states are read from the run's data, or from
data.store=STORE.

If it is killed, the same command continues where it stopped. Until it is complete, PATH is called
PATH.partial.

  --help, -h    this text

Exit code: 0 if the forecast is complete; 1 if `check` finds it incomplete; 2 if a key or value is
wrong.
"""

REQUIRED_KEYS = {
    "checkpoint": "the folder of a run or of a checkpoint",
    "init": "initial times, like init=2001-02-10, or init_file",
    "lead": "how far, like lead=240h",
}
# By format, of forecasts in the folder of their run.
FILE_NAMES = {
    "zarr": "forecast.zarr",
    "netcdf": "forecast-netcdf",
    "netcdf_file": "forecast.nc",
    "grib": "forecast.grib",
}
CONFIG_PREFIXES = ("parallel.", "data.", "trainer.", "model.")  # groups of the config
TOP_LEVEL_KEYS = ("device", "compile")  # keys of the config outside its groups


def forecast(arguments: Sequence[str], program: str) -> int:
    """Forecast, or check a forecast; return the exit code.

    Raises:
        UserError: a key or value is wrong, or there is nothing to forecast from.
    """
    if arguments[:1] == ["plot"]:
        return plot(arguments[1:], f"{program} plot")
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(HELP.format(program=program))
        return 0
    if args.overrides[:1] == ["check"]:
        return report_completeness(args.overrides[1:], program)
    keys, config_overrides = split_arguments(args.overrides, program)
    for key, needed in REQUIRED_KEYS.items():
        if not keys[key] and not (key == "init" and keys["init_file"]):
            raise UserError(f"{key}: needs {needed}, got nothing. Add it.")
    run = TrainedRun(keys["checkpoint"], config_overrides, program.rpartition(" ")[2])
    config = forecast_config(run, keys)
    from credit_dp.distributed.launch import launch

    return launch(config, "credit_dp.forecast.make_forecasts:run")


def report_completeness(paths: Sequence[str], program: str) -> int:
    """Say whether a forecast is complete; return 1 if not, otherwise 0.

    Raises:
        UserError: there is no forecast.
    """
    if len(paths) != 1:
        raise UserError(f"{program} check: needs the path of one forecast, got {len(paths)}.")
    from credit_dp.forecast.check import check_forecast

    finding = check_forecast(paths[0])
    print_lines(*finding.lines())
    return 0 if finding.complete else 1


@final
class TrainedRun:
    """A checkpoint, and the config of its run with the given changes.

    Args:
        command: the name of the command in messages.

    Raises:
        UserError: a key or a value does not exist or is not allowed, or there is no checkpoint.
    """

    def __init__(self, checkpoint: str, config_overrides: Sequence[str], command: str) -> None:
        self.path = locate_checkpoint("checkpoint", checkpoint).absolute()
        self.folder = run_folder_of(self.path)
        composer = Composer(command)
        composer.parse(config_overrides)
        self.config = config_of_checkpoint(self.path, config_overrides, composer)
        self.trained_on = read_metadata("checkpoint", self.path)["data"]

    @property
    def calendar(self) -> "Calendar":
        """Return the calendar of the training data."""
        from credit_dp.training.data_description import calendar_of_fields

        return calendar_of_fields(self.trained_on["fields"])


def forecast_config(run: TrainedRun, keys: Mapping[str, Any]) -> "ForecastConfig":
    """Return the run's config and the forecast that is requested.

    Raises:
        UserError: a key or a value does not exist or is not allowed.
    """
    config, trained_on = run.config, run.trained_on
    from credit_dp.config.model import BlocksConfig
    from credit_dp.forecast.boundary import check_boundary_key
    from credit_dp.forecast.initial_file import open_initial_files
    from credit_dp.forecast.request import ForecastConfig, ForecastRequest

    out = keys["out"] or str(run.folder / FILE_NAMES.get(keys["format"], FILE_NAMES["zarr"]))
    given = {**keys, "checkpoint": str(run.path), "out": out}
    request = ForecastRequest(**given, calendar=run.calendar)
    has_noise = isinstance(config.model, BlocksConfig) and config.model.noise > 0
    files = open_initial_files(request)
    if files is not None and not request.init:
        time = files.initial_time(config.model.frames, config.data.step_hours)
        request = replace(request, init=time)
    request.check(config.data.step_hours, noise=has_noise)
    check_boundary_key(request, config.data.boundary)
    request.initial_times()  # refuses wrong ones before ranks start
    names, levels = request.diagnostic_names(), request.levels_in_hpa()
    if names or levels:
        from credit_dp.physics.diagnostics import check_written

        outputs = [*config.data.prognostic, *config.data.diagnostic]
        check_written(outputs, config.data.static, names, levels, config.model.corrections)
    if config.parallel.ensemble > 1:
        raise UserError(
            "parallel.ensemble: forecasts, members too, are spread over parallel.data ranks, got "
            f"{config.parallel.ensemble}. Use parallel.data instead."
        )
    target = request.target
    if checks.existing_path(str(target)) is not None:
        raise UserError(f"{target}: exists already. Change out.")
    config = without_training_settings(config)
    # A run on a store has no data.grid; its checkpoint has the grid of the store.
    check_rows(replace(config, data=config.data.on_grid(trained_on["data.grid"])))
    values = {field.name: getattr(config, field.name) for field in fields(Config)}
    return ForecastConfig(**values, request=request)


def without_training_settings(config: Config) -> Config:
    """Return the config without settings of training, and with the smallest batch."""
    from credit_dp.config import microbatches_per_step

    trainer = replace(config.trainer, accumulate=1, checkpoint_activations="false", freeze=[])
    config = replace(config, trainer=trainer, resume=None, init_from=None)
    # One sample for each micro-batch (with a pipeline, several) on each data rank.
    batch = count_data_ranks(config) * microbatches_per_step(config)
    return replace(config, data=replace(config.data, batch_size=batch))


def count_data_ranks(config: Config) -> int:
    """Return the number of data ranks that the launcher will start, or has started."""
    from credit_dp.distributed import placement
    from credit_dp.distributed.launcher import find_launcher

    launcher = find_launcher(os.environ)
    if launcher is not None:
        return placement.data_ranks_of_launcher(config.parallel, launcher)
    gpus = 0 if config.device == "cpu" or config.parallel.data else placement.count_visible_gpus()
    return placement.data_ranks_on_gpus(config.parallel, gpus // config.parallel.gpus_per_rank)


def split_arguments(arguments: Sequence[str], program: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the command's keys, and the overrides of the config.

    Raises:
        UserError: a key belongs to neither, or its value has the wrong type.
    """
    from credit_dp.forecast.request import FORECAST_KEYS

    keys, others = split_keys(arguments, FORECAST_KEYS)
    check_overrides(others, FORECAST_KEYS, program)
    return keys, others


def check_overrides(texts: Sequence[str], keys: Collection[str], program: str) -> None:
    """Refuse texts that are no overrides of the run's config, beside the keys of a command."""
    for text in texts:
        key, equals, _ = text.partition("=")
        if not equals or not (key.startswith(CONFIG_PREFIXES) or key in TOP_LEVEL_KEYS):
            raise UserError(
                f"{program}: needs keys like {', '.join(keys)}, or parallel.NAME and "
                f"data.NAME, got {text!r}.{did_you_mean(key, keys)}"
            )
