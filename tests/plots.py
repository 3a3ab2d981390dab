"""Trainings of tests draw plots only if a test needs them: they take half of a short run's time.

In this process and in those forked from a warm one; a new interpreter draws as for a user.
"""

import os
from collections.abc import Callable

import credit_dp.training.run

# Drawn where the environment has this variable.
DRAW_PLOTS = "CREDIT_DP_TESTS_DRAW_PLOTS"


def _draw_if_wanted(draw: Callable[..., None]) -> Callable[..., None]:
    """Return the method that draws a run's plots, where the environment wants them."""

    def draw_if_wanted(*args: object) -> None:
        if DRAW_PLOTS in os.environ:
            draw(*args)

    return draw_if_wanted


credit_dp.training.run._Run.draw = _draw_if_wanted(credit_dp.training.run._Run.draw)
