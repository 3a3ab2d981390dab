"""`credit-dp forecast plot FORECAST KEY=VALUE ...`: a map, an animation, or a series at a place."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import common_parser, parse_arguments, parse_list, split_keys, to_texts
from credit_dp.cli.output import print_lines
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.evaluation.forecast_maps import ChartRequest
    from credit_dp.evaluation.forecast_series import SeriesRequest
    from credit_dp.evaluation.forecast_store import ForecastStore

PLOT_HELP = """\
{program} FORECAST KEY=VALUE ...: draws a map of a forecast, an animation of all lead times, or a
series at a place.

FORECAST is what `credit-dp forecast` writes (zarr, netCDF, a folder of netCDF files, or GRIB), or
another forecast in the form of WeatherBench 2, also at a public address.

  variable=geopotential   by default geopotential, or the first one
  level=500         by default 500, or the first one
  lead=48h          hours or days, by default the longest; all: an animated GIF of all lead times
  init=2001-02-10   an initial time, by default the first
  member=0          of an ensemble, from 0
  region=europe     a region of `credit-dp evaluate`, or [south,north,west,east] in degrees
  projection=polar  by default equal-earth for the globe, polar around a pole, otherwise lat-lon
  contours=8        lines of equal values, so far apart, in the unit of the map; true: at round
                    values, as by default for geopotential and pressure; false: none
  edges=4           the edges between the bands of 4 ranks
  out=MAP.png       or .svg or .gif; by default beside the forecast, with a name such as
                    forecast-geopotential-500-48h.png

  place=[46.9,7.4]  latitude and longitude in degrees: instead of a map a series over all lead
                    times, interpolated bilinearly to this place. Of the other keys it has
                    variable, also [A,B,...], level, init and out. Of an ensemble it shows the
                    median in front of each member, or, of 10 or more, of the bands from lowest to
                    highest, from 10 to 90 % and from 25 to 75 %.

Geopotential is drawn as height in dam, temperature in degrees Celsius, pressure in hPa,
energy in MJ m-2.

  --help, -h    this text

Exit code: 0; 2 if a key or value is wrong.
"""

PLOT_KEYS: Mapping[str, Any] = {
    "variable": "",
    "level": "",
    "lead": "",
    "init": "",
    "member": 0,
    "region": "",
    "projection": "",
    "contours": "",
    "edges": 0,
    "out": "",
    "place": "",
}
SERIES_KEYS = ("variable", "level", "init", "out", "place")
SUFFIXES = (".png", ".svg", ".gif")
ALL = "all"


def plot(arguments: Sequence[str], program: str) -> int:
    """Draw a forecast; return the exit code.

    Raises:
        UserError: there is no forecast, a key or value is wrong, or the file can't be written.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(PLOT_HELP.format(program=program))
        return 0
    keys, others = split_keys(args.overrides, PLOT_KEYS)
    for text in others:
        key, equals, _ = text.partition("=")
        if equals and "://" not in key:
            raise UserError(
                f"{program}: needs keys like {', '.join(PLOT_KEYS)}, got {text!r}."
                f"{did_you_mean(key, PLOT_KEYS)}"
            )
    if len(others) != 1:
        raise UserError(f"{program}: needs the path of one forecast, got {len(others)}.")
    out = Path(checks.expand_home("out", keys["out"])) if keys["out"] else None
    suffixes = SUFFIXES[:2] if keys["place"] else SUFFIXES
    if out is not None and out.suffix not in suffixes:
        raise UserError(
            f"out: needs a name that ends in {' or '.join(suffixes)}, got {keys['out']}"
        )
    if keys["place"]:
        for text in args.overrides:
            key, equals, _ = text.partition("=")
            if equals and key in PLOT_KEYS and key not in SERIES_KEYS:
                raise UserError(
                    f"{key}: belongs to maps, and place draws a series. Leave out one of them."
                )
        return plot_series(others[0], keys, out)
    request = read_request(keys)
    is_gif = keys["lead"] == ALL if out is None else out.suffix == ".gif"
    if keys["lead"] == ALL and not is_gif:
        raise UserError(f"out: lead=all needs a name that ends in .gif, got {keys['out']}")
    store, planet = open_forecast(others[0])
    if request.lead is None and not is_gif:
        import numpy as np

        request = replace(request, lead=float(store.lead_times[-1] / np.timedelta64(1, "h")))
    from credit_dp.evaluation.forecast_maps import draw_forecast, usual_name

    if out is None:
        name = usual_name(others[0], store, request, ".gif" if is_gif else ".png")
        out = folder_of(others[0]) / name
    count = draw_forecast(store, planet, request, out)
    print_lines(f"{out}" + (f" ({count} lead times)" if is_gif else ""))
    return 0


def plot_series(where: str, keys: Mapping[str, Any], out: Path | None) -> int:
    """Draw a forecast at a place; return the exit code."""
    from credit_dp.evaluation.forecast_series import draw_series, usual_series_name

    request = read_series_request(keys)
    store, _ = open_forecast(where)
    if out is None:
        out = folder_of(where) / usual_series_name(where, store, request)
    draw_series(store, request, out)
    print_lines(str(out))
    return 0


def folder_of(where: str) -> Path:
    """Return the folder of a forecast; the current one for an address."""
    return Path() if "://" in where else Path(checks.expand_home("path", where)).parent


def read_series_request(keys: Mapping[str, Any]) -> "SeriesRequest":
    """Return what the keys say about a series.

    Raises:
        UserError: a value is wrong.
    """
    from credit_dp.evaluation.forecast_series import SeriesRequest

    try:
        latitude, longitude = (float(x) for x in parse_list("place", keys["place"]))
        is_on_earth = abs(latitude) <= 90 and abs(longitude) <= 360
    except (TypeError, ValueError):
        is_on_earth = False
    if not is_on_earth:
        raise UserError(
            f"place: needs [latitude,longitude] in degrees, like [46.9,7.4], got {keys['place']!r}"
        )
    names = parse_list("variable", keys["variable"]) if keys["variable"] else []
    level = _whole_number("level", keys["level"])
    place = latitude, longitude
    return SeriesRequest(place, to_texts("variable", names), level, keys["init"])


def read_request(keys: Mapping[str, Any]) -> "ChartRequest":
    """Return what the keys say.

    Raises:
        UserError: a value is wrong.
    """
    from credit_dp.evaluation.forecast_maps import ChartRequest
    from credit_dp.forecast.request import parse_hours

    region = keys["region"]
    box: tuple[float, ...] = ()
    if region.startswith("["):
        try:
            region, box = "", tuple(float(x) for x in parse_list("region", keys["region"]))
        except (TypeError, ValueError):
            raise UserError(
                "region: needs a name, or [south,north,west,east] in degrees, got "
                f"{keys['region']!r}"
            ) from None
    return ChartRequest(
        variable=keys["variable"],
        level=_whole_number("level", keys["level"]),
        lead=parse_hours("lead", keys["lead"]) if keys["lead"] not in ("", ALL) else None,
        init=keys["init"],
        member=keys["member"],
        region=region,
        box=box,
        projection=keys["projection"],
        contours=_contours(keys["contours"]),
        edges=keys["edges"],
    )


def _whole_number(key: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{key}: needs a whole number, got {text!r}") from None


def _contours(text: str) -> float | bool | None:
    words = {"": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        step = float(text)
    except ValueError:
        step = -1.0
    if not 0 < step < float("inf"):
        raise UserError(f"contours: needs true, false or a number above 0, got {text!r}")
    return step


def open_forecast(where: str) -> "tuple[ForecastStore, str]":
    """Return a forecast, and whose coasts its maps have.

    Raises:
        UserError: there is none.
    """
    from credit_dp.evaluation.alignment import translate_error_keys
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.forecast.sharded import open_sharded

    path = None if "://" in where else checks.expand_home("path", where)
    with translate_error_keys("the path"):
        if path is not None and path.is_dir() and any(path.glob("*.nc")):
            store = ForecastStore(open_sharded(path), where)
        else:
            store = ForecastStore.open(where if path is None else str(path))
    return store, planet_of_forecast(store)


def planet_of_forecast(store: "ForecastStore") -> str:
    """Return whose coasts the maps of a forecast have: those of the data that it started from."""
    from credit_dp.evaluation.maps import SIMULATED, planet_of
    from credit_dp.forecast.format import read_settings_attribute

    stores = read_settings_attribute(store.attributes).get("stores")
    names = stores if isinstance(stores, list) else []  # whatever another program wrote
    made = any(Path(str(name)).name.startswith("quickstart-") for name in names)
    return SIMULATED if made else planet_of(str(store.attributes.get("title", "")))
