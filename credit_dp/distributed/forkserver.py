"""Tie processes that multiprocessing starts to this one: their imports, and their end.

multiprocessing's fork server imports this module first, before torch: nothing else of the package
may be imported here. From then on the fork server leaves Ctrl-C to its parent, and the kernel kills
it when its parent ends. Ranks call `die_with_parent`, too, so no process outlives the command. Only
`credit_dp.distributed.local` names this module for the fork server.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

IMPORT_VARIABLES = ("PYTHONSAFEPATH", "PYTHONPATH")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends, for whatever reason.

    Does nothing outside Linux.

    Args:
        parent: the process id of the parent, for a parent that may have ended before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel only reports deaths after the prctl call; an earlier one shows in the parent's id.
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def import_from_same_folders() -> Iterator[None]:
    """Let interpreters that multiprocessing starts meanwhile import from where this one does.

    It starts them as `python -c`, which looks in the working folder first: a user's `torch.py`
    there would run. They call `forget_import_variables`, so that their own children are not
    affected.
    """
    before = {name: os.environ.get(name) for name in IMPORT_VARIABLES}
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        yield
    finally:
        forget_import_variables()
        os.environ.update({name: value for name, value in before.items() if value is not None})


def forget_import_variables() -> None:
    """Remove the variables that `import_from_same_folders` sets from this process."""
    for name in IMPORT_VARIABLES:
        os.environ.pop(name, None)


def interpreter() -> list[str]:
    """Return the command of a Python that imports nothing from the working folder.

    Unless that is the clone of this package, which need not be installed.
    """
    clone = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
    return [sys.executable, *([] if clone == os.path.realpath(os.curdir) else ["-P"])]


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):  # this process is the fork server
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    forget_import_variables()  # each rank gets the environment of the parent
