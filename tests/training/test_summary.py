"""The summary before a run starts; its estimates equal what a run measures."""

from functools import partial

import pytest

from credit_dp.config import TrainerConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.store import Store
from credit_dp.training import console
from credit_dp.training.console import EtaMessage, format_duration
from credit_dp.training.state import MODEL_PREFIX, OPTIMIZER_PREFIX
from credit_dp.training.summary import (
    estimate_run,
    inputs_line,
    summary_lines,
    unused_line,
    variables_line,
)
from tests.data import stores
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.runs import alone, built, make_config, make_store


@pytest.fixture
def config(tmp_path):
    rollout = {0: 2}
    return make_config(make_store(tmp_path, 12), tmp_path / "run", accumulate=2, rollout=rollout)


def expected_and_measured(manager, config):
    """Return messages, bytes of rows and of a checkpoint: estimated, and measured in a step."""
    training = built(config, manager)
    needs = estimate_run(config, prepare_training_data(config.data), training, manager)
    traffic = manager.transport.traffic
    with training.loader:
        batch = next(training.loader)
        before = traffic.messages, traffic.bytes
        training.trainer.state.train()
        training.trainer.train_step(batch)
        sent = traffic.messages - before[0], traffic.bytes - before[1]
    tensors = training.trainer.state.tensors().items()
    saved = sum(
        t.nbytes for n, t in tensors if n.startswith((MODEL_PREFIX, OPTIMIZER_PREFIX)) and t.ndim
    )
    return (needs.messages, needs.sent_bytes, needs.checkpoint_bytes), (*sent, saved)


@pytest.mark.parametrize("steps", tiers([], [(1,)], [(2,)]))
def test_the_estimate_is_what_is_measured(config, steps):
    config.trainer.rollout = {0: steps}
    expected, measured = on_processes(2, expected_and_measured, config)[0]
    # Later forecast steps also send home the gradient of what they start from.
    assert expected == (measured if steps == 1 else pytest.approx(measured, rel=0.1))
    assert measured[0] > 0


@pytest.mark.slow
def test_the_summary_fits_on_a_screen(config):
    training = built(config, alone())
    training.loader.close()
    lines = summary_lines(config, prepare_training_data(config.data), training, alone())
    assert 5 < len(lines) <= 20
    text = "\n".join(lines)
    count = sum(p.numel() for p in training.trainer.state.parameters.values())
    for part in (f"{count:,} parameters", "12 rows", "2000-01-01 to 2000-01-03", config.run.dir):
        assert part in text
    assert "2 from step 0" in text
    assert "activations" in text


def test_variables_are_listed_and_those_that_are_left_out(tmp_path):
    data = stores.dataset(12, 16)
    wind = data["temperature"].rename("u_component_of_wind")
    level = data["temperature"].sel(level=500, drop=True).rename("t_500")  # of a variable in use
    gusts = {f"gust{number:02}": data["solar"] for number in range(30)}
    stores.write(
        data.assign(u=wind, t_500=level, mask=data["land_sea_mask"], **gusts), tmp_path / "s"
    )
    store = Store.open(stores.config(tmp_path / "s", diagnostic=["solar"], forcing=[]))
    assert variables_line(store.channels) == (
        "geopotential, temperature on 3 levels (500 to 1000); 2m_temperature, solar; "
        "never an input: solar"
    )
    assert inputs_line(store.channels) == "geopotential_at_surface, land_sea_mask"
    first = ", ".join(f"gust{number:02}" for number in range(12))
    assert unused_line(store) == f"{first} and 19 more: add what you need to data.prognostic"
    names = [f"field{number}" for number in range(200)]
    many = variables_line(Channels(tuple(map(Channel, names)), (), ()))
    assert many == f"{', '.join(names[:12])} and 188 more"
    store = Store.open(stores.config(stores.write(data, tmp_path / "t")))
    assert unused_line(store) == ""


@pytest.mark.slow
def test_longer_rollouts_hold_more(config):
    training = built(config, alone())
    training.loader.close()
    held = estimate_run(config, prepare_training_data(config.data), training, alone()).memory
    config.trainer.checkpoint_activations = "step"
    again = estimate_run(config, prepare_training_data(config.data), training, alone()).memory
    assert held["activations"] / 2 < again["activations"] < 0.6 * held["activations"]
    assert held["moments"] == 2 * held["weights"]


def test_the_remaining_time_is_logged_once_if_steps_are_many(monkeypatch):
    clock = iter(range(0, 10_000, 3))  # three seconds for each step
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    message = EtaMessage(step=5, total=105, per_epoch=40)
    lines = {step: line for step in range(6, 106) if (line := message(step)) is not None}
    assert lines == {25: "about 2 min for an epoch, done in about 4 min"}
    message = EtaMessage(step=0, total=20, per_epoch=40)  # of few steps
    assert [message(step) for step in range(1, 21)] == [None] * 20


def test_longer_rollouts_take_longer(monkeypatch):
    rollout = TrainerConfig(rollout={0: 1, 40: 4, 80: 8})
    work = partial(rollout.forecast_steps, steps_per_epoch=30)
    counted = [sum(rollout.rollout_at(k, 30) for k in range(n)) for n in range(120)]
    assert [work(n) for n in range(120)] == counted
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    message = EtaMessage(step=0, total=100, per_epoch=40, work=work)
    lines = [line for step in range(1, 101) if (line := message(step)) is not None]
    # 20 steps of 1 forecast step, 40 of 4, 20 of 8
    assert lines == [f"about 2 min for an epoch, done in about {3 * (20 + 160 + 160) // 60} min"]

    by_epoch = TrainerConfig(rollout={0: 1, 2: 3}, rollout_unit="epoch")
    counted = [sum(by_epoch.rollout_at(k, 7) for k in range(n)) for n in range(40)]
    assert [by_epoch.forecast_steps(n, 7) for n in range(40)] == counted


def test_durations():
    texts = {1.25: "1.2 s", 89: "89 s", 600: "10 min", 9000: "2.5 h", 200_000: "2.3 days"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts
