"""A figure that can't be drawn is one warning line."""

import logging

import pytest

from credit_dp.evaluation.drawing import draw_or_warn
from tests.plots import failing_plots


def divide(number: float, by: float) -> float:
    return number / by


def test_what_is_drawn_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    assert draw_or_warn("a.png", divide, 6, by=2) == 3
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError("no\nlog scale"), MemoryError(), OSError(28, "full")])
def test_a_figure_that_fails_is_one_line(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with failing_plots(), caplog.at_level(logging.WARNING):
        draw_or_warn("a.png", fail)
    (record,) = caplog.records
    reason = str(error).splitlines()[0] if str(error) else "MemoryError"
    assert record.getMessage() == f"a.png: not drawn, all else is written ({reason})"
    assert not record.exc_info


def test_in_tests_a_figure_that_fails_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not drawn"):
        draw_or_warn("a.png", divide, 1, by=0)


def test_an_interrupt_is_none_of_a_figure() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_or_warn("a.png", interrupt)
