"""How a rank ended, as a small file that its parent reads."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final


@final
@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    `kind`: `returned` (`code` is the exit code), `refused` (`text` is a UserError's line) or
    `crashed` (`text` is a traceback). `time` is in nanoseconds, to tell cause from consequence.
    """

    rank: int
    kind: Literal["returned", "refused", "crashed"]
    code: int = 0
    text: str = ""
    time: int = 0


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Leave the outcome where the parent looks; it appears whole or not at all."""
    path = folder / f"{outcome.rank}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({**asdict(outcome), "time": time.time_ns()}))
    os.replace(temporary, path)


def read_outcome(folder: Path, rank: int) -> Outcome | None:
    """What the rank left; None if it died without a word."""
    path = folder / f"{rank}.json"
    return Outcome(**json.loads(path.read_text())) if path.exists() else None
