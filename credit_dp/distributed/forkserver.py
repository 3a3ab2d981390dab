"""Tie the process that ranks are forked from to the process that started it.

multiprocessing's fork server imports this module first, before torch: nothing else of the package
may be imported here. From then on the fork server leaves Ctrl-C to its parent, and the kernel kills
it when its parent ends. Ranks call `die_with_parent`, too, so no process outlives the command. Only
`credit_dp.distributed.local` names this module for the fork server.
"""

import ctypes
import os
import signal
import sys

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


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):  # this process is the fork server
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
