"""Run `credit-dp` as `python -m credit_dp`, for a shell that does not find the console script."""

from credit_dp.cli import main

if __name__ == "__main__":
    main()
