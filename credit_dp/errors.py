"""Exceptions for mistakes that the user can mend, and words of messages."""


class UserError(Exception):
    """A mistake in the user's input, in one line: where, what is needed, what came, and the fix.

    Commands print the line without a traceback and exit with a non-zero code.
    """


class UnreachableError(UserError):
    """Remote data that this machine can't reach; the config itself may be right."""


def counted(count: float, noun: str) -> str:
    """Return a number and its noun: `1 field`, `1,200 fields`."""
    number = f"{int(count):,}" if count == int(count) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"
