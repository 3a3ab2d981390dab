"""Which code a run is made with: versions, the commit of the checkout, and what differs from it."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

import credit_dp

PACKAGE = Path(__file__).resolve().parents[1]
PATIENCE = 10.0  # seconds for an answer of git, which may sit on a slow file system
LONGEST = 2**20  # characters of a difference that are kept
# What a user's settings may change about a difference so that it is no patch of the whole checkout.
AS_A_PATCH = (
    "--binary",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--submodule=short",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
MOST = 50  # names of files that git does not know


@cache
def provenance() -> dict[str, str]:
    """Versions, and the commit if the package is run from a git checkout; small enough to repeat.

    `changed` says whether the checkout differs from its commit. Asked for once in a process, as
    what is imported does not change with the files either.
    """
    found = {
        "credit_dp": credit_dp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    commit = git("rev-parse", "HEAD") if in_checkout() else None
    if commit is not None:
        found["commit"] = commit.strip()
        found["changed"] = "yes" if difference() or unknown_files() else "no"
    return found


def code_text() -> str:
    """`provenance`, and the difference to the commit as a patch that `git apply` takes."""
    lines = [f"{name}: {value}" for name, value in provenance().items()]
    if "commit" not in provenance():
        return "\n".join([*lines, ""])
    names = unknown_files()
    lines += [f"not in git: {name}" for name in names[:MOST]]
    lines += [f"not in git: {len(names) - MOST} more files"] if len(names) > MOST else []
    patch = difference()
    if len(patch) > LONGEST:
        lines.append(f"the difference has {len(patch)} characters; the first {LONGEST} follow")
    return "\n".join([*lines, "", patch[:LONGEST]])


def in_checkout() -> bool:
    """Whether git knows the package; an installed one may lie in a folder of another project."""
    return git("ls-files", "--error-unmatch", "__init__.py") is not None


def difference() -> str:
    """What differs from the commit in files that git knows, whatever form the user likes best."""
    return git("diff", "HEAD", *AS_A_PATCH) or ""


def unknown_files() -> list[str]:
    """Files of the package that git does not know."""
    return (git("ls-files", "--others", "--exclude-standard") or "").splitlines()


def git(*arguments: str) -> str | None:
    """What git answers about the checkout; None if it can't, for whatever reason."""
    # A hook of git sets variables that point to its own repository.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**own, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
