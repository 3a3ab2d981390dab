"""Plots of tests: trainings draw them only if a test needs them, and one that fails is an error.

They take half of a short run's time. In this process and in those forked from a warm one; a new
interpreter draws as for a user.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import credit_dp.training.run
from credit_dp.evaluation import drawing
from credit_dp.training import live_page

# Drawn where the environment has this variable.
DRAW_PLOTS = "CREDIT_DP_TESTS_DRAW_PLOTS"


def _draw_if_wanted(draw: Callable[..., None]) -> Callable[..., None]:
    """Return the method that draws a run's plots, where the environment wants them."""

    def draw_if_wanted(*args: object) -> None:
        if DRAW_PLOTS in os.environ:
            draw(*args)

    return draw_if_wanted


credit_dp.training.run._Run.draw = _draw_if_wanted(credit_dp.training.run._Run.draw)
live_page.PageWriter.draw_map = staticmethod(_draw_if_wanted(live_page.PageWriter.draw_map))


def _raise_instead(record: logging.LogRecord) -> bool:
    """Raise an error instead of the warning that a figure is missing."""
    raise AssertionError(record.getMessage())


drawing.logger.addFilter(_raise_instead)


@contextmanager
def failing_plots() -> Iterator[None]:
    """Let figures fail inside, with a warning as for a user."""
    drawing.logger.removeFilter(_raise_instead)
    try:
        yield
    finally:
        drawing.logger.addFilter(_raise_instead)
