"""Commands that run inside this process: their exit code, output and launched configs."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from credit_dp.cli import start_run
from credit_dp.cli.entry import dispatch, run_command
from credit_dp.cli.train import train
from credit_dp.config import Config
from credit_dp.config.data import SPLITS
from credit_dp.config.model import ModelConfig, UNetConfig
from tests.data import stores

SMALL = ("model.channels=[8,16]", "model.groups=4", "data.grid=24x48")


def answer(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, program: str = "train"
) -> tuple[int, str, str]:
    """Return code and output of `python train.py ARGUMENTS` or `credit-dp ARGUMENTS`."""
    out, err = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = run_command(train if program == "train" else dispatch, arguments, program)
    monkeypatch.undo()
    return code, out.getvalue(), err.getvalue()


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Return the one line that refuses a command line, without `error: `."""
    code, out, err = answer(monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("error: ").rstrip()


def assert_refused(table: Mapping[str, str], command: str = "train", *defaults: str) -> None:
    """Check that each command line ends with exit code 2 and says nothing but one line.

    Args:
        table: command lines as in a shell, each with a part of its line, or a regular expression.
        command: that all of them begin with: `train`, or the words after `credit-dp`.
        defaults: more words, but not those whose key a line gives itself.
    """
    program, first = ("train", []) if command == "train" else ("credit-dp", command.split())
    for typed, expected in table.items():
        words = shlex.split(typed)
        given = {word.partition("=")[0] for word in words}
        words = [word for word in defaults if word.partition("=")[0] not in given] + words
        with pytest.MonkeyPatch.context() as patch:
            code, out, err = answer(patch, *first, *words, program=program)
        found = re.fullmatch(r"error: (.+)\n", err)
        assert found, (typed, code, out, err)
        assert (code, out) == (2, ""), typed
        assert expected in found[1] or re.search(expected, found[1]), (typed, found[1])


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `credit-dp plan ARGUMENTS`."""
    return answer(monkeypatch, "plan", *arguments, program="credit-dp")


@contextmanager
def hide_coarsest_rows() -> Iterator[None]:
    """Let the U-Net's config not say how many rows its last level has, as configs of users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UNetConfig, "coarsest_rows", ModelConfig.coarsest_rows)
        yield


@contextmanager
def forget_plugins() -> Iterator[None]:
    """Remove at the end what plug-ins registered meanwhile in this process."""
    repo, modules = ConfigStore.instance().repo, set(sys.modules)
    groups = {group: repo.setdefault(group, {}) for group in ("model", "loss", "optimizer")}
    known = {group: dict(nodes) for group, nodes in groups.items()}
    yield
    for group, nodes in groups.items():
        nodes.clear()
        nodes.update(known[group])
    for name in set(sys.modules) - modules:
        if name.startswith("credit_dp.plugins."):
            del sys.modules[name]


@contextmanager
def record_launches(
    monkeypatch: pytest.MonkeyPatch, folder: Path, codes: tuple[int, ...] = ()
) -> Iterator[list[Config]]:
    """Work in `folder` and launch nothing: yield the configs that `launch` gets.

    Each launch returns the next of `codes`, or 0.
    """
    configs: list[Config] = []

    def remember(config: Config, **_: object) -> int:
        configs.append(config)
        return codes[len(configs) - 1] if codes else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(start_run, "launch", remember)
        yield configs


def write_empty_checkpoint(folder: Path) -> Path:
    """Write what a run takes for a checkpoint of step 3, and return its folder."""
    step = folder / "checkpoint" / "step-00000003"
    step.mkdir(parents=True)
    (step / "state.json").touch()
    return step


def store_overrides(store: Path) -> list[str]:
    """Return the overrides, as a user types them, of a run on two ranks and `stores.dataset`."""
    config = stores.config(store)
    lists = {key: getattr(config, key) for key in ("prognostic", "forcing", "static")}
    lists |= {f"dates.{split}": getattr(config.dates, split) for split in SPLITS}
    return [
        "experiment=fast",
        "data=zarr",
        f"data.store={store}",
        f"data.cache={config.cache}",
        "data.grid=null",
        "parallel.domain=2",
        "parallel.threads=1",
        "device=cpu",
        *(f"data.{key}=[{','.join(values)}]" for key, values in lists.items()),
        "data.batch_size=2",
        "trainer.evaluate_hours=[6]",
        f"run.dir={store.parent / 'run'}",
    ]
