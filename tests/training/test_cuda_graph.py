"""A replayed step equals the step itself; on CPUs a replay computes it again on the same memory."""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from credit_dp.config import StandardLossConfig
from credit_dp.data.setup import prepare_training_data
from credit_dp.distributed.launcher import RankInfo
from credit_dp.errors import UserError
from credit_dp.training import cuda_graph, model_parts
from credit_dp.training import run as training_run
from credit_dp.training.build_training import build_training
from credit_dp.training.cuda_graph import StepGraph
from credit_dp.training.forward_backward import recomputed_modules
from credit_dp.training.parameter_shards import local_tensor
from tests.ranks import on_processes
from tests.tier_cases import every, tiers
from tests.training.meshes import Mesh, on_mesh
from tests.training.runs import (
    TINY_MODELS,
    alone,
    built,
    make_config,
    make_store,
    step_records,
    tiny_crossformer,
    tiny_unet,
)

ROWS, WARM_UP, STEPS = 13, 2, 5


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), ROWS)


@pytest.fixture(autouse=True)
def _few_steps_before(monkeypatch):
    monkeypatch.setattr(cuda_graph, "WARM_UP", WARM_UP)


class ComputedAgain:
    """Stands for a CUDA graph: a replay calls the work again, and copies what it leaves.

    It reads the memory of the captured step only, and writes to it, as a graph does.
    """

    def __init__(self, training):
        self.forward_backward = training.trainer.forward_backward
        self.parameters = list(training.trainer.state.trainable_parameters.values())
        self.manager = training.trainer.manager
        self.captures = self.replays = 0

    def __call__(self, work):
        self.captures += 1
        with torch.random.fork_rng():  # a capture draws no numbers
            share = work()
        left = [share, self.forward_backward.channel_losses, *(p.grad for p in self.parameters)]
        return partial(self.replay, work, left), share

    def replay(self, work, left):
        self.replays += 1
        for parameter in self.parameters:
            parameter.grad = None
        before = replace(self.manager.transport.traffic)
        share = work()
        vars(self.manager.transport.traffic).update(vars(before))  # a graph counts nothing
        new = [share, self.forward_backward.channel_losses, *(p.grad for p in self.parameters)]
        for own, value in zip(left, new, strict=True):
            if own is not None:
                own.copy_(value)


def trained(manager, config, graph):
    """Train, and return each step's log, the weights, and captures and replays."""
    cuda_graph.WARM_UP = WARM_UP  # in a process of its own, too
    training = built(config, manager)
    trainer = training.trainer
    capture = ComputedAgain(training)
    if graph:
        trainer.graph = StepGraph(
            trainer.forward_backward,
            trainer.state.trainable_parameters.values(),
            [manager.transport.traffic, manager.ensemble_transport.traffic],
            capture,
        )
    with training.loader:
        logs = [record.metrics() for record in step_records(training)]
    times = {"seconds", "wait_seconds", "samples_per_second", "peak_memory_bytes"}
    logs = [{name: x for name, x in log.items() if name not in times} for log in logs]
    weights = {
        name: local_tensor(p.detach()).clone() for name, p in trainer.state.parameters.items()
    }
    return logs, weights, (capture.captures, capture.replays)


CASES = {
    "draws in micro-batches, a late check": (
        {"stochastic_depth": 0.4, "dropout": 0.2},
        {"accumulate": 2, "check_finite": "late", "log_every": 2},
    ),
    "members of rollouts": ({"noise": 4}, {"members": 2, "rollout": {0: 1, 4: 2}, "steps": 8}),
}


@pytest.mark.parametrize("name", every(2, CASES, pytest.mark.slow))
def test_replayed_steps_equal_the_steps(store, tmp_path, name):
    model, trainer = CASES[name]
    config = make_config(store, tmp_path, steps=STEPS)
    loss = replace(config.loss, name="crps") if "noise" in model else config.loss
    config = replace(
        config, model=tiny_unet(**model), trainer=replace(config.trainer, **trainer), loss=loss
    )
    wanted = trained(alone(), config, False)
    found = trained(alone(), config, True)
    assert found[0] == wanted[0]
    assert all(torch.equal(weight, wanted[1][key]) for key, weight in found[1].items())
    graphs = len(config.trainer.rollout)
    assert found[2] == (graphs, config.trainer.steps - graphs * WARM_UP)


MESHES = tiers(
    [],
    [(Mesh(1, 1, 2),), (Mesh(1, 2, 1, "fsdp2"),)],
    [(Mesh(1, *two),) for two in ((2, 1), (2, 2), (1, 3), (1, 2, "fsdp2"))],
)


@pytest.mark.parametrize("mesh", MESHES)
def test_replayed_steps_of_ranks_equal_the_steps(store, tmp_path, mesh):
    """Their messages are counted, too."""
    model = replace(TINY_MODELS["crossformer"], activation_checkpointing=True)
    config = on_mesh(make_config(store, tmp_path, model, steps=STEPS), mesh)
    wanted, found = (
        on_processes(mesh.ranks, trained, config, graph, domain=mesh.domain)
        for graph in (False, True)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(weight, other[1][key]) for key, weight in one[1].items())
        assert one[2] == (1, config.trainer.steps - WARM_UP)
        assert mesh.domain == 1 or one[0][-1]["sent_bytes"] > 0


def test_the_origin_of_a_nan_is_found_without_the_graph(store, tmp_path):
    config = make_config(store, tmp_path)
    training = built(config, alone())
    trainer = training.trainer
    parameters = trainer.state.trainable_parameters
    trainer.graph = StepGraph(
        trainer.forward_backward, parameters.values(), [], ComputedAgain(training)
    )
    with training.loader:
        records = step_records(training)
        for _ in range(WARM_UP + 1):
            next(records)
        next(iter(parameters.values())).data.fill_(torch.nan)
        with pytest.raises(UserError, match="The first non-finite output comes from"):
            next(records)


def test_what_cannot_be_captured_is_said(store, tmp_path):
    """If an operation ends a capture, torch raises another error, of the end of the capture."""

    def refuse(work):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    line = r"cuda_graph: this step can't be captured \(operation not .* capturing\)\. Set trainer"
    with pytest.raises(UserError, match=line):
        train_captured(store, tmp_path, refuse)
    own = torch.zeros(2, 3)
    for draws in ((own, None), (own, torch.ones(1, 3)), (None, own)):
        with pytest.raises(RuntimeError, match="other draws"):
            cuda_graph._copy_draws(*draws)


def train_captured(store, tmp_path, capture, change=lambda training: None):
    """Train with a graph of this capture; a function changes the run before."""
    training = built(make_config(store, tmp_path, steps=STEPS), alone())
    trainer = training.trainer
    parameters = trainer.state.trainable_parameters.values()
    trainer.graph = StepGraph(trainer.forward_backward, parameters, [], capture)
    change(training)
    with training.loader:
        return list(step_records(training))


def count_calls(model):
    model.calls = getattr(model, "calls", 0) + 1


def draw_from_python(model):
    random.random()


def draw_from_numpy(model):
    np.random.rand()


def draw_from_torch(model):
    torch.rand(())


def replace_buffer(model):
    model.register_buffer("mean", torch.zeros(1))


def replace_tensor(model):
    model.last = torch.zeros(1)


def replace_weights(model):
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()


CHANGES = {
    count_calls: "it changes calls on the host",
    draw_from_python: "it changes random numbers of Python on the host",
    draw_from_numpy: "it changes random numbers of NumPy on the host",
    draw_from_torch: "it changes random numbers of torch on the host",
    replace_buffer: "it changes mean on the host",
    replace_tensor: "it changes last on the host",
    replace_weights: "it changes .*weight on the host",
}


def test_a_step_that_changes_the_host_is_refused(store, tmp_path):
    training = built(make_config(store, tmp_path, steps=STEPS), alone())
    trainer, loss = training.trainer, training.trainer.forward_backward.loss
    model = trainer.state.parts[0]
    parameters = trainer.state.trainable_parameters.values()

    def line_of(batch):
        trainer.graph = StepGraph(
            trainer.forward_backward, parameters, [], lambda work: (list, work())
        )
        for _ in range(WARM_UP):
            trainer.train_step(batch)
        with pytest.raises(UserError) as error:
            trainer.train_step(batch)
        return str(error.value)

    with training.loader:
        trainer.start()
        batch = next(training.loader)
    for change, said in CHANGES.items():
        hook = model.register_forward_pre_hook(lambda module, inputs, change=change: change(module))
        assert re.search(f"captured .{said}", line_of(batch)), change
        hook.remove()
    loss.plugin_error = loss.pointwise = CountingError()
    assert "(it changes loss.calls on the host" in line_of(batch)


class CountingError:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, forecast, truth):
        self.calls += 1
        return (forecast - truth).square() / self.calls


def refusal(manager, config):
    """Return the line of a run in which the last rank alone counts its calls."""
    training = built(config, manager)
    trainer = training.trainer
    parameters = trainer.state.trainable_parameters.values()
    trainer.graph = StepGraph(trainer.forward_backward, parameters, [], lambda work: (list, work()))
    cuda_graph.WARM_UP = WARM_UP
    if manager.rank == manager.world_size - 1:
        model = trainer.state.parts[0]
        model.register_forward_pre_hook(lambda module, inputs: count_calls(module))
    try:
        with training.loader:
            list(step_records(training))
    except UserError as error:
        return str(error)


@pytest.mark.slow
def test_all_ranks_refuse_what_one_refuses(store, tmp_path):
    config = on_mesh(make_config(store, tmp_path, steps=STEPS), Mesh(1, 1, 2))
    for line in on_processes(2, refusal, config, domain=2):
        assert "it changes calls on the host" in line


@pytest.mark.slow
def test_weights_in_other_memory_are_captured_again(store, tmp_path):
    training = built(make_config(store, tmp_path, steps=2 * STEPS), alone())
    trainer, capture = training.trainer, ComputedAgain(training)
    parameters = trainer.state.trainable_parameters.values()
    trainer.graph = StepGraph(trainer.forward_backward, parameters, [], capture)
    with training.loader:
        for record in step_records(training):
            if record.step == WARM_UP + 1:
                replace_weights(trainer.state.parts[0])
    assert (capture.captures, capture.replays) == (2, trainer.config.steps - 2 * WARM_UP)


@pytest.mark.slow
def test_a_run_frees_its_graph_before_it_scores(store, tmp_path, monkeypatch):
    """It is gone before the process groups are: nccl's communicators need not outlive it."""
    graphs, steps = [], []

    def build(*arguments):
        training = build_training(*arguments)
        trainer = training.trainer
        parameters = trainer.state.trainable_parameters.values()
        trainer.graph = StepGraph(trainer.forward_backward, parameters, [], ComputedAgain(training))
        graphs.append(trainer.graph)
        return training

    def score(session, dates):
        steps.append(graphs[0]._step)
        raise UserError("scored")

    monkeypatch.setattr(training_run, "build_training", build)
    monkeypatch.setattr(training_run._Run, "score", score)
    with pytest.raises(UserError, match="scored"):
        training_run.run(make_config(store, tmp_path, steps=STEPS), RankInfo(0, 1))
    assert graphs[0].capture.replays
    assert steps == [None]


class FakeStream:
    """A stream that notes what it waits for."""

    def __init__(self, *arguments):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


def test_the_own_stream_waits_for_the_default_one(monkeypatch):
    default = FakeStream()
    current = [default]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    device = torch.device("cuda", 0)
    cuda_graph.use_own_stream(device)
    own = current[0]
    assert own is not default
    assert own.waits_for == [default]
    cuda_graph.use_own_stream(device)  # of a later run in the process
    assert current == [own]


def test_what_it_can_not_serve_is_refused(store, tmp_path):
    config = make_config(store, tmp_path, cuda_graph=True)
    with pytest.raises(UserError, match=r"trainer\.cuda_graph: needs a GPU, got device=cpu"):
        built(config, alone())
    config = on_mesh(make_config(store, tmp_path, dtype="float32"), Mesh(1, 2, 1, "fsdp2"))
    for key, value, line in (
        ("cpu_offload", True, "cpu_offload=false, got true"),
        ("param_dtype", "bfloat16", "param_dtype=null, got bfloat16"),
        ("reduce_dtype", "bfloat16", "reduce_dtype=null, got bfloat16"),
    ):
        parallel = replace(config.parallel, **{key: value})
        with pytest.raises(UserError, match=rf"cuda_graph: needs parallel\.{line}"):
            replace(config, parallel=parallel, trainer=replace(config.trainer, cuda_graph=True))


GPU_MODELS = {
    "unet": tiny_unet(stochastic_depth=0.3, dropout=0.1),
    "pangu": TINY_MODELS["pangu"],
    "crossformer": tiny_crossformer(activation_checkpointing=True),
    "members and spectra": tiny_unet(noise=4),
}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(store, folder, graph=True, model=None, change=lambda training: None):
    """Train on a GPU, and return the run, and each step's loss and norm of gradients."""
    config = make_config(store, folder, cuda_graph=graph)
    if model is not None:
        config = replace(config, model=model)
    if getattr(model, "noise", 0):
        loss = StandardLossConfig(name="crps", spectrum=0.1)
        config = replace(config, loss=loss, trainer=replace(config.trainer, members=2))
    prepared = prepare_training_data(config.data)
    training = build_training(config, prepared, alone(), torch.device("cuda", 0))
    change(training)
    with training.loader:
        records = list(step_records(training))
    return training, [(record.loss, record.grad_norm) for record in records]


@needs_gpu
def test_a_cuda_graph_equals_the_steps(store, tmp_path):
    for name, model in GPU_MODELS.items():
        _, wanted = on_gpu(store, tmp_path, False, model)
        training, found = on_gpu(store, tmp_path, True, model)
        assert training.trainer.graph._step is not None, name
        assert found == [pytest.approx(pair, rel=1e-10) for pair in wanted], name


@needs_gpu
def test_blocks_that_keep_what_they_received_are_captured(store, tmp_path, monkeypatch):
    model = tiny_crossformer(activation_checkpointing=True, stochastic_depth=0.3)
    _, wanted = on_gpu(store, tmp_path, False, model)
    as_sharded = partial(recomputed_modules, domain=2)
    monkeypatch.setattr(
        model_parts, "recomputed_modules", lambda model, config, _: as_sharded(model, config)
    )
    training, found = on_gpu(store, tmp_path, True, model)
    (part,) = training.trainer.state.parts
    assert not part.checkpointing
    assert training.trainer.graph._step is not None
    assert found == [pytest.approx(pair, rel=1e-10) for pair in wanted]


def wait_for_gpu(model):
    next(model.parameters()).sum().item()


@needs_gpu
def test_a_cuda_graph_of_a_step_that_changes_the_host_is_refused(store, tmp_path):
    for change in (*CHANGES, wait_for_gpu):

        def hook(training, change=change):
            model = training.trainer.state.parts[0]
            model.register_forward_pre_hook(lambda module, inputs: change(module))

        reason = CHANGES.get(change, "operation not permitted when stream is capturing")
        with pytest.raises(UserError, match=rf"captured .*{reason}.*\. Set trainer"):
            on_gpu(store, tmp_path, change=hook)


@needs_gpu
def test_a_cuda_graph_is_captured_again_if_memory_moves(store, tmp_path):
    steps = []

    def move(training):
        trainer = training.trainer
        train_step = trainer.train_step

        def step(batch, *rest):
            record = train_step(batch, *rest)
            if record.step == WARM_UP + 1:
                replace_weights(trainer.state.parts[0])
            steps.append(trainer.graph._step)
            return record

        trainer.train_step = step

    _, wanted = on_gpu(store, tmp_path, False)
    _, found = on_gpu(store, tmp_path, change=move)
    assert found == [pytest.approx(pair, rel=1e-10) for pair in wanted]
    captured = [step for step in steps if step is not None]
    assert len({id(step) for step in captured}) == 2
    assert len(captured) == len(steps) - 2 * WARM_UP
