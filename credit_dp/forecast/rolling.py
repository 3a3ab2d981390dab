"""Rolls forecasts out and streams them to disk: what every rank does, once the model is there."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, Run
from credit_dp.forecast.form import Form
from credit_dp.forecast.initial_states import InitialStates
from credit_dp.forecast.jobs import Job, turns
from credit_dp.forecast.step import ForecastStep
from credit_dp.forecast.streaming import Streaming
from credit_dp.forecast.writer import Fields, Writer, disk


@final
class Rolling:
    """Makes forecasts of this rank's share of initial times and members, on its rows.

    In memory are the state of one forecast, and one lead time of it on its way to the disk.

    Args:
        step: of the model, on this rank's rows.
        states: what forecasts start from and are driven by.
        writer: begun already, on all ranks.
    """

    def __init__(
        self,
        step: ForecastStep,
        states: InitialStates,
        writer: Writer,
        manager: DomainParallelManager,
    ) -> None:
        self._step = step
        self._states = states
        self._writer = writer
        self._manager = manager
        own = manager.partition(writer.form.height)
        written = writer.bands_to_write(own)
        runs = tuple((Run(*band),) for band in pairwise(written.bounds))
        self._exchange = RowExchange(own, runs, manager.domain_rank)
        self._rows = written.rows(manager.domain_rank)
        step_hours = states.store.config.step_hours
        self._leads = {hour // step_hours: place for place, hour in enumerate(writer.form.hours)}

    @torch.no_grad()
    def run(self, jobs: Sequence[Job], progress: Callable[[int], None]) -> None:
        """Make these forecasts, which are the same on all ranks; collective.

        `progress` is told how many of this rank's lead times are done.

        Raises:
            UserError: the disk is full, or a state has gaps.
        """
        done, ranks = 0, self._manager.dp_world_size
        with Streaming() as streaming:
            for job, counts in turns(jobs, self._manager.dp_rank, ranks):
                states = self._states
                rollout = self._step.rollout(states.start(job), states.forcings(job), states.static)
                for number, fields in enumerate(rollout, start=1):
                    lead = self._leads.get(number)
                    if counts and lead is not None:
                        self._pass_on(streaming, job, lead, fields)
                        progress(done := done + 1)
                if counts:
                    streaming.give(partial(self._on_disk, self._writer.close, job))

    def _pass_on(self, streaming: Streaming, job: Job, lead: int, fields: Tensor) -> None:
        """Hand one lead time to the disk; of a pipeline's ranks, which all have it, the first's."""
        if self._manager.pipeline_rank > 0:
            return
        streaming.wait()  # for the lead time before, while this one was computed
        physical = self._states.physical(fields)
        rows = self._exchange.apply(physical.contiguous(), self._manager.transport)[0]
        values = rows.to(device="cpu", dtype=torch.float32).numpy()
        parts = by_variable(self._writer.form, values)
        write = self._writer.write
        streaming.give(partial(self._on_disk, write, job, lead, self._rows, parts))

    def _on_disk(self, act: Callable[..., None], *args: object) -> None:
        """Do what may find the disk full, and say so then."""
        with disk(self._writer.out):
            act(*args)


def by_variable(form: Form, values: Fields) -> list[Fields]:
    """`(channels, rows, W)` -> of each variable `(rows, W)` or `(levels, rows, W)`."""
    return [
        values[variable.channels] if variable.on_levels else values[variable.channels.start]
        for variable in form.variables
    ]
