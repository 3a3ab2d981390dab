"""`python -m credit_dp`: the console script, where it is not on the path."""

from credit_dp.cli import main

if __name__ == "__main__":
    main()
