"""Imported by the process that ranks are forked from, before torch is: it must not outlive us.

Only `credit_dp.distributed.local` names this module. Importing it ties the process that imports it
to its parent, so a terminal's Ctrl-C is left to the parent to handle, and a parent that is killed
takes it (and by the same means its children) along.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason.

    `parent` is the id that the parent had, in case it died before this call. Only Linux can.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_fork_server() -> bool:
    """Whether this is multiprocessing's fork server and not a program that imports the package."""
    return "multiprocessing.forkserver" in " ".join(sys.orig_argv)


if is_fork_server():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
