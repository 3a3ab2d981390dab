"""Exceptions for mistakes that the user can mend; the message says how."""


class UserError(Exception):
    """A mistake in the user's input, in one line: where, what is needed, what came, and the fix.

    Commands print the line without a traceback and exit with a non-zero code.
    """


class UnreachableError(UserError):
    """Remote data that this machine can't reach; the config itself may be right."""
