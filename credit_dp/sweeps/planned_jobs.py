"""The overrides of each run of a sweep from what was typed, those without a folder yet too."""

import re
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from credit_dp.sweeps.files import as_list, as_table, at, read_yaml

SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
FILE = "multirun.yaml"


def planned_jobs(folder: Path) -> list[dict[str, str]]:
    """Value by key for each run of the sweep in its order; none where they can't be counted.

    Hydra's own sweeper runs the product of all values. Another one makes its runs up as it goes.
    """
    hydra = as_table(at(read_yaml(folder / FILE), "hydra"))
    if at(hydra, "sweeper._target_") != SWEEPER:
        return []
    params = as_table(at(hydra, "sweeper.params"))
    task = [str(text) for text in as_list(at(hydra, "overrides.task"))]
    given = {text.lstrip("+").partition("=")[0] for text in task}
    left = {key: value for key, value in params.items() if key not in given}
    typed = [re.sub(r"\\+\$", "$", f"{key}={value}") for key, value in left.items()]
    typed += task
    choices: dict[str, list[str]] = {}
    try:
        for override in OverridesParser.create().parse_overrides(typed):
            key = override.get_key_element().lstrip("+")
            choices[key] = values_of(override)
    except (HydraException, AssertionError, ValueError):
        return []
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def values_of(override: Override) -> list[str]:
    """The values of an override.

    Raises:
        ValueError: they can't be counted without the config, as those of a pattern.
    """
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ValueError(str(override.input_line))
    return list(override.sweep_string_iterator())
