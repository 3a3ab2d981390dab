"""Gloo's threads, which wait for messages, never preempt threads that compute."""

import os
import sys

import pytest
import torch

from credit_dp.domain_parallel.transport import GLOO_THREAD_NAME, TASK_FOLDER
from tests.ranks import cpu_only, on_processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="of Linux's scheduler"),
    cpu_only("nccl has no threads of gloo"),
    pytest.mark.skipif(torch.__version__ < "2.12", reason="gloo's threads have no name"),
]


def policies(manager):
    """Return the scheduling policies of gloo's threads and of this one."""
    waiting = {
        os.sched_getscheduler(int(task.name))
        for task in TASK_FOLDER.iterdir()
        if (task / "comm").read_text().strip() == GLOO_THREAD_NAME
    }
    return waiting, os.sched_getscheduler(0)


def test_threads_of_gloo_never_interrupt_others():
    for waiting, computing in on_processes(2, policies):
        # One that waits for nobody, of a group of one rank, may have got its name too late.
        assert os.SCHED_BATCH in waiting
        assert computing == os.SCHED_OTHER
