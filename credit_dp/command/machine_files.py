"""Machine files: those of this package by name, the user's own by path."""

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from credit_dp.checks import existing, nearest
from credit_dp.command.machine import Machine, machine_of
from credit_dp.errors import UserError

FOLDER = Path(__file__).resolve().parents[1] / "machines"


def machine_names() -> list[str]:
    """The machines that this package knows."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_machine(name: str) -> Machine:
    """The machine of a name, or of a file.

    Raises:
        UserError: there is none, or it is not as needed.
    """
    names = machine_names()
    path = FOLDER / f"{name}.yaml" if name in names else existing(name)
    if path is None or not path.is_file():
        raise UserError(
            f"--machine: needs a YAML file, or one of {', '.join(names)}, but {name!r} is neither."
            f"{nearest(name, names)}"
        )
    where = f"--machine {name}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: can't be read ({error}).") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UserError(f"{where}: is no YAML{line} ({problem}).") from None
    return machine_of(content, where)
