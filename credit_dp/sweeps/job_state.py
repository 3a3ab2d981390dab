"""How a run of a sweep stands, by its record if there is one, else by the files that it left."""

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from credit_dp.sweeps.files import at, count_at, read_text

ENDED = ("done", "failed", "preempted")
PATIENCE = 1800.0  # seconds: building, reading and scoring write nothing for a while
TAIL = 20_000  # characters of a log
BEGIN = re.compile(r"^(\S+ \S+) \[rank \d+\] (\w+) credit_dp\.training\.log_files: (.*)$")
TIMED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank ")


@final
@dataclass(frozen=True)
class Standing:
    """`state`: done, running, failed, preempted, stalled or not started; `cause`: one line."""

    state: str
    cause: str = ""


def standing(
    folder: Path, record: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, float]
) -> Standing:
    """How a run stands.

    Args:
        folder: of the run.
        record: its `job.json`, or nothing.
        config: its `config.yaml`, or nothing.
        numbers: what its log comes to.
    """
    if record.get("state") in ENDED:
        cause = str(record.get("cause") or "")
        return Standing(str(record["state"]), " ".join(cause.split()))
    complete = "step" in numbers and numbers["step"] == at(config, "trainer.steps")
    if complete and (folder / "metrics.json").exists():
        return Standing("done")
    logs = sorted(folder.glob("logs/rank-*.log"))
    since = began(record)
    found = [last_end(read_text(log)[-TAIL:]) for log in logs]
    ends = [end for end in found if end is not None and end[0] >= since]
    failures = sorted(end for end in ends if end[1] == "ERROR")
    if failures:
        return Standing("failed", failures[0][2])  # the first one: others may only follow from it
    if ends:
        return Standing("preempted")
    if not (logs or numbers or record or config):
        return Standing("not started")
    return Standing("running" if is_fresh(folder, config, numbers) else "stalled")


def began(record: Mapping[str, Any]) -> str:
    """When the process that a record tells of began, as logs write it; empty if that is not known.

    It keeps a record before its ranks write anything: until then, their logs end a life before.
    """
    try:
        started = datetime.fromisoformat(str(record.get("started")))
    except ValueError:
        return ""
    return f"{started.astimezone():%Y-%m-%d %H:%M:%S}"  # of this place


def last_end(text: str) -> tuple[str, str, str] | None:
    """When, how (`INFO` or `ERROR`) and why a rank's last life ended; None while it lasts."""
    lines = text.splitlines()
    noted = [(place, found) for place, line in enumerate(lines) if (found := BEGIN.match(line))]
    if not noted or not noted[-1][1][3].startswith("ended"):
        return None
    place, found = noted[-1]
    trace = []
    for line in lines[place + 1 :]:
        if TIMED.match(line):
            break
        trace.append(line)
    told = [line for line in trace if line and not line.startswith((" ", "Traceback"))]
    return found[1], found[2], shortened(told[-1] if told else "")


def shortened(line: str) -> str:
    """The last line of a traceback as a user reads it."""
    return line.removeprefix("credit_dp.errors.UserError: ").strip()


def is_fresh(folder: Path, config: Mapping[str, Any], numbers: Mapping[str, float]) -> bool:
    """Whether something was written within half an hour, or within five times that between rows."""
    between = numbers.get("seconds", 0.0) * (count_at(config, "trainer.log_every") or 1)
    written = 0.0
    for path in (folder, folder / "metrics.csv", folder / "job.json", *folder.glob("logs/*")):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    return time.time() - written < max(PATIENCE, 5 * between)
