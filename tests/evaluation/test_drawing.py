"""A figure that can't be drawn is one warning line."""

import logging

import pytest

from credit_dp.evaluation.drawing import draw_or_warn
from tests.plots import failing_plots


def divide(number: float, by: float) -> float:
    return number / by


def test_a_figure_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert draw_or_warn("a.png", divide, 6, by=2) == 3
    assert not caplog.records
    for error, reason in (
        (ValueError("no\nlog scale"), "no"),
        (MemoryError(), "MemoryError"),
        (OSError(28, "full"), "[Errno 28] full"),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        caplog.clear()
        with failing_plots(), caplog.at_level(logging.WARNING):
            draw_or_warn("a.png", fail)
        (record,) = caplog.records
        assert record.getMessage() == f"a.png: not drawn, all else is written ({reason})"
        assert not record.exc_info


def test_an_interrupt_ends_a_command_and_in_tests_all_errors_do() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_or_warn("a.png", interrupt)
    with pytest.raises(AssertionError, match="not drawn"):
        draw_or_warn("a.png", divide, 1, by=0)
