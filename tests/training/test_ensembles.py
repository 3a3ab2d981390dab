"""Ensembles in training: their loss, and members that differ in noise, the same on every mesh."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.cli.plan import sent_table
from credit_dp.config import Config, StandardLossConfig
from credit_dp.costs.budget import model_and_shape, plan_step
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.thread_ranks import run_on_threads
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData, evaluate
from credit_dp.evaluation.scorecard import MAX_HEADLINES
from credit_dp.models.blocks import NoiseModulation
from credit_dp.training.build_training import Training
from credit_dp.training.loss import almost_fair_crps, channel_weights, members_sent, trade_members
from credit_dp.training.monitoring import Validation
from credit_dp.training.summary import batch_line, members_bytes
from tests.ranks import on_processes
from tests.tier_cases import every, tiers
from tests.training.masked_stores import sea_config
from tests.training.meshes import (
    ONE,
    Gradients,
    Mesh,
    assert_same_gradients,
    first_gradients,
    on_mesh,
    run_on_mesh,
    train_from_start,
)
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    tiny_crossformer,
    tiny_pangu,
    tiny_swin,
    tiny_unet,
)

ROWS, MEMBERS, NOISE = 13, 4, 5  # rows: no multiple of 2 or 3
CRPS = StandardLossConfig(name="crps", alpha=0.9, level_weight=True, spectrum=0.1)
MODELS = {
    "unet": tiny_unet(noise=NOISE),
    "pangu": tiny_pangu(noise=NOISE, patch=[2, 3, 4]),
    "crossformer": tiny_crossformer(noise=NOISE),
    "swin": tiny_swin(noise=NOISE),
    "depth": tiny_unet(noise=NOISE, stochastic_depth=0.4, activation_checkpointing=True),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), ROWS)


def of_members(config: Config, model: str = "unet", **trainer: Any) -> Config:
    """Return a run of ensembles of this model."""
    keys = {"steps": 10, "members": MEMBERS, **trainer}
    trainer_config = replace(config.trainer, **keys)
    return replace(config, model=MODELS[model], loss=CRPS, trainer=trainer_config)


def give_noise_weight(training: Training) -> None:
    """Set the weights of noise, which are small at first, to larger ones that all ranks share."""
    generator = torch.Generator().manual_seed(7)
    for part in training.trainer.state.parts:
        for layer in part.modules():
            if isinstance(layer, NoiseModulation):
                weight = layer.linear.weight
                drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                with torch.no_grad():
                    weight.copy_(0.6 * drawn)


def gradient_of_first_batch(manager: DomainParallelManager, config: Config) -> Gradients:
    training = built(config, manager)
    give_noise_weight(training)
    return first_gradients(training)


def crps(members: list[torch.Tensor], truth: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the almost-fair score by its definition: two double loops over members."""
    count = len(members)
    distance = sum((a - b).abs() for a, b in product(members, members))
    error = sum((member - truth).abs() for member in members) / count
    fair = error - distance / (2 * count * (count - 1))
    return alpha * fair + (1 - alpha) * (error - distance / (2 * count**2))


def gradient_by_hand(config: Config) -> Gradients:
    """Compute the same by definition: sample by sample, member by member, step by step."""
    training = built(config, alone())
    give_noise_weight(training)
    ready = prepare_training_data(config.data)
    channels = ready.store.channels.output_channels
    (model,) = training.trainer.state.parts
    layers = [layer for layer in model.modules() if isinstance(layer, NoiseModulation)]
    with training.loader:
        batch = next(training.loader)
    steps = config.trainer.longest_rollout
    targets, forcings = batch.target.chunk(steps, 1), batch.forcing.chunk(steps, 1)
    scale = training.trainer.forward_backward.loss.scale
    masks = ready.store.valid_mask(slice(None))
    valid = torch.ones((), dtype=torch.bool) if masks is None else torch.from_numpy(masks)
    area = torch.from_numpy(row_weights(ready.store.latitude))[:, None] * valid
    area = area * torch.ones_like(targets[0][0])
    weight = torch.from_numpy(channel_weights(config.loss, channels))
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(len(batch.times)):
        one = slice(sample, sample + 1)
        states = [batch.state[one] for _ in range(MEMBERS)]
        for step in range(steps):
            forecasts = []
            for member in range(MEMBERS):
                keys = [config.seed, 0, sample, step + 1, member]
                random = np.random.default_rng(np.random.SeedSequence(keys))
                for layer in layers:
                    layer.draws = torch.from_numpy(random.standard_normal(NOISE))[None]
                    random = np.random.default_rng(np.random.SeedSequence(keys))
                made = training.forecast_step(
                    states[member], forcings[step][one], batch.static[one]
                )
                forecasts.append(made)
                fill = training.forecast_step.fill
                states[member] = (made if fill is None else fill(made))[:, : states[0].shape[1]]
            score = crps([x / scale for x in forecasts], targets[step][one] / scale, CRPS.alpha)
            score = torch.where(valid, score, 0)[0]
            by_channel = (score * area).sum((1, 2)) / area.sum((1, 2))
            total = total + (by_channel * weight / weight.sum()).sum() / steps / len(batch.times)
    total.backward()
    named = training.trainer.state.parameters
    return total.item(), {name: p.grad for name, p in named.items() if p.grad is not None}


def test_the_score_is_that_of_the_definition():
    for alpha, members in product((0.0, 0.95, 1.0), (1, 2, 5)):
        generator = torch.Generator().manual_seed(members)
        errors = torch.randn(2, members, 3, 4, generator=generator, dtype=torch.float64)
        errors[0, :, 0, 0] = 0  # equal members
        errors.requires_grad_()
        found = almost_fair_crps(errors, alpha)
        zero = torch.zeros(2, 3, 4, dtype=torch.float64)
        single = errors[:, 0].abs()
        wanted = crps(list(errors.unbind(1)), zero, alpha) if members > 1 else single
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
        gradients = [
            torch.autograd.grad(score.sum(), errors, retain_graph=True)[0]
            for score in (found, wanted)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-14)


def test_the_fair_score_of_a_sample_does_not_depend_on_the_number_of_members():
    generator = torch.Generator().manual_seed(1)
    many = torch.randn(20000, 8, generator=generator, dtype=torch.float64)
    expected = 2**0.5 / np.pi**0.5 - 1 / np.pi**0.5  # E|X| - E|X - X'| / 2 of normal numbers
    for members in (2, 4, 8):
        mean = almost_fair_crps(many[:, :members], 1.0).mean().item()
        assert mean == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "sea"])
def test_the_gradient_is_that_of_the_definition(store, tmp_path, kind):
    plain = sea_config(tmp_path) if kind == "sea" else make_config(store, tmp_path / "run")
    config = of_members(plain, rollout={0: 2} if kind == "rollout" else {0: 1})
    config = replace(config, loss=replace(CRPS, spectrum=0.0))
    wanted = gradient_by_hand(config)
    assert_same_gradients(gradient_of_first_batch(alone(), config), wanted)
    parts = replace(config, trainer=replace(config.trainer, accumulate=2))
    assert_same_gradients(gradient_of_first_batch(alone(), parts), wanted)


RECOMPUTED = tiers(
    [], [("depth", "step"), ("unet", "blocks")], [("unet", "step"), ("depth", "blocks")]
)


@pytest.mark.parametrize(("model", "kind"), RECOMPUTED)
def test_what_is_computed_again_has_the_noise_of_its_own_step(store, tmp_path, model, kind):
    config = make_config(store, tmp_path)
    config = of_members(config, model, steps=2, accumulate=2, rollout={0: 2})
    numbers, trained = run_on_mesh(ONE, train_from_start, config, None)
    trainer = replace(config.trainer, checkpoint_activations=kind)
    found = run_on_mesh(ONE, train_from_start, replace(config, trainer=trainer), None)
    assert found[0] == numbers
    assert all(np.array_equal(found[1][name], weight) for name, weight in trained.items())


def exchange_of_first_batch(manager: DomainParallelManager, config: Config) -> tuple[int, int]:
    """Return the messages and bytes with members that this rank sends for the first batch."""
    training = built(config, manager)
    traffic = manager.ensemble_transport.traffic
    before = traffic.messages, traffic.bytes
    training.trainer.state.train()
    with training.loader:
        training.trainer.compute_gradients(next(training.loader))
    estimated = members_bytes(config, prepare_training_data(config.data), training, manager)
    assert traffic.bytes - before[1] == estimated
    return traffic.messages - before[0], traffic.bytes - before[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_send_each_others_channels_once_there_and_back(store, tmp_path, ranks):
    steps, samples = 2, 4
    config = make_config(store, tmp_path / "run")
    config = of_members(config, accumulate=2, rollout={0: steps})
    channels = prepare_training_data(config.data).store.channels.num_outputs
    rows, columns = prepare_training_data(config.data).store.grid
    config = on_mesh(config, Mesh(1, 1, 1, ensemble=ranks))
    found = on_processes(ranks, exchange_of_first_batch, config, domain=1, ensemble=ranks)
    passes = steps * 2  # two micro-batches
    share = [len(part) for part in np.array_split(range(channels), ranks)]
    for rank, (messages, size) in enumerate(found):
        own = MEMBERS // ranks
        values = own * (channels - share[rank]) + (MEMBERS - own) * share[rank]
        assert messages == 2 * passes * (ranks - 1)
        assert size == 8 * steps * samples * rows * columns * values
        sent = members_sent(samples, MEMBERS, channels, rows * columns, rank, ranks)
        assert size == 8 * steps * sent
    # Of all members of all points each rank had its own before.
    everything = 8 * steps * samples * rows * columns * channels * MEMBERS
    assert sum(size for _, size in found) == 2 * everything * (ranks - 1) // ranks


def test_a_rank_without_channels_sends_its_members():
    globe = torch.randn(2, 3, 1, 4, 5, generator=torch.Generator().manual_seed(1))  # one channel

    def trade(manager: DomainParallelManager) -> tuple[torch.Tensor, torch.Tensor]:
        own = globe[:, manager.rank, None].clone().requires_grad_()
        members = trade_members(own, manager.transport)
        members.square().sum().backward()
        assert own.grad is not None
        return members.detach(), own.grad

    found = run_on_threads(3, trade)
    assert torch.equal(found[0][0], globe)
    assert [tuple(members.shape) for members, _ in found[1:]] == 2 * [(2, 3, 0, 4, 5)]
    for rank, (_, grad) in enumerate(found):
        assert torch.equal(grad, 2 * globe[:, rank, None])


def output(training: Training, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return training.forecast_step(batch.state, batch.forcing, batch.static)


@pytest.mark.parametrize(
    "model", every(4, ["pangu", "unet", "crossformer", "swin"], pytest.mark.exhaustive)
)
def test_without_noise_it_is_the_model_that_has_none(store, tmp_path, model):
    plain = make_config(store, tmp_path / "run", replace(MODELS[model], noise=0))
    without, noisy = built(plain, alone()), built(of_members(plain, model), alone())
    found, wanted = noisy.trainer.state.parameters, without.trainer.state.parameters
    assert set(wanted) < set(found)
    with torch.no_grad():
        for name, parameter in wanted.items():
            found[name].copy_(parameter)
    with without.loader, noisy.loader:
        batch = next(without.loader)
        assert torch.equal(output(noisy, batch), output(without, batch))
        give_noise_weight(noisy)
        times = batch.times
        rollout = noisy.ensemble.rollout(times, batch.state, [batch.forcing], batch.static)
        with torch.no_grad():
            (members,) = rollout
        assert members.shape[:2] == (len(times), MEMBERS)
        assert (members.std(dim=1).amax(dim=(0, 2, 3)) > 0).all()


def scores(manager: DomainParallelManager, config: Config) -> tuple[Any, Any]:
    """Return the validation and the final scores of untrained weights with noise."""
    training = built(config, manager)
    training.loader.close()
    give_noise_weight(training)
    ready = prepare_training_data(config.data)
    validation = Validation(config, ready, training, manager)()
    dates = HeldOutData(config, ready, training.rows, training.like)
    training.trainer.state.train(False)
    rollout = training.ensemble.rollout
    found = evaluate(rollout, dates, manager, 4, lambda _: None, members=MEMBERS)
    rmse, ensemble = found.tables(10_000)
    assert (rmse.row_count, ensemble.row_count) == (MAX_HEADLINES, MAX_HEADLINES)
    return validation, {name: values.tolist() for name, values in found.scores.items()}


def test_ensembles_have_their_scores(store, tmp_path):
    plain = make_config(store, tmp_path / "run")
    dates = replace(plain.data.dates, valid=["2000-01-03T12", "2000-01-05T18"])
    keys = {"validate_every": 1, "validation_scores": {"energy_score": 2.0}}
    config = of_members(replace(plain, data=replace(plain.data, dates=dates)), **keys)
    validation, final = scores(alone(), config)
    assert set(final) == {"rmse", "crps", "spread"}
    spread, rmse = np.array(final["spread"])[0], np.array(final["rmse"])[0]
    assert (spread > 0).all()
    # As WeatherBench 2 has them; on random fields the error is far above the spread.
    assert (np.array(final["crps"])[0] < rmse).all()
    ratio = validation["validation_spread_skill"]
    assert 0 < ratio < 1
    assert 0 < validation["validation_crps"] < validation["validation_rmse"]
    assert validation["validation_energy_score"] > 0
    assert validation["validation_error"] == 2 * validation["validation_energy_score"]
    config = on_mesh(config, Mesh(1, 1, 2, ensemble=2))
    for found in on_processes(4, scores, config, domain=2, ensemble=2):
        assert found[0] == pytest.approx(validation, rel=1e-10)
        for name, values in final.items():
            assert np.array(found[1][name]) == pytest.approx(np.array(values), rel=1e-10, abs=1e-12)


def test_noise_members_and_loss_come_together(store, tmp_path):
    config, noisy = make_config(store, tmp_path / "run"), MODELS["unet"]
    for model, loss, members, line in (
        (noisy, "mse", 2, r"^trainer\.members: 2 members need loss=crps, got loss=mse"),
        (noisy, "crps", 1, r"^loss: crps needs trainer\.members of at least 2, got 1"),
        (tiny_unet(), "crps", 2, r"^trainer\.members: .* but unet has none\. Set model\.noise"),
        (noisy, "mse", 1, r"^model\.noise: 5 needs trainer\.members of at least 2"),
    ):
        keys = {"loss": StandardLossConfig(name=loss)}
        keys["trainer"] = replace(config.trainer, members=members)
        with pytest.raises(UserError, match=line) as error:
            replace(config, model=model, **keys)
        assert "\n" not in str(error.value)
    for keys, line in (  # what makes members alike
        ({"gradient": 0.5}, "loss.gradient: can't be added to loss=crps"),
        (
            {"sphere_spectrum": 0.5, "sphere_error": "amse"},
            "loss.sphere_error=amse: can't be added to loss=crps",
        ),
        ({"variable_error": {"a": "mae"}}, "loss.variable_error: needs loss=mse, mae or huber"),
    ):
        with pytest.raises(UserError, match=line):
            StandardLossConfig(name="crps", **keys)
    StandardLossConfig(name="crps", sphere_spectrum=0.5)


def test_forecasts_without_noise_have_no_members(store, tmp_path):
    config = make_config(store, tmp_path / "run")
    with pytest.raises(UserError, match=r"^trainer\.evaluate_members: 3 forecasts of model=unet "):
        replace(config, trainer=replace(config.trainer, evaluate_members=3))
    config = of_members(config, evaluate_members=6)
    training = built(config, alone())
    training.loader.close()
    assert (len(training.ensemble.members), training.trainer.forward_backward.members) == (6, 4)


def test_ranks_divide_members_and_recomputed_draws_are_not_compiled(store, tmp_path):
    config = of_members(make_config(store, tmp_path / "run"))
    line = r"^parallel\.ensemble: 3 ranks need trainer\.members to be a multiple of 3, got 4\. Ch"
    with pytest.raises(UserError, match=line):
        on_mesh(config, Mesh(1, 1, 1, ensemble=3))
    plain = make_config(store, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"a multiple of 2, with loss=crps and model\.noise such as 32, got 1\."
    ):
        on_mesh(plain, Mesh(1, 1, 1, ensemble=2))
    with pytest.raises(
        UserError, match=r"^trainer\.evaluate_members: the 2 ranks of .* got 3\. Ch"
    ):
        on_mesh(of_members(config, evaluate_members=3), Mesh(1, 1, 1, ensemble=2))
    assert replace(config, compile=True).compile
    with pytest.raises(UserError, match=r"^compile: needs model\.activation_checkpointing=false"):
        replace(of_members(config, "depth"), compile=True)


def test_a_run_and_its_plan_count_members_as_samples(store, tmp_path):
    config = of_members(make_config(store, tmp_path / "run"))
    assert batch_line(config, alone()) == "4 samples, 4 members of each"
    config = replace(config, data=replace(config.data, grid="33x16"))
    assert model_and_shape(config, 2)[1][0] == 2 * MEMBERS


@pytest.mark.slow
def test_a_plan_knows_the_ranks_that_share_members(store, tmp_path):
    config = of_members(make_config(store, tmp_path / "run"), accumulate=2)
    config = replace(config, data=replace(config.data, grid=f"{ROWS}x16"))
    (alone_budget,) = plan_step(config).budgets
    config = on_mesh(config, Mesh(1, 1, 1, ensemble=2))
    plan = plan_step(config)
    budget, sharded = plan.budgets
    assert plan.report.input_shapes[0][0] == 2 * MEMBERS // 2
    assert budget.held["activations"] < 0.6 * alone_budget.held["activations"]
    assert budget.sent["gradients"] == budget.held["gradients"]  # a ring of two ranks
    assert sharded.held["weights"] < 0.6 * budget.held["weights"]
    channels = prepare_training_data(config.data).store.channels.num_outputs
    assert budget.sent["members"] == 8 * members_sent(4, MEMBERS, channels, ROWS * 16, 0, 2)
    assert not alone_budget.sent["members"]


@pytest.mark.slow
def test_a_plan_of_a_pipeline_shows_what_its_last_stage_sends_for_the_loss(store, tmp_path):
    config = of_members(make_config(store, tmp_path / "run"))
    config = replace(config, data=replace(config.data, grid=f"{ROWS}x16"))
    first, last = (
        budget
        for budget in plan_step(on_mesh(config, Mesh(2, 1, 1, ensemble=2))).budgets
        if budget.mode == "ddp"
    )
    channels = prepare_training_data(config.data).store.channels.num_outputs
    sent = 8 * members_sent(4, MEMBERS, channels, ROWS * 16, 0, 2)
    assert (first.sent["members"], last.sent["members"]) == (0, sent)
    heading = next(line for line in sent_table([first, last]) if "a rank sends" in line)
    assert "members" in heading.split()
