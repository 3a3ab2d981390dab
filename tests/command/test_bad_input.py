"""Whatever is wrong on the command line is one line that names the key, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.answers import refusal

ROOT = Path(__file__).parents[2]

CASES = {
    "misspelt group": (["paralel.domain=2"], "paralel.domain: no such key.*parallel.domain?"),
    "misspelt key": (["data.batchsize=2"], "data.batchsize: no such key.*data.batch_size?"),
    "right key, wrong group": (["model.batch_size=2"], "mean data.batch_size?"),
    "what is allowed": (["logger.foo=1"], "Allowed in logger: wandb, project."),
    "too deep": (["seed.a=1"], "seed takes a value"),
    "plus": (["+foo=1"], "foo: no such key"),
    "two pluses": (["++trainer.stepz=1"], "trainer.stepz: no such key.*trainer.steps?"),
    "minus": (["~seed"], "seed: keys cannot be removed"),
    "unknown model": (["model=unett"], "model: needs one of unet, .*got 'unett'.*mean unet?"),
    "no model": (["model=null"], "model: needs one of"),
    "unknown experiment": (["experiment=fasst"], "mean fast?"),
    "plus before a group": (["+model=unet"], "write model=unet, without the"),
    "unknown group": (["hydra/lancher=basic"], "mean hydra/launcher?"),
    "unknown launcher": (["hydra/launcher=basik"], "mean basic?"),
    "unknown hydra key": (["hydra.foo=1"], "hydra.foo"),
    "text for integer": (["parallel.domain=two"], "parallel.domain: needs an integer, got 'two'"),
    "null for integer": (["seed=null"], "seed: needs an integer"),
    "integer or null": (["parallel.data=x"], "parallel.data: needs an integer or null, got 'x'"),
    "list for integer": (["seed=[1]"], "seed: needs an integer"),
    "integer for list": (["model.channels=3"], "model.channels: needs a list of integers"),
    "text in list": (["model.channels=[a]"], "model.channels: needs a list of integers.*got 'a'"),
    "text for truth": (["loss.latitude_weight=2x"], "needs true or false"),
    "too small": (["parallel.domain=0"], "parallel.domain: needs an integer of at least 1, got 0"),
    "not a choice": (["device=gpu"], "device: needs one of auto, cpu, cuda, got 'gpu'"),
    "not finite": (["optimizer.lr=nan"], "optimizer.lr: needs a number above 0, got nan"),
    "one beta": (["optimizer.betas=[0.9]"], "optimizer.betas: needs 2 numbers"),
    "channels and groups": (["model.channels=[12]"], "multiples of model.groups"),
    "one date": (["data.train=[2000-01-01]"], "data.train: needs .first, last."),
    "no date": (["data.train=[a,b]"], "data.train: needs .first, last."),
    "dates backwards": (["data.test=[2001-01-02,2001-01-01]"], "data.test: .*after the last"),
    "repeated variable": (["data.prognostic=[t,t]"], "data.prognostic: .*more than once"),
    "grid": (["data.grid=121"], "data.grid: needs ROWSxCOLUMNS"),
    "missing dates": (["data=zarr", "data.store=x"], "data.test, data.train, data.valid: need a"),
    "resume without a name": (["resume=auto"], "resume: auto needs run.name"),
    "a path for a name": (["run.name=a/b"], "run.name: needs letters"),
    "interpolation": (["data.store=${nope}"], "data.store: Interpolation key 'nope' not found"),
    "several values": (["seed=1,2"], "seed: several values need --multirun"),
    "no value": (["seed"], "seed: needs the form KEY=VALUE"),
    "no key": (["a b=1=2"], "does not parse"),
    "unknown dash": (["--frobnicate"], "--frobnicate"),
    "no such folder": (["--config-dir", "/nope"], "--config-dir: no folder /nope"),
    "no such config": (["--config-name", "nope"], "nope"),
    "sweep of an unknown model": (["-m", "model=unet,unett"], "mean unet?"),
    "sweep of wrong types": (["-m", "seed=0,1", "parallel.domain=2,x"], "needs an integer"),
    "sweep of names": (["-m", "run.name=a,b"], "run.name: names the whole sweep"),
    "sweep of a bad value": (["-m", "model.channels=[8,16],[8,9]"], "model.groups"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_line(monkeypatch: pytest.MonkeyPatch, case: tuple[list[str], str]) -> None:
    arguments, needed = case
    with pytest.raises(AssertionError, match=needed):
        raise AssertionError(refusal(monkeypatch, *arguments))


@pytest.mark.parametrize(
    "program", [["train.py"], ["-c", "import credit_dp.command as c; c.main()"]]
)
def test_as_a_program(program: list[str]) -> None:
    first = [] if program == ["train.py"] else ["train"]
    done = subprocess.run(
        [sys.executable, *program, *first, "model=unett"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model: needs one of")
    assert done.stderr.count("\n") == 1


def test_a_users_file_is_checked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "conf" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [schema_unet, _self_]\nchanels: [8]\n")
    (own / "typed.yaml").write_text("defaults: [schema_unet, _self_]\nchannels: eight\n")
    (own / "broken.yaml").write_text("channels: [8\n")
    monkeypatch.chdir(tmp_path)
    line = refusal(monkeypatch, "model=mine")
    monkeypatch.chdir(tmp_path)
    assert line.startswith(
        "conf/model/mine.yaml: model.chanels: no such key. Did you mean model.ch"
    )
    assert "model.channels: needs a list of integers" in refusal(monkeypatch, "model=typed")
    monkeypatch.chdir(tmp_path)
    assert refusal(monkeypatch, "model=broken")
