"""The time and traffic of steps: as planned, for all ranks, of training steps only."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from credit_dp.config import ParallelConfig
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import plan_report
from credit_dp.models import build_model
from credit_dp.training.throughput import ThroughputMeter, peak_memory
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.runs import alone, built, make_config, make_store, step_records

NAMES = [
    "seconds",
    "wait_seconds",
    "samples_per_second",
    "sent_bytes",
    "sent_messages",
    "peak_memory_bytes",
]


def batch(samples=4):
    return SimpleNamespace(times=np.zeros(samples), state=torch.zeros(1))


def trained(manager, config):
    training = built(config, manager)
    with training.loader:
        return [record.metrics() for record in step_records(training)]


@pytest.mark.parametrize(("domain", "data"), tiers([], [(2, 2)], [(3, 1)]))
def test_a_step_sends_what_is_planned(tmp_path, domain, data):
    config = make_config(make_store(tmp_path, 33), tmp_path / "run", steps=3, log_every=2)
    prepared = prepare_training_data(config.data)
    fields, grid = prepared.store.channels.fields(), prepared.store.grid
    model = build_model(config.model, fields, grid).double()
    shape = (config.data.batch_size // data, fields.inputs, *grid)
    plan = plan_report(model, shape, domain)
    config = replace(config, parallel=ParallelConfig(domain=domain, data=data))
    found = on_processes(domain * data, trained, config, domain=domain)
    sent = [*plan.forward, *plan.backward]
    planned = (data * sum(s.bytes for s in sent), data * sum(s.messages for s in sent))
    assert min(planned) > 0
    for numbers in found:
        logged = [n for n in numbers if "loss" in n]
        assert len(logged) == 3  # steps 1, 2 and 3
        assert [(n["sent_bytes"], n["sent_messages"]) for n in logged] == [planned] * 3
        # The same on all ranks, which have waited and held different amounts.
        assert [[n[name] for name in NAMES] for n in logged] == [
            [n[name] for name in NAMES] for n in found[0] if "loss" in n
        ]


def test_numbers_are_of_the_slowest_and_of_all():
    def of_rank(manager):
        clock = iter([0.0, 10.0, 10.0, 13.0 + manager.rank, 20.0 + 10 * manager.rank])
        own = ThroughputMeter(manager, clock.__next__)
        own.next_batch(iter([batch()]))
        manager.transport.traffic.bytes += 10 + manager.rank
        manager.transport.traffic.messages += 1
        return own.metrics()

    for numbers in on_threads(3, of_rank):
        assert numbers["wait_seconds"] == 5.0
        assert numbers["seconds"] == 30.0
        assert numbers["samples_per_second"] == 4 / 30
        assert numbers["sent_bytes"] == 33.0
        assert numbers["sent_messages"] == 3.0


def test_what_is_done_between_steps_does_not_count():
    manager = alone()
    now = [0.0]
    own = ThroughputMeter(manager, lambda: now[0])

    def source():
        for _ in range(4):
            now[0] += 1.0
            yield batch()

    found = []
    batches = source()
    for step in range(4):
        own.next_batch(batches)
        now[0] += 3.0  # the step
        manager.transport.traffic.bytes += 7
        if step % 2:
            found.append(own.metrics())
            now[0] += 100.0  # a validation, say
            manager.transport.traffic.bytes += 1000
    for numbers in found:
        assert numbers["wait_seconds"] == 1.0
        assert numbers["samples_per_second"] == 2 * 4 / 8.0
        assert numbers["sent_bytes"] == 7.0
    assert len(found) == 2


def test_memory_is_of_this_process():
    status = Path("/proc/self/status").read_text()
    kibibytes = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    assert peak_memory(torch.device("cpu")) == pytest.approx(1024 * kibibytes, rel=0.05)
