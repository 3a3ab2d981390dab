"""Scores that are compared: those of a training run, or of a scorecard, read from their folder."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.errors import UserError

RUN, CARD = "training run", "scorecard"
CONFIG, METRICS, SCORES = "config.yaml", "metrics.json", "scores.json"
OWN = ("run.name", "run.dir")  # keys in which runs always differ
# What scores depend on besides the forecasts, by how it is called.
RUN_FACTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "data": ("data.name", "data.store", "data.quickstart"),
        "dates": ("data.dates.test",),
        "grid": ("data.grid",),
    }
)
CARD_FACTS: Mapping[str, str] = MappingProxyType(
    {"truth": "truth", "dates": "initial_times", "grid": "grid", "climatology": "climatology"}
)


class Place(NamedTuple):
    """Of what a number is a score."""

    score: str
    channel: str
    hours: int


@final
@dataclass(frozen=True)
class Result:
    """The scores of one run or scorecard.

    Attributes:
        name: what it is called in tables.
        kind: `RUN` or `CARD`.
        units: by channel.
        scores: by place, then by what they are of: `forecast`, `persistence` and so on. Those that
            are not defined, or infinite, are left out; so are places without the forecast's.
        facts: what scores depend on besides the forecasts.
        config: of a run, flat; without the keys in which runs always differ.
    """

    name: str
    kind: str
    units: Mapping[str, str]
    scores: Mapping[Place, Mapping[str, float]]
    facts: Mapping[str, object]
    config: Mapping[str, object]


def read_result(folder: Path, name: str) -> Result:
    """Read the folder of a training run or of a scorecard.

    Raises:
        UserError: it is neither, the run has not finished, or a file is damaged.
    """
    if (folder / SCORES).is_file():
        return _card(folder, name)
    if (folder / METRICS).is_file() and (folder / CONFIG).is_file():
        return _run(folder, name)
    if (folder / CONFIG).is_file():
        raise UserError(
            f"{folder}: this run has not finished: it has no {METRICS}. Go on with it, or leave it "
            "out."
        )
    what = "has neither" if folder.is_dir() else "is no folder: there is neither"
    raise UserError(
        f"{folder}: {what} {METRICS} of a training run nor {SCORES} of credit-dp evaluate. Give "
        "the folder of one."
    )


def _run(folder: Path, name: str) -> Result:
    content = _json(folder / METRICS)
    config = dict(_flat(_yaml(folder / CONFIG)))
    facts = {
        fact: [(key, config[key]) for key in config if key.startswith(keys)]
        for fact, keys in RUN_FACTS.items()
    }
    kept = {key: value for key, value in config.items() if key not in OWN}
    try:
        nested = {channel: {"rmse": leads} for channel, leads in content["rmse"].items()}
        facts["dates"].append(("initial_times", content["initial_times"]))
        return Result(name, RUN, dict(content["units"]), _scores(nested), facts, kept)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder / METRICS, error) from error


def _card(folder: Path, name: str) -> Result:
    content = _json(folder / SCORES)
    try:
        facts = {fact: content[key] for fact, key in CARD_FACTS.items()}
        scores = _scores(content["scores"])
        return Result(name, CARD, dict(content["units"]), scores, facts, {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder / SCORES, error) from error


def _scores(nested: Mapping[str, Any]) -> dict[Place, dict[str, float]]:
    """From channel, score, lead time and source."""
    found: dict[Place, dict[str, float]] = {}
    for channel, of_channel in nested.items():
        for score, leads in of_channel.items():
            for lead, sources in leads.items():
                values = {
                    "forecast" if of == "model" else of: float(value)
                    for of, value in sources.items()
                    if value is not None and math.isfinite(value)
                }
                if "forecast" in values:
                    found[Place(score, channel, int(lead.removesuffix("h")))] = values
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _yaml(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:80] or type(error).__name__
    return UserError(f"{path}: can't be read ({reason}). Make it again, or leave it out.")


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys with dots, and what they are set to."""
    if not isinstance(config, dict) or not config:
        yield prefix, config
        return
    for key, value in config.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
