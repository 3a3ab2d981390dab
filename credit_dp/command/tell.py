"""Lines on stdout, at once, also into a pipe."""

import sys


def tell(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
