"""One run of a sweep, as far as its folder tells."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from credit_dp.sweeps.files import as_list, as_table, at, count_at, read_json, read_text, read_yaml
from credit_dp.sweeps.job_state import Standing, standing
from credit_dp.sweeps.run_log import Row, rows_of, summarise
from credit_dp.training.run_folder import RunFolder

AXES = ("pipeline", "data", "domain")
HOST = re.compile(r"started as process \d+ on (\S+)")


@final
@dataclass(frozen=True)
class Job:
    """What one run was to do, how far it is, and what came of it.

    `overrides`: value by key, as they were given. `config`: resolved; empty before it has started.
    `numbers`: one for each column of its log, see `summarise`. `scores`: its `metrics.json`.
    """

    folder: Path
    overrides: Mapping[str, str]
    standing: Standing
    config: Mapping[str, Any]
    numbers: Mapping[str, float]
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its number in the sweep."""
        return self.folder.name

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken."""
        return int(self.numbers.get("step", 0))

    @property
    def all_steps(self) -> int | None:
        """Optimiser steps that are to be taken, if that is known yet."""
        return count_at(self.config, "trainer.steps")

    @property
    def mesh(self) -> dict[str, int] | None:
        """Ranks of each axis, if that is known yet."""
        if not self.config:
            return None
        return {axis: count_at(self.config, f"parallel.{axis}") or 1 for axis in AXES}

    def value(self, key: str) -> str:
        """The value given to a key; what it came to, where that was an interpolation."""
        text = self.overrides.get(key, "")
        found = at(self.config, key) if text.startswith("$") else None
        return text if found is None else str(found)

    def rows(self) -> list[Row]:
        """The rows of its log, which is read again."""
        return rows_of(RunFolder(self.folder).log)

    @cached_property
    def hosts(self) -> frozenset[str]:
        """The machines that its ranks ran on."""
        texts = (read_text(log) for log in self.folder.glob("logs/rank-*.log"))
        return frozenset(name for text in texts for name in HOST.findall(text))


def read_job(folder: Path, overrides: Mapping[str, str] | None = None) -> Job:
    """What a run's folder tells; nothing of it need be there.

    `overrides` are those that the sweep has for it, for a run that has left none itself.
    """
    files = RunFolder(folder)
    config, numbers = as_table(read_yaml(files.config)), summarise(rows_of(files.log))
    record = as_table(read_json(folder / "job.json"))
    given = given_to(folder, record)
    return Job(
        folder,
        by_key(given) if given else (overrides or {}),
        standing(folder, record, config, numbers),
        config,
        numbers,
        as_table(read_json(files.scores)),
    )


def given_to(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """The overrides of a run; in its record are those that say what it computes."""
    waiting = as_table(read_json(folder / "submitted.json"))
    noted = as_list(record.get("overrides")) or as_list(waiting.get("overrides"))
    return noted or as_list(read_yaml(folder / ".hydra" / "overrides.yaml"))


def by_key(overrides: list[str]) -> dict[str, str]:
    """Values by key; a key's last value counts."""
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}
