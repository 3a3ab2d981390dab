"""Run `credit-dp` as `python -m credit_dp`, for a shell that does not find the console script."""

import os
import sys

# `-m` puts the working folder first, where a user's `torch.py` would hide a package. It stays if
# this package is there, in a clone that is not installed. Nothing else is imported before.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from credit_dp.cli import main

if __name__ == "__main__":
    main()
