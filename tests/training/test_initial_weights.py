"""Starting from another run's weights: matched by name, on any mesh, with other variables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import Config, DiffusionConfig
from credit_dp.config.data import DataConfig
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.build_training import Training
from credit_dp.training.parameter_shards import local_tensor
from credit_dp.training.state import named_tensors
from credit_dp.training.transfer import (
    channel_names,
    load_initial_weights,
)
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.meshes import MODELS, Mesh, full_arrays, on_mesh, with_ema
from tests.training.runs import alone, built, make_config, make_store, tiny_crossformer, tiny_unet

BEFORE = {
    "prognostic": ["geopotential", "temperature"],
    "forcing": ["day_of_year_sin", "solar"],
    "static": ["geopotential_at_surface", "land_sea_mask"],
}
# Moved, added and dropped, but for what comes out: of that nothing is dropped.
AFTER = {
    "prognostic": ["temperature", "2m_temperature", "geopotential"],
    "forcing": ["solar", "day_of_year_cos"],
    "static": ["land_sea_mask"],
}
LESS = {**AFTER, "prognostic": ["temperature"], "diagnostic": ["2m_temperature"]}
DIFFUSION = DiffusionConfig(channels=[8, 16], blocks=1, groups=4, noise=4)
KINDS = {
    "unet": tiny_unet(),
    "two states": tiny_unet(frames=2),
    "diffusion": DIFFUSION,
    "crossformer": tiny_crossformer(),
    "pangu": MODELS["pangu"],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    return make_config(store, tmp_path_factory.mktemp("run"))


def with_data(config: Config, names: dict[str, list[str]], **changes: object) -> Config:
    data: DataConfig = replace(config.data, **names)
    return replace(config, data=data, **changes)


def save(config: Config, folder: Path) -> Training:
    training = built(config, alone())
    save_checkpoint(folder, training.trainer.state, "")
    return training


def load(training: Training, config: Config, folder: Path) -> str:
    state = training.trainer.state
    return load_initial_weights(
        str(folder), state, config.model, prepare_training_data(config.data)
    )


@pytest.mark.slow
def test_all_weights_of_the_same_model_and_nothing_else(config, tmp_path):
    source = save(config, tmp_path)
    other = replace(config, seed=4, trainer=replace(config.trainer, dtype="float32"))
    training = built(other, alone())
    summary = load(training, other, tmp_path)
    found = training.trainer.state.parameters
    for name, weight in source.trainer.state.parameters.items():
        assert torch.equal(found[name], weight.float())
    assert summary.startswith(f"init_from: {len(found)} of {len(found)} tensors from {tmp_path}")
    assert ";" not in summary
    assert training.trainer.state.step == 0
    assert not training.trainer.state.optimizer.state


def common(source: Training, target: Training, kind: str) -> tuple[list[int], list[int]]:
    """Return the indices of common channels in each."""
    before, after = (channel_names(t.trainer.state.data)[kind] for t in (source, target))
    shared = [name for name in after if name in before]
    return [before.index(name) for name in shared], [after.index(name) for name in shared]


@pytest.mark.parametrize("kind", tiers([("unet",)], [], [(k,) for k in KINDS if k != "unet"]))
def test_channels_in_common_are_treated_as_before(config, kind, tmp_path):
    """New channels have zero weights here, and removed channels get zeros as input."""
    first = with_data(config, BEFORE, model=KINDS[kind])
    second = with_data(config, AFTER, model=KINDS[kind])
    source, target = save(first, tmp_path), built(second, alone())
    for tensor in named_tensors(target.trainer.state.parts).values():
        tensor.detach().zero_()
    summary = load(target, second, tmp_path)
    assert "partly" in summary
    for training in (source, target):
        training.trainer.state.train(False)
    (old,), (new,) = (t.trainer.state.parts for t in (source, target))
    from_in, to_in = common(source, target, "input")
    from_out, to_out = common(source, target, "output")
    assert len(from_out) == 6
    assert from_out != sorted(from_out)
    names = [channel_names(t.trainer.state.data)["input"] for t in (source, target)]
    x = torch.randn(1, len(names[0]), 17, 16, dtype=torch.float64)
    dropped = [at for at in range(len(names[0])) if at not in from_in]
    assert dropped
    x[:, dropped] = 0
    y = torch.randn(1, len(names[1]), 17, 16, dtype=torch.float64)
    y[:, to_in] = x[:, from_in]
    with torch.no_grad():
        assert new(y)[:, to_out].numpy() == pytest.approx(old(x)[:, from_out].numpy(), rel=1e-9)
        assert old(x).abs().max() > 1e-3


@pytest.mark.slow
def test_a_diffusion_model_starts_from_a_deterministic_one(config, tmp_path):
    source = save(config, tmp_path)
    second = replace(config, model=DIFFUSION)
    target = built(second, alone())
    stem = "stem.conv.weight"
    before = full_arrays(target.trainer.state.parameters)
    assert "stem.conv.weight" in load(target, second, tmp_path)
    after = full_arrays(target.trainer.state.parameters)
    for name, weight in full_arrays(source.trainer.state.parameters).items():
        found = after[name]
        if name == stem:
            # The noisy output comes last.
            assert np.array_equal(found[:, weight.shape[1] :], before[name][:, weight.shape[1] :])
            found = found[:, : weight.shape[1]]
        assert np.array_equal(found, weight)


@pytest.mark.slow
def test_new_and_dropped_channels_of_a_unet(config, tmp_path):
    first, second = with_data(config, BEFORE), with_data(config, LESS, seed=9)
    source, target = save(first, tmp_path), built(second, alone())
    drawn = {name: p.detach().clone() for name, p in target.trainer.state.parameters.items()}
    summary = load(target, second, tmp_path)
    assert (
        "; 3 partly (head.bias: 3 of 4 output channels, without 2m_temperature, head.weight: 3 of "
        "4 output channels, without 2m_temperature, stem.conv.weight: 5 of 6 input channels, "
        "without day_of_year_cos)" in summary
    )
    before, after = (t.trainer.state.parameters for t in (source, target))
    assert torch.equal(after["head.bias"][:3], before["head.bias"][3:])
    assert torch.equal(after["head.weight"][3], drawn["head.weight"][3])
    stem, old = after["stem.conv.weight"], before["stem.conv.weight"]
    assert torch.equal(stem[:, :3], old[:, 3:6])  # temperature
    assert torch.equal(stem[:, 3], old[:, 7])  # solar
    assert torch.equal(stem[:, 4], drawn["stem.conv.weight"][:, 4])  # day_of_year_cos
    assert torch.equal(stem[:, 5], old[:, 9])  # land_sea_mask
    assert torch.equal(
        after["encoder.0.0.conv1.conv.weight"], before["encoder.0.0.conv1.conv.weight"]
    )


@pytest.mark.slow
def test_as_many_other_variables_are_not_taken_for_the_same(config, tmp_path):
    first = with_data(config, {**BEFORE, "forcing": ["solar"]})
    second = with_data(config, {**BEFORE, "forcing": ["day_of_year_sin"]}, seed=9)
    source, target = save(first, tmp_path), built(second, alone())
    drawn = target.trainer.state.parameters["stem.conv.weight"].detach().clone()
    load(target, second, tmp_path)
    found = target.trainer.state.parameters["stem.conv.weight"]
    old = source.trainer.state.parameters["stem.conv.weight"]
    assert torch.equal(found[:, 6], drawn[:, 6])
    assert torch.equal(found[:, 7:], old[:, 7:])


def loaded(manager: DomainParallelManager, config: Config, folder: Path):
    training = built(config, manager)
    summary = load(training, config, folder)
    state = training.trainer.state
    if state.average is not None:
        for name, average in state.average.averages.items():
            assert torch.equal(local_tensor(average), local_tensor(state.parameters[name]))
    return summary, full_arrays(state.parameters)


@pytest.mark.parametrize(
    "mesh",
    tiers(
        fast=(),
        slow=[(Mesh(2, 1, 2, "fsdp2", "interleaved"),)],
        exhaustive=[(Mesh(1, 2, 1, "fsdp2"),), (Mesh(1, 1, 2),), (Mesh(2, 1, 1),)],
    ),
)
def test_every_mesh_starts_with_the_same_weights(config, mesh, tmp_path):
    save(with_data(config, BEFORE), tmp_path)
    second = with_ema(with_data(config, LESS, seed=9), 0.9)
    wanted = loaded(alone(), second, tmp_path)
    given = (mesh.ranks, loaded, on_mesh(second, mesh), tmp_path)
    found = on_processes(*given, domain=mesh.domain, pipeline=mesh.pipeline)
    seen = set()
    for summary, weights in found:
        assert summary == wanted[0]
        seen |= weights.keys()
        assert all(np.array_equal(value, wanted[1][name]) for name, value in weights.items())
    assert seen == wanted[1].keys()


@pytest.mark.slow
def test_averages_come_first(config, tmp_path):
    source = built(with_ema(config, 0.9), alone())
    average = source.trainer.state.average
    assert average is not None
    for value in average.averages.values():
        value.fill_(7)
    save_checkpoint(tmp_path, source.trainer.state, "")
    summary, weights = loaded(alone(), config, tmp_path)
    assert "(averages)" in summary
    assert all((value == 7).all() for value in weights.values())


@pytest.mark.slow
def test_other_statistics_are_reported(config, tmp_path):
    training = save(config, tmp_path)
    std = training.trainer.state.data["statistics"]["std"]
    std[1] *= 1.005  # nobody would notice
    assert "normalised" not in load(training, config, tmp_path)
    std[2] *= 1.1
    training.trainer.state.data["statistics"]["forcing_mean"][0] += 1
    summary = load(training, config, tmp_path)
    name = channel_names(training.trainer.state.data)["output"][2]
    forcing = config.data.forcing[0]
    words = f"; 2 channels normalised with another mean or deviation ({name}, {forcing})"
    assert summary.endswith(words)


@pytest.mark.slow
def test_keys_of_the_model_that_differ_are_named(config, tmp_path):
    save(replace(config, model=tiny_unet(upsample="transpose", dropout=0.5)), tmp_path)
    for upsample, words in (("transpose", ""), ("bilinear", "model.upsample=transpose")):
        training = built(replace(config, model=tiny_unet(upsample=upsample)), alone())
        summary = load(training, replace(config, model=tiny_unet(upsample=upsample)), tmp_path)
        assert summary.partition("; the checkpoint has ")[2] == words
        assert ("2 newly initialised (up.0.0.bias, up.0.0.weight)" in summary) == bool(words)


def test_what_does_not_fit_is_refused(config, tmp_path):
    save(replace(config, model=tiny_crossformer()), tmp_path)
    training = built(config, alone())
    with pytest.raises(UserError, match=r"init_from: .* has no weight of this model"):
        load(training, config, tmp_path)
    with pytest.raises(UserError, match=r"init_from: .* but \S*nowhere does not exist"):
        load(training, config, tmp_path / "nowhere")
