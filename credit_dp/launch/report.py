"""What a failed run says on stderr: one line for the user's mistakes, one traceback for ours."""

import contextlib
import sys
import time
from collections.abc import Iterator

FIRST_WORD = 3.0  # seconds that other ranks leave to rank 0

_listening: list[list[str]] = []


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what this process says meanwhile about runs that fail; it is said nevertheless."""
    told: list[str] = []
    _listening.append(told)
    try:
        yield told
    finally:
        _listening.remove(told)


def after_first_rank(rank: int) -> None:
    """Let rank 0 speak first, which knows most of what the others do.

    When it has failed as well, the launcher ends this process during the wait, and one voice is
    heard instead of all. When it has not, what this rank has to say is the only cause there is.
    """
    if rank > 0:
        time.sleep(FIRST_WORD)


def report_refusal(message: str) -> None:
    """`error:` and the message, on one line whatever the message holds."""
    _say(f"error: {' '.join(message.split())}\n")


def report_crash(text: str) -> None:
    """A traceback or a sentence, as it is."""
    _say(text if text.endswith("\n") else f"{text}\n")


def _say(text: str) -> None:
    for told in _listening:
        told.append(text)
    sys.stderr.write(text)
    sys.stderr.flush()
