"""A trace of some steps, whose parts have names."""

import json
from collections import Counter

import pytest

from credit_dp import process
from credit_dp.errors import UserError
from credit_dp.training.console import Screen
from credit_dp.training.monitoring import StepProfiler, TrainingMonitor
from tests.ranks import on_processes
from tests.training.runs import alone, built, make_config, make_store, step_records


def traced(manager, config, path):
    training = built(config, manager)
    trace = path if manager.rank == 0 else None
    watch = TrainingMonitor(config, training, Screen(None), None, trace)
    with training.loader, watch.profiling():
        for record in step_records(training, watch.batches()):
            watch.on_step_end(record)
            watch.end_step()
    return watch.profiler is None or watch.profiler.written


def names(path):
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.slow
def test_exchange_and_compute_are_named(tmp_path):
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", steps=6, accumulate=2)
    path = tmp_path / "traces" / "trace.json"
    assert on_processes(2, traced, config, path) == [True, True]
    found = names(path)
    assert found["optimiser"] == 3
    assert (found["forward"], found["backward"]) == (6, 6)
    assert found["data"] >= 3
    assert found["exchange"] > found["forward"]
    assert {f"ProfilerStep#{step}" for step in (2, 3, 4)} <= found.keys()
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]


@pytest.mark.slow
def test_a_run_that_is_too_short_has_no_trace(tmp_path):
    config = make_config(make_store(tmp_path, 12), tmp_path / "run", steps=2)
    assert not traced(alone(), config, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


# torch 2.11 says so of a single cycle, too.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
def test_a_trace_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    trace = StepProfiler(tmp_path / "file" / "trace.json")

    def steps():
        with trace:
            for _ in range(6):
                trace.step()

    with pytest.raises(UserError, match=r"trace\.json: could not be written"):
        steps()


def test_without_a_profiler_nothing_is_named():
    done = []

    def call() -> None:
        done.append(1)

    assert process.profiled_call("exchange", call) is call
    with process.profile_region("forward"):
        assert done == []
