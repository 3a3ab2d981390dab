"""Signals are blocked while something must not be left half done."""

import os
import signal
import threading
import time

import pytest

from credit_dp.distributed.signals import block_signals


def test_signals_wait_whichever_thread_they_reach(request: pytest.FixtureRequest) -> None:
    """A signal that another thread receives would interrupt the main thread all the same."""
    # A shell starts background jobs with SIGINT ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()  # it has nothing blocked: the system hands it what the main thread blocks
    done = []

    def start_something() -> None:
        with block_signals((signal.SIGINT,)):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            start_something()
    finally:
        ended.set()
        thread.join()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
