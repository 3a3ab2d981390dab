"""The exceptions that mean: the user can mend this, and the message says how."""


class UserError(Exception):
    """A mistake in what the user gave: one line with where, what was needed, what came and the fix.

    Commands print it without a traceback and exit with a code that is not 0.
    """


class UnreachableError(UserError):
    """Data elsewhere that can't be reached from this machine: the config may well be right."""
