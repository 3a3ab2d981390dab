"""Threads in which gloo waits for messages, and their place among those that compute."""

import os
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
NAME = "gloo_tcp_loop"


def let_senders_finish() -> None:
    """Keep those of this process from interrupting a thread that computes or sends; on Linux.

    Such a thread tries again and again for a lock that is held while a message is sent. If it
    interrupts the sender, for a message that comes in meanwhile, it keeps the core for a time slice
    in vain, which is many times what the message takes.

    Source: gloo's `Pair::handleEvents` (gloo/transport/tcp/pair.cc).
    """
    if not TASKS.exists():
        return
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == NAME:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
