"""Compare training steps: sharded with one process, and the framework with the bare model.

`python benchmarks/training_step.py`
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from loader import write_store
from pinned import DEVICE, DTYPE, RANKS, TWO, Contestants, Mesh, team
from side_by_side import Entry, Row, ratio, times
from table import show
from torch import nn

from credit_dp.cli.compose import Composer
from credit_dp.config import Config
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build_training import build_training
from credit_dp.training.forward_backward import ModelForwardBackward
from credit_dp.training.loggers import CsvLog

MODELS = ("unet", "pangu", "crossformer")
SMALL = ("experiment=fast", "data.grid=96x192", "data.batch_size=1")
LOGGED = 2  # steps; one of them is logged
KEYS = (
    "trainer.steps=1000000",
    "trainer.checkpoint_every=1000000",
    f"trainer.log_every={LOGGED}",
    f"trainer.autocast={'null' if DTYPE == 'float32' else DTYPE}",
)
ALONE = Mesh(1, 1)
CPU = torch.device("cpu")
WARM_UP = 20  # batches
GRID, TIMES = (64, 128), 16
COMPILED = "unet_tiny"  # larger ones compile for minutes


def contestants(manager: DomainParallelManager, config: Config) -> Contestants:
    """Return a training step, and parts of it.

    `framework`: everything, including data and log; `update`: without these two; `model`: only
    forward and backward, and the sum of gradients over ranks; `plain`: a plain training loop around
    the model, as in a script.
    """
    training = build_training(config, prepare_training_data(config.data), manager, device_of_rank())
    trainer = training.trainer
    batch = next(iter(training.loader))
    training.loader.__enter__()
    for _ in range(WARM_UP):  # brings the chunks of the store into the system's cache
        next(training.loader)
    trainer.start()
    log = CsvLog(Path(str(config.data.store)).parent / f"{manager.rank}.csv", 0)
    if not isinstance(trainer.forward_backward, ModelForwardBackward):
        raise TypeError(
            f"the benchmark needs a model, got {type(trainer.forward_backward).__name__}"
        )
    model = trainer.forward_backward.model
    x = torch.cat([batch.state, batch.forcing, batch.static], dim=1)
    target = torch.zeros_like(batch.target)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)

    def framework() -> None:
        record = trainer.train_step(trainer.throughput.next_batch(training.loader))
        if record.loss is not None:
            log.log(record.step, record.metrics())

    def forward_and_backward() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward(target)

    def plain() -> None:
        optimiser.zero_grad(set_to_none=True)
        (model(x) - target).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    def update() -> None:
        trainer.train_step(batch)

    several = {"framework": framework, "update": update, "model": forward_and_backward}
    return {name: partial(repeated, step) for name, step in {**several, "plain": plain}.items()}


def whole_steps(manager: DomainParallelManager, configs: Mapping[str, Config]) -> Contestants:
    """Return one training step of each model, without reading data."""
    steps = {}
    for name, config in configs.items():
        training = build_training(
            config, prepare_training_data(config.data), manager, device_of_rank()
        )
        steps[name] = partial(training.trainer.train_step, next(iter(training.loader)))
    return steps


def device_of_rank() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else CPU


def repeated(step: Callable[[], None]) -> None:
    """Run the steps from one logged step to the next."""
    for _ in range(LOGGED):
        step()


def configured(keys: Sequence[str]) -> Config:
    """Return a config that trains without an end in sight, on one data rank."""
    config = Composer("train").compose_config([*keys, *KEYS])
    return replace(config, parallel=replace(config.parallel, data=1))


def sharded_rows(rounds: int) -> Iterator[Row]:
    """Compare two ranks of one thread with one process of two; only small models have a goal."""
    small = {f"{name}_small": configured([f"model={name}_small", *SMALL]) for name in MODELS}
    configs = {**small, **{name: configured([f"model={name}"]) for name in MODELS}}
    for config in configs.values():
        prepare_training_data(config.data)
    with (
        team(whole_steps, configs, mesh=Mesh(1, 1, threads=RANKS)) as whole,
        team(whole_steps, configs) as ranks,
    ):
        for name, config in configs.items():
            found = times(
                [
                    Entry("first", whole, name),
                    Entry("sharded", ranks, name),
                    Entry("second", whole, name),
                ],
                rounds,
            )
            against = ratio(found["sharded"], found["first"], found["second"])
            yield Row(
                f"training step, {name} at {config.data.grid or '32x64'}: speed of {RANKS} ranks",
                f"one process x {RANKS} threads",
                1 / against.best,
                1.0 if name in small else None,
                1 / against.typical,
                against.spread,
                at_least=True,
                note=f"{1e3 * min(found['sharded']):.0f} ms",
            )


def compiled_rows(rounds: int) -> Iterator[Row]:
    """Compare compiled training steps with the same steps uncompiled, on one rank and on two."""
    configs = {
        kind: configured([f"model={COMPILED}", f"compile={kind}"]) for kind in ("false", "true")
    }
    prepare_training_data(configs["true"].data)
    for mesh in (ALONE, TWO):
        with team(whole_steps, configs, mesh=mesh) as ranks:
            for _ in range(2):  # in the first steps torch still compiles
                ranks.seconds("true")
            kinds = ("false", "true", "false")
            entries = [Entry(f"{kind} {at}", ranks, kind) for at, kind in enumerate(kinds)]
            first, compiled, second = times(entries, rounds).values()
        against = ratio(compiled, first, second)
        yield Row(
            f"training step with compile=true, {COMPILED} at 32x64, domain {mesh.domain}",
            "the same step uncompiled",
            against.best,
            None,
            against.typical,
            against.spread,
            note=f"{1e3 * min(compiled):.0f} ms",
        )


def framework_rows(rounds: int) -> list[Row]:
    """Compare whole steps with the model's part of them, and one rank with a plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_store(Path(folder) / "fields.zarr", GRID, TIMES, "none")
        config = replace(configured(["model=unet"]), data=data)
        prepare_training_data(config.data)
        return [row for mesh in (ALONE, TWO) for row in framework_rows_on(mesh, config, rounds)]


def framework_rows_on(mesh: Mesh, config: Config, rounds: int) -> Iterator[Row]:
    """Yield the figures of one mesh, on a prepared store."""
    kinds = ["model", "framework", "update", "model"]
    if mesh is ALONE:
        kinds += ["plain", "plain"]
    with team(contestants, config, mesh=mesh) as ranks:
        entries = [Entry(f"{kind} {at}", ranks, kind) for at, kind in enumerate(kinds)]
        found = times(entries, rounds)
    where = f"unet at {GRID[0]}x{GRID[1]}, domain {mesh.domain}"
    against = ratio(found["framework 1"], found["model 0"], found["model 3"])
    yield Row(
        f"training step of the whole framework, {where}",
        "forward and backward of the model",
        against.best,
        1.10,
        against.typical,
        against.spread,
        note=f"{1e3 * min(found['framework 1']) / LOGGED:.0f} ms, "
        f"without data and log {1e3 * min(found['update 2']) / LOGGED:.0f} ms",
    )
    if mesh is ALONE:
        against = ratio(found["plain 4"], found["model 0"], found["model 3"])
        yield Row(
            f"training step of a plain loop, {where}", "forward and backward of the model",
            against.best, None, against.typical, against.spread,
        )  # fmt: skip
        against = ratio(found["update 2"], found["plain 4"], found["plain 5"])
        what = f"step without data, {where}"
        yield Row(
            what, "the plain model in a plain loop",
            against.best, 1.0, against.typical, against.spread, with_spread=True,
        )  # fmt: skip


def rows(rounds: int) -> list[Row]:
    """Return all figures of this file but those of `compiled_rows`, which compiles for a minute."""
    return [*sharded_rows(rounds), *framework_rows(rounds)]


if __name__ == "__main__":
    show(rows(int(sys.argv[1]) if sys.argv[1:] else 20))
