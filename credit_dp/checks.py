"""Checks of config values: each raises a `UserError` of one line that names the key.

The functions are read with the module's name: `checks.at_least("parallel.domain", value, 1)`.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from credit_dp.errors import UserError
from credit_dp.files import is_special

MOST_LEVELS = 50  # of tables and lists in each other, in YAML
LONGEST_NAME = 200  # file systems allow 255, and files beside a folder have longer names than it


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the closest allowed word; empty if none is close."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not allowed for this key."""
    if value not in allowed:
        raise UserError(
            f"{key}: needs one of {', '.join(allowed)}, got "
            f"{value!r}.{did_you_mean(value, allowed)}"
        )


def at_least(key: str, value: int | None, minimum: int) -> None:
    """Refuse an integer below `minimum`; None passes."""
    if value is not None and value < minimum:
        raise UserError(f"{key}: needs an integer of at least {minimum}, got {value}")


def integer_in(key: str, value: int, low: int, high: int) -> None:
    """Refuse an integer outside `[low, high]`."""
    if not low <= value <= high:
        raise UserError(f"{key}: needs an integer from {low} to {high}, got {value}")


def number_in(key: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Refuse a number outside `[low, high]`, infinity and NaN; None passes."""
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise UserError(f"{key}: needs a number {bounds}, got {value}")


def above_zero(key: str, value: float | None) -> None:
    """Refuse zero, negative numbers, infinity and NaN; None passes."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{key}: needs a number above 0, got {value}")


def limits(key: str, value: object) -> None:
    """Refuse a value other than `[low, high]` with `low < high`; None passes."""
    if value is None:
        return
    pair = list(value) if isinstance(value, list | tuple) else []
    numbers = [x for x in pair if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(pair) != 2 or len(numbers) != 2 or not pair[0] < pair[1]:
        raise UserError(f"{key}: needs [low, high], like [150, 350], or null, got {value}")


def not_empty(key: str, values: Sequence[object]) -> None:
    """Refuse an empty list."""
    if not values:
        raise UserError(f"{key}: needs at least one entry, got an empty list")


def of_length(key: str, values: Sequence[object], length: int, like: str = "") -> None:
    """Refuse a list that does not have `length` entries; `like` is the key of a list that does."""
    if len(values) != length:
        noun = "entry" if length == 1 else "entries"
        as_many = f", as many as {like}" if like else ""
        raise UserError(f"{key}: needs {length} {noun}{as_many}, got {len(values)}")


def no_repeats(key: str, values: Sequence[object]) -> None:
    """Refuse a list with an entry that occurs twice."""
    repeated = next((value for value in values if list(values).count(value) > 1), None)
    if repeated is not None:
        raise UserError(f"{key}: needs each entry once, got {repeated} more than once")


FEBRUARY = re.compile(r"(\d{4}-02-)(?:29|30)(?!\d)")


def _parse_date(text: str) -> datetime:
    """Parse an ISO date; the last days of February, which not all calendars have, as the 28th."""
    return datetime.fromisoformat(FEBRUARY.sub(r"\g<1>28", text))


def date_range(key: str, dates: Sequence[str]) -> None:
    """Refuse dates other than `[first, last]` in ISO format, in that order.

    Whether the store's calendar has them is checked when the store is open.
    """
    needs = f"{key}: needs [first, last] in ISO format, like [2000-01-01, 2000-12-31]"
    if len(dates) != 2:
        raise UserError(f"{needs}, got {len(dates)} dates")
    try:
        first, last = map(_parse_date, dates)
    except ValueError:
        raise UserError(f"{needs}, got [{', '.join(dates)}]") from None
    if first.replace(tzinfo=None) > last.replace(tzinfo=None):
        raise UserError(f"{needs}, got a first date after the last: [{', '.join(dates)}]")


def date(key: str, value: str) -> None:
    """Refuse a text that is not a date, with or without a time, in ISO format without a zone.

    Whether the store's calendar has it is checked when the store is open.
    """
    try:
        zone = _parse_date(value).tzinfo
    except ValueError:
        zone = None
        value = f"{value!r}, which is not a date" if value else "an empty text"
    else:
        # `fromisoformat` also takes 20010101 and 2001-W01-1.
        if zone is None and re.match(r"\d{4}-\d\d-\d\d", value):
            return
    raise UserError(f"{key}: needs a date like 2001-01-01, got {value}")


def lead_times(hours: Iterable[int], step: int) -> None:
    """Refuse lead times, in hours, that are not multiples of the model's step."""
    unreachable = next((lead for lead in hours if lead < step or lead % step), None)
    if unreachable is not None:
        raise UserError(
            f"trainer.evaluate_hours: needs multiples of data.step={step}h, but got "
            f"{unreachable}. Change trainer.evaluate_hours."
        )


def checkpoint_path(key: str, value: str) -> Path:
    """Return the path of a checkpoint or of a run's folder; refuse one that does not exist."""
    path = existing_path(value)
    if path is None:
        auto = "`auto` or " if key == "resume" else ""
        raise UserError(
            f"{key}: needs {auto}the path of a checkpoint or of a run, but {value} does not exist. "
            f"Change {key}."
        )
    return path


def existing_path(value: str) -> Path | None:
    """Return the path, with `~` expanded, if it exists, otherwise None."""
    try:
        path = Path(value).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, ~nobody, a null character
        return None


def expand_home(key: str, value: str) -> Path:
    """Return the path with `~` expanded; refuse `~NAME` of nobody, and a pipe or a device."""
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise UserError(f"{key}: there is no home folder as in {value}. Change {key}.") from None
    if is_special(path):
        raise UserError(
            f"{key}: needs a file or a folder, but {value} is a pipe, a socket or a device. "
            f"Change {key}."
        )
    return path


def grid(key: str, value: str | None) -> None:
    """Refuse a text other than `ROWSxCOLUMNS`; None passes."""
    if value is not None and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        raise UserError(f"{key}: needs ROWSxCOLUMNS, like 121x240, or null, got {value!r}")


def devices(key: str, value: object) -> None:
    """Refuse a value other than one device, or a pair: for computing and for the output."""
    names = value if isinstance(value, (list, tuple)) else [value]
    valid = all(isinstance(n, str) and re.fullmatch(r"(?!meta)[a-z]+(:\d+)?", n) for n in names)
    if not valid or (names is value and len(names) != 2):
        raise UserError(
            f"{key}: needs a device like cuda:0, or two (for computing, for the output) like "
            f"[cuda:1,cuda:0], got {value}"
        )


def one_line(key: str, value: str) -> None:
    """Refuse a text with line breaks or control characters, which would break a batch script."""
    if re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", value):
        raise UserError(
            f"{key}: needs text without line breaks or control characters, got {value!r}. "
            f"Change {key}."
        )


def plain_yaml(text: str) -> str:
    """Return a text in YAML as it is, unless reading it could take all memory.

    Raises:
        yaml.YAMLError: it has aliases, which can stand for billions of values, lists or tables that
            are nested too deep, or it is no YAML.
    """
    import yaml  # type: ignore[import-untyped]  # not for --help

    level = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"has an alias, *{event.anchor}: write the values instead")
        if level > MOST_LEVELS:
            raise yaml.YAMLError(f"has more than {MOST_LEVELS} tables or lists in each other")
    return text


def load_yaml(path: Path) -> Any:
    """Return the content of a config in YAML; interpolations stay texts.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException: it can't be read; see
            `plain_yaml`.
    """
    from omegaconf import OmegaConf  # not for --help

    return OmegaConf.to_container(OmegaConf.create(plain_yaml(path.read_text(encoding="utf-8"))))


def no_interpolation(where: str, values: object, key: str = "") -> None:
    """Refuse texts like `${oc.env:NAME}` at or below a key of a config that comes from elsewhere.

    An error could print what they read from the environment, such as a password.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            no_interpolation(where, value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            no_interpolation(where, value, key)
    elif isinstance(values, str) and "${" in values:
        raise UserError(
            f"{where}: {key} needs a plain value, got {values!r}, which could read your "
            "environment. Write the value itself into the file."
        )


def folder_name(key: str, value: str | None) -> None:
    """Refuse a name that is a path, is hidden, needs quotes in a command or is too long."""
    if value is None:
        return
    if not re.fullmatch(r"\w[\w.+-]*", value, flags=re.ASCII):
        raise UserError(
            f"{key}: needs letters, digits and . _ + - (no / or spaces), "
            f"beginning with a letter or digit, got {value!r}"
        )
    if len(value) > LONGEST_NAME:
        raise UserError(
            f"{key}: needs at most {LONGEST_NAME} characters, got {len(value)}: {value[:20]}..."
        )
