"""Settings of all tests: one thread per rank, no tracker, two sizes of property tests.

At the end it says what the tests of each folder took, so that growth is seen.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

from collections import Counter

import pytest

# A file's tests run one after the other: the longest files first, or one worker ends alone.
FIRST = ("tests/zoo/", "tests/docs/", "tests/slurm/", "tests/training/test_forms.py")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests: not the one that only divides them among workers."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import hypothesis

    # The CF checker imports it: after ecCodes, which has another copy of PROJ's C library, the
    # process would crash at its end.
    import pyproj  # noqa: F401
    import torch

    import tests.plots  # noqa: F401
    from tests.ranks import DEVICE

    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
    hypothesis.settings.register_profile("long", deadline=None, max_examples=30, derandomize=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show seconds and numbers of tests by folder, their fixtures included."""
    seconds, tests = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.partition("::")[0].rpartition("/")[0]
                seconds[folder] += report.duration
                tests[folder] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section("seconds of all workers by folder")
        for folder, took in seconds.most_common():
            terminalreporter.write_line(f"{took:7.0f} s  {tests[folder]:5} tests  {folder}")
        terminalreporter.write_line(f"{seconds.total():7.0f} s  {tests.total():5} tests")
