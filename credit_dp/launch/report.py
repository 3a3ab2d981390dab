"""What a failed run says on stderr: one line for the user's mistakes, one traceback for ours."""

import sys


def report_refusal(message: str) -> None:
    """`error:` and the message, on one line whatever the message holds."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.stderr.flush()


def report_crash(text: str) -> None:
    """A traceback or a sentence, as it is."""
    sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    sys.stderr.flush()
