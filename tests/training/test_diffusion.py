"""Diffusion: what is trained, the sampler against closed forms, and both on every mesh."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, distribute_tensor

import credit_dp
from credit_dp.config import Config, DiffusionConfig, StandardLossConfig
from credit_dp.costs.budget import model_and_shape
from credit_dp.data.grid import row_weights
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager, gather_tensor
from credit_dp.errors import UserError
from credit_dp.models.blocks import NoiseModulation
from credit_dp.random_streams import random_seed
from credit_dp.training.build_training import Training
from credit_dp.training.diffusion import (
    Denoising,
    integrate,
    level_at,
    level_embedding,
    preconditioning,
    sampling_levels,
)
from credit_dp.training.loss import channel_weights
from credit_dp.training.monitoring import Validation
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.masked_stores import sea_config
from tests.training.meshes import (
    ONE,
    Gradients,
    Mesh,
    assert_same_gradients,
    assert_same_trajectory,
    first_gradients,
    on_mesh,
    run_on_mesh,
    train_from_start,
)
from tests.training.runs import alone, built, make_config, make_store, tiny_unet

Array = NDArray[np.float64]

ROWS, NOISE = 13, 6  # rows: no multiple of 2 or 3


def tiny_diffusion(**options: Any) -> DiffusionConfig:
    """Return a diffusion model of the tiny U-Net, with few sampling steps."""
    keys = {"channels": [8, 16], "blocks": 1, "groups": 4, "noise": NOISE, "sampling_steps": 3}
    return DiffusionConfig(**{**keys, **options})


MODELS = {
    "plain": tiny_diffusion(),
    "next state": tiny_diffusion(residual=False, sigma_data=0.7),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), ROWS)


def of_diffusion(config: Config, model: str = "plain", **trainer: Any) -> Config:
    """Return a run of this diffusion model."""
    return replace(
        config,
        model=MODELS[model],
        trainer=replace(config.trainer, **{"steps": 10, **trainer}),
    )


def give_levels_weight(training: Training) -> None:
    """Set the weights of noise levels, which are small at first, to larger ones, by their names."""
    for name, parameter in training.trainer.state.parameters.items():
        if "noise" not in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
            parameter.copy_(drawn)


def test_inputs_and_targets_of_the_network_have_unit_variance():
    sigma, sigma_data = torch.logspace(-2, 2, 9, dtype=torch.float64), 0.5
    c_skip, c_out, c_in = preconditioning(sigma, sigma_data)
    # Table 1 of Karras et al. 2022.
    root = (sigma**2 + sigma_data**2).sqrt()
    torch.testing.assert_close(c_skip, sigma_data**2 / root**2)
    torch.testing.assert_close(c_out, sigma * sigma_data / root)
    torch.testing.assert_close(c_in, 1 / root)
    one = torch.ones_like(sigma)
    torch.testing.assert_close(c_in**2 * (sigma**2 + sigma_data**2), one)
    target = (1 - c_skip) ** 2 * sigma_data**2 + c_skip**2 * sigma**2
    torch.testing.assert_close(target / c_out**2, one)
    # The weight of the loss, eq. 8, makes that of the network's output 1.
    torch.testing.assert_close((sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2, c_out**-2)


def test_noise_levels_are_those_of_the_paper():
    config = DiffusionConfig(sigma_min=0.002, sigma_max=80.0, rho=7.0, sampling_steps=18)
    levels = sampling_levels(config)
    assert len(levels) == 19
    assert levels[0] == pytest.approx(80)
    assert levels[-2:] == pytest.approx([0.002, 0])
    between = (80 ** (1 / 7) + 3 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert levels[3] == pytest.approx(between)
    assert sampling_levels(replace(config, sampling_steps=1)) == pytest.approx([80, 0])


def test_levels_that_differ_are_told_apart():
    levels = [level_at(DiffusionConfig(), position / 20) for position in range(21)]
    embedded = torch.tensor([level_embedding(sigma, 32) for sigma in levels])
    assert embedded.shape == (21, 32)
    assert embedded.square().sum(1).numpy() == pytest.approx(16)
    apart = torch.cdist(embedded, embedded) + 10 * torch.eye(21)
    assert apart.min() > 0.5


def normal_denoiser(std: float) -> Any:
    """Return the denoiser of a normal distribution: the expectation of x, given x + sigma n."""
    return lambda x, sigma: x * std**2 / (sigma**2 + std**2)


def start_and_churn(count: int) -> Any:
    def draw(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(count, generator=generator, dtype=torch.float64)

    return draw


def test_the_sampler_is_of_second_order():
    # For a normal distribution the flow scales x by sqrt((0 + s^2) / (sigma_max^2 + s^2)).
    std, errors = 0.8, []
    draw = start_and_churn(50)
    for steps in (32, 64, 128):
        config = DiffusionConfig(sigma_min=4e-5, sigma_max=20.0, sampling_steps=steps)
        found = integrate(config, normal_denoiser(std), draw)
        wanted = 20 * draw(0) * std / math.sqrt(20**2 + std**2)
        errors.append(float((found / wanted - 1).abs().max()))
    assert errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_few_steps_make_samples_too_different():
    """The table in docs/diffusion.md: the standard deviation by steps and the largest level."""
    table = {
        (4, 80): 2.61,
        (4, 3): 1.41,
        (10, 80): 1.20,
        (10, 20): 1.11,
        (20, 80): 1.04,
        (20, 3): 1,
    }
    draw = start_and_churn(5000)
    for (steps, sigma_max), ratio in table.items():
        config = DiffusionConfig(sampling_steps=steps, sigma_max=float(sigma_max))
        found = integrate(config, normal_denoiser(0.3), draw)
        # The flow is linear: the ratio is that of the output to the start.
        found = float(found.std() / draw(0).std()) / 0.3
        assert found == pytest.approx(ratio, abs=0.02), (steps, sigma_max)


def test_churn_keeps_the_distribution_and_forgets_the_start():
    std, count = 0.8, 20_000
    draw = start_and_churn(count)
    keys = {"sigma_min": 1e-3, "sigma_max": 20.0, "sampling_steps": 60}
    found = integrate(DiffusionConfig(**keys, s_churn=40.0), normal_denoiser(std), draw)
    assert float(found.std()) == pytest.approx(std, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([found, draw(0)]))[0, 1])) < 0.1
    # Only at the noise levels of the config, and no more of it than that.
    far = integrate(DiffusionConfig(**keys, s_churn=40.0, s_tmin=30.0), normal_denoiser(std), draw)
    plain = integrate(DiffusionConfig(**keys), normal_denoiser(std), draw)
    assert torch.equal(far, plain)
    none = integrate(DiffusionConfig(**keys, s_churn=40.0, s_tmax=1e-4), normal_denoiser(std), draw)
    assert torch.equal(none, plain)
    louder = integrate(
        DiffusionConfig(**keys, s_churn=40.0, s_noise=1.1), normal_denoiser(std), draw
    )
    assert float(louder.std()) > 1.02 * float(found.std())


def stochastic_sampler(
    config: DiffusionConfig, denoise: Callable[[Array, float], Array], noise: Sequence[Array]
) -> Array:
    """Compute algorithm 2 of Karras et al. 2022, line by line, in numpy."""
    count, inverse = config.sampling_steps, 1 / config.rho
    first, last = config.sigma_max**inverse, config.sigma_min**inverse
    t = [(first + i / (count - 1) * (last - first)) ** config.rho for i in range(count)] + [0.0]
    x = t[0] * noise[0]
    for i in range(count):
        gamma = 0.0
        if config.s_tmin <= t[i] and (config.s_tmax is None or t[i] <= config.s_tmax):
            gamma = min(config.s_churn / count, 2**0.5 - 1)
        t_hat = t[i] + gamma * t[i]
        x_hat = x
        if gamma > 0:
            x_hat = x + (t_hat**2 - t[i] ** 2) ** 0.5 * config.s_noise * noise[i + 1]
        d = (x_hat - denoise(x_hat, t_hat)) / t_hat
        x = x_hat + (t[i + 1] - t_hat) * d
        if t[i + 1] != 0:
            d_next = (x - denoise(x, t[i + 1])) / t[i + 1]
            x = x_hat + (t[i + 1] - t_hat) * (d / 2 + d_next / 2)
    return x


def test_the_sampler_is_algorithm_2():
    for keys in (
        {},
        {"s_churn": 3.0},
        {"s_churn": 40.0, "s_tmin": 0.1, "s_tmax": 5.0, "s_noise": 1.003},
        {"s_churn": 2.0, "rho": 3.0, "sampling_steps": 5, "sigma_max": 12.0},
    ):
        config = DiffusionConfig(**{"sampling_steps": 9, **keys})
        draw = start_and_churn(40)
        # Of a mixture of two points: no flow that a sampler follows by accident.
        denoised = integrate(config, lambda x, sigma: torch.tanh(x / sigma**2 / 2 + x / 8), draw)
        noise = [draw(number).numpy() for number in range(config.sampling_steps + 1)]
        wanted = stochastic_sampler(config, lambda x, s: np.tanh(x / s**2 / 2 + x / 8), noise)
        assert denoised.numpy() == pytest.approx(wanted, rel=1e-10, abs=1e-12), keys


def gradient_of_first_batch(manager: DomainParallelManager, config: Config) -> Gradients:
    training = built(config, manager)
    give_levels_weight(training)
    return first_gradients(training)


def gradient_by_hand(config: Config) -> Gradients:
    """Compute the same by definition: the weighted error of the denoiser, sample by sample."""
    training = built(config, alone())
    give_levels_weight(training)
    ready = prepare_training_data(config.data)
    channels = ready.store.channels.output_channels
    model_config = config.model
    assert isinstance(model_config, DiffusionConfig)
    (model,) = training.trainer.state.parts
    layers = [layer for layer in model.modules() if isinstance(layer, NoiseModulation)]
    with training.loader:
        batch = next(training.loader)
    scale = training.forecast_step.tendency_scale
    states = len(scale)
    masks = ready.store.valid_mask(slice(None))
    valid = torch.ones((), dtype=torch.bool) if masks is None else torch.from_numpy(masks)
    area = torch.from_numpy(row_weights(ready.store.latitude))[:, None] * valid
    area = area * torch.ones_like(batch.target[0])
    weight = torch.from_numpy(channel_weights(config.loss, channels))
    sigma_data = model_config.sigma_data
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(len(batch.times)):
        one = slice(sample, sample + 1)
        x = batch.target[one].clone()
        if model_config.residual:
            x[:, :states] = (x[:, :states] - batch.state[one, -states:]) / scale
        keys = [config.seed, 0, sample, 3, 0, 1]
        position = np.random.default_rng(np.random.SeedSequence(keys)).random()
        ends = (model_config.sigma_max ** (1 / 7), model_config.sigma_min ** (1 / 7))
        sigma = (ends[0] + position * (ends[1] - ends[0])) ** 7
        rows = []
        for row in range(x.shape[2]):
            generator = torch.Generator().manual_seed(
                random_seed(config.seed, 0, sample, 4, row, 1)
            )
            shape = (x.shape[1], x.shape[3])
            rows.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        noisy = torch.where(valid, x + sigma * torch.stack(rows, 1)[None], 0)
        for layer in layers:
            layer.draws = torch.tensor([level_embedding(sigma, NOISE)], dtype=torch.float64)
        c_skip, c_out, c_in = preconditioning(torch.tensor(sigma, dtype=torch.float64), sigma_data)
        inputs = [batch.state[one], batch.forcing[one], batch.static[one], c_in * noisy]
        denoised = c_skip * noisy + c_out * model(torch.cat(inputs, 1))
        loss_weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
        error = loss_weight * torch.where(valid, denoised - x, 0)[0] ** 2
        by_channel = (error * area).sum((1, 2)) / area.sum((1, 2))
        total = total + (by_channel * weight / weight.sum()).sum() / len(batch.times)
    total.backward()
    named = training.trainer.state.parameters
    return total.item(), {name: p.grad for name, p in named.items() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", pytest.param("sea", marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_definition(store, tmp_path, kind):
    plain = sea_config(tmp_path) if kind == "sea" else make_config(store, tmp_path / "run")
    config = of_diffusion(plain)
    wanted = gradient_by_hand(config)
    assert_same_gradients(gradient_of_first_batch(alone(), config), wanted)
    parts = replace(config, trainer=replace(config.trainer, accumulate=2))
    assert_same_gradients(gradient_of_first_batch(alone(), parts), wanted)


@pytest.mark.slow
def test_the_next_state_can_be_denoised_instead_of_the_tendency(store, tmp_path):
    # By field, not by tendency: the output is a field.
    config = make_config(store, tmp_path / "run")
    config = replace(config, loss=replace(config.loss, tendency=False))
    config = of_diffusion(config, "next state")
    assert_same_gradients(gradient_of_first_batch(alone(), config), gradient_by_hand(config))


@pytest.mark.slow
def test_a_stage_without_inputs_and_targets_trains(store, tmp_path):
    config = of_diffusion(make_config(store, tmp_path / "run"), steps=3)
    config = replace(config, data=replace(config.data, batch_size=6))
    wanted = run_on_mesh(ONE, train_from_start, config, None)
    assert_same_trajectory(run_on_mesh(Mesh(3, 1, 1), train_from_start, config, None), wanted)


@pytest.mark.parametrize("kind", ["step", pytest.param("blocks", marks=pytest.mark.slow)])
def test_what_is_computed_again_has_the_level_of_its_own_sample(store, tmp_path, kind):
    config = of_diffusion(make_config(store, tmp_path), steps=2, accumulate=2)
    numbers, trained = run_on_mesh(ONE, train_from_start, config, None)
    trainer = replace(config.trainer, checkpoint_activations=kind)
    found = run_on_mesh(ONE, train_from_start, replace(config, trainer=trainer), None)
    assert found[0] == numbers
    assert all(np.array_equal(found[1][name], weight) for name, weight in trained.items())


MEMBERS = (0, 2)


def sampled(manager: DomainParallelManager, config: Config) -> torch.Tensor:
    """Return two steps of two members from two dates, `(B, M, 2 * C, H, W)`, on the globe."""
    training = built(config, manager)
    give_levels_weight(training)
    training.trainer.state.train(False)
    training.loader.close()
    store = prepare_training_data(config.data).store
    width = store.grid[1]
    generator = torch.Generator().manual_seed(1)

    def band(channels: int) -> torch.Tensor:
        shape = (2, channels, store.grid[0], width)
        globe = torch.randn(shape, generator=generator, dtype=torch.float64)
        return globe[:, :, training.rows]

    channels = store.channels
    state = band(config.model.frames * channels.num_states)
    forcings = [band(len(channels.forcing)) for _ in range(2)]
    static = band(len(channels.static))
    times = np.array(["2000-01-01T06", "2000-01-02T00"], "M8[ns]")
    ensemble = replace(training.ensemble, members=MEMBERS)
    with torch.no_grad():
        members = torch.cat([*ensemble.rollout(times, state, forcings, static)], dim=2)
    return gather_tensor(members.contiguous(), dim=-2, manager=manager)


@pytest.fixture(scope="module")
def sampled_alone(store):
    """The config of a stochastic sampler, and what it samples on one process."""
    config = make_config(store, store.parent / "sampled")
    config = replace(config, model=tiny_diffusion(s_churn=1.5, s_noise=1.05))
    return config, sampled(alone(), config)


def test_samples_of_members_and_dates_differ(sampled_alone):
    _, wanted = sampled_alone
    first, second = wanted.chunk(2, dim=2)
    scale = float(first.std())
    assert float((first[:, 0] - first[:, 1]).std()) > 0.01 * scale
    changes = second - first
    # The noise is new at each date and step.
    assert float((changes[0] - changes[1]).std()) > 0.01 * scale


MESHES = tiers(
    [(Mesh(1, 1, 3),)],
    [(Mesh(2, 1, 1),)],
    [(Mesh(1, 1, 2),), (Mesh(1, 1, 4),), (Mesh(1, 2, 2, "fsdp2"),)],
)


@pytest.mark.parametrize("mesh", MESHES)
def test_samples_are_the_same_on_every_mesh(sampled_alone, mesh):
    config, wanted = sampled_alone
    keys = {"domain": mesh.domain, "pipeline": mesh.pipeline}
    for found in on_processes(mesh.ranks, sampled, on_mesh(config, mesh), **keys):
        assert float((found - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max())


def test_a_loaded_model_samples_what_the_run_does(store, tmp_path):
    config = of_diffusion(make_config(store, tmp_path / "run"), "plain", steps=2)
    training = built(config, alone())
    give_levels_weight(training)
    training.loader.close()
    folder = RunFolder(tmp_path / "run").checkpoints
    save_checkpoint(folder, training.trainer.state, resolved_yaml(config))
    training.trainer.state.train(False)
    model = credit_dp.load(str(folder))
    stream = {"seed": config.seed, "member": 2}
    ready = prepare_training_data(config.data)
    times = np.array(["2000-01-02T06", "2000-01-03T00"], "M8[ns]")
    later = times[:, None] + np.timedelta64(6, "h") * np.arange(3)
    fields = torch.from_numpy(ready.store.read_states(times, slice(None)))
    solar = ready.store.channels.forcing.index("solar")
    external = [
        torch.from_numpy(ready.store.read_forcing(later[:, i], slice(None))) for i in (0, 1)
    ]
    given = iter([forcing[:, [solar]] for forcing in external])
    normaliser = model._output_normaliser
    with torch.no_grad():
        found = [*model.rollout(fields, times, 2, lambda _: next(given), **stream)]
        assert torch.equal(model(fields, times, external[0][:, [solar]], **stream), found[0])
        first = model(fields, times, external[0][:, [solar]], seed=config.seed)
        assert torch.equal(
            model(fields, times, external[0][:, [solar]], seed=config.seed, member=0), first
        )
        assert not torch.equal(first, found[0])
    state = normaliser.normalise(fields, model.static)
    forcings = [training_forcing(ready, later[:, i]) for i in (0, 1)]
    static = model.static.expand(2, -1, -1, -1)
    ensemble = replace(training.ensemble, members=(2,))
    with torch.no_grad():
        wanted = [x[:, 0] for x in ensemble.rollout(times, state, forcings, static)]
    for a, b in zip(found, wanted, strict=True):
        b = normaliser.denormalise(b)
        assert float((a - b).abs().max()) <= 1e-12 * float(b.abs().max())
    few = replace(model.diffusion, sampling_steps=1)
    model.diffusion = few
    with torch.no_grad():
        assert not torch.equal(model(fields, times, external[0][:, [solar]], **stream), found[0])


def training_forcing(ready: Any, times: Any) -> torch.Tensor:
    normaliser = Normaliser.of(ready, torch.float64)
    return normaliser.normalise_forcing(ready.store.read_forcing(times, slice(None)))


def test_points_without_values_stay_without(tmp_path):
    config = of_diffusion(sea_config(tmp_path))
    training = built(config, alone())
    trainer = training.trainer
    denoising = trainer.denoising
    assert isinstance(denoising, Denoising)
    assert denoising.points is not None
    with training.loader:
        batch = next(training.loader)
    noisy = denoising(batch, 0, range(4)).static[:, batch.static.shape[1] :]
    missing = denoising.points.missing.expand_as(noisy)
    assert missing.any()
    assert (noisy[missing] == 0).all()
    assert (noisy[~missing] != 0).all()
    training.trainer.state.train(False)
    sampler = training.forecast_step.model
    training.ensemble.draw([(0, 1, 2, 3)] * 4)
    inputs = torch.cat([batch.state, batch.forcing, batch.static], dim=1)
    with torch.no_grad():
        output = sampler(inputs)
        assert (output[missing] == 0).all()
        assert (output[~missing] != 0).all()
        with pytest.raises(ValueError, match="has keys of 4 samples, got 1"):
            sampler(inputs[:1])


def test_a_run_scores_several_members(store, tmp_path):
    scored = {"evaluate_members": 3, "validate_every": 1}
    config = make_config(store, tmp_path / "run", MODELS["plain"], **scored)
    dates = replace(config.data.dates, valid=["2000-01-03T12", "2000-01-05T18"])
    config = replace(config, data=replace(config.data, dates=dates))
    training = built(config, alone())
    training.loader.close()
    give_levels_weight(training)
    ready = prepare_training_data(config.data)
    scores = Validation(config, ready, training, alone())()
    assert 0 < scores["validation_crps"] < scores["validation_rmse"]
    assert scores["validation_spread_skill"] > 0
    # Noise depends on the date and the member only.
    assert Validation(config, ready, training, alone())() == scores


@pytest.mark.slow
def test_fixers_correct_samples_not_targets(store, tmp_path):
    config = make_config(store, tmp_path / "run")
    name = config.data.prognostic[0]
    model = replace(MODELS["plain"], fixers=["bounds"], bounds={name: [-0.1, 0.1]})
    plain, fixed = (of_diffusion(config), replace(of_diffusion(config), model=model))
    found, wanted = (gradient_of_first_batch(alone(), c) for c in (fixed, plain))
    assert_same_gradients(found, wanted)
    index = prepare_training_data(config.data).store.channels.slice_of(name)
    values = [sampled(alone(), c)[:, :, index] for c in (fixed, plain)]
    assert float(values[0].max() - values[0].min()) < float(values[1].max() - values[1].min())


def test_what_a_denoiser_can_not_learn_is_refused(store, tmp_path):
    config = of_diffusion(make_config(store, tmp_path / "run"))
    for group, keys, line in (
        ("trainer", {"rollout": {0: 1, 5: 2}}, r"^trainer\.rollout: model=diffusion"),
        ("trainer", {"members": 2}, r"^trainer\.members: model=diffusion is trained on single"),
        ("loss", {"name": "mae"}, r"^loss: model=diffusion needs loss=mse .* got mae\."),
        ("loss", {"variable_error": {"t": "mae"}}, r"^loss: .* with loss\.variable_error\."),
        ("loss", {"spectrum": 0.1}, r"^loss\.spectrum: .* Set loss\.spectrum=0"),
        ("loss", {"gradient": 0.1}, r"^loss\.gradient: "),
        ("parallel", {"ensemble": 2}, r"^parallel\.ensemble: .* Use parallel\.data"),
    ):
        base = StandardLossConfig() if group == "loss" else getattr(config, group)
        with pytest.raises(UserError, match=line) as error:
            replace(config, **{group: replace(base, **keys)})
        assert "\n" not in str(error.value)


def test_a_plan_counts_the_noisy_output(store, tmp_path):
    config = make_config(store, tmp_path / "run")
    config = replace(config, data=replace(config.data, grid="33x16"))
    _, plain = model_and_shape(replace(config, model=tiny_unet()), 2)
    model, shape = model_and_shape(replace(config, model=MODELS["plain"]), 2)
    outputs = model.get_submodule("head").out_channels
    assert shape == (plain[0], plain[1] + outputs, *plain[2:])


def test_wrong_keys_are_refused():
    for keys, line in (
        ({"noise": 5}, r"^model\.noise: .* an even number .* got 5"),
        ({"noise": 0}, r"^model\.noise: .* got 0"),
        ({"sigma_min": 0.0}, r"^model\.sigma_min: needs a number above 0"),
        ({"sigma_max": 0.01}, r"^model\.sigma_max: needs more than model\.sigma_min \(0\.02\)"),
        ({"sigma_max": math.inf}, r"^model\.sigma_max: "),
        ({"sigma_min": 1e-5}, r"^model\.sigma_max: needs at most 1e\+06 times .* got 80"),
        ({"rho": 0.5}, r"^model\.rho: needs a number of at least 1"),
        ({"sampling_steps": 0}, r"^model\.sampling_steps: "),
        ({"s_churn": -1.0}, r"^model\.s_churn: "),
        ({"s_tmin": 2.0, "s_tmax": 1.0}, r"^model\.s_tmax: needs at least model\.s_tmin "),
        ({"name": "unet"}, r"^model\.name: "),
    ):
        with pytest.raises(UserError, match=line):
            DiffusionConfig(**keys)
