"""A mistake is one line that names the key: on the command line, or in data that only ranks see."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.cli.compose import Composer, check_run_config
from credit_dp.cli.overrides import explain_error
from tests import commands
from tests.cli.invocation import answer, refusal, store_overrides
from tests.data import stores
from tests.ranks import TIMEOUT
from tests.tier_cases import every

ROOT = Path(__file__).parents[2]

CASES = {
    "misspelt group": (["paralel.domain=2"], "paralel.domain: no such key.*parallel.domain?"),
    "misspelt key": (["data.batchsize=2"], "data.batchsize: no such key.*data.batch_size?"),
    "right key, wrong group": (["model.batch_size=2"], "mean data.batch_size?"),
    "right key, no group": (["lr=1e-3"], "^lr: no such key. Did you mean optimizer.lr?"),
    "near in its group": (["trainer.step=5"], "Did you mean trainer.steps?"),
    "near in another group": (["trainer.lr=1e-3"], "Did you mean optimizer.lr?"),
    "no key of this model": (
        ["model=pangu", "model.depth=[2]"],
        "^model.depth: no such key. Did you mean model.depths[?] Allowed in model: (?!.*groups)",
    ),
    "a name of other packages": (["trainer.epochs=3"], "Did you mean trainer.steps?"),
    "what is allowed": (["logger.foo=1"], "Allowed in logger: trackers, wandb, project, mlflow."),
    "too deep": (["seed.a=1"], "seed takes a value"),
    "plus": (["+foo=1"], "foo: no such key"),
    "two pluses": (["++trainer.stepz=1"], "trainer.stepz: no such key.*trainer.steps?"),
    "minus": (["~seed"], "seed: keys can't be removed"),
    "unknown model": (["model=unett"], "model: needs one of .*, unet, .*got 'unett'.*mean unet?"),
    "unknown model of one's own": (["model=mine"], "'mine'.* CREDIT_DP_PLUGINS=my_model.py"),
    "no model": (["model=null"], "model: needs one of"),
    "unknown experiment": (["experiment=fasst"], "mean fast?"),
    "plus before a group": (["+model=unet"], "Write model=unet, without the"),
    "unknown group": (["hydra/lancher=basic"], "mean hydra/launcher?"),
    "unknown launcher": (["hydra/launcher=basik"], "mean basic?"),
    "unknown hydra key": (["hydra.foo=1"], "hydra.foo"),
    "text for integer": (["parallel.domain=two"], "parallel.domain: needs an integer, got 'two'"),
    "null for integer": (["seed=null"], "seed: needs an integer"),
    "integer or null": (["parallel.data=x"], "parallel.data: needs an integer or null, got 'x'"),
    "list for integer": (["seed=[1]"], "seed: needs an integer"),
    "integer for list": (["model.channels=3"], "model.channels: needs a list of integers"),
    "number for a table": (
        ["trainer.rollout=3"],
        "^trainer.rollout: needs a table from integers to integers, like {0: 1, 400: 2, 600: 4}$",
    ),
    "number for a list": (["data.levels=500"], r"needs a list of integers, like \[a\] or \[a, b\]"),
    "no levels": (["data.levels=[]"], "^data.levels: needs at least one level, or null for all"),
    "half precision": (["trainer.dtype=float16"], "set trainer.autocast=bfloat16"),
    "a store of the simulation": (
        ["data.store=era5.zarr"],
        "^data.store: data=quickstart simulates its own store, got era5.zarr. Add data=zarr, or",
    ),
    "text in list": (["model.channels=[a]"], "model.channels: needs a list of integers.*got 'a'"),
    "text for truth": (["loss.latitude_weight=2x"], "needs true or false"),
    "too small": (["parallel.domain=0"], "parallel.domain: needs an integer of at least 1, got 0"),
    "not a choice": (["device=gpu"], "needs one of auto, cpu, cuda, got 'gpu'. Did you mean cuda?"),
    "not finite": (["optimizer.lr=nan"], "optimizer.lr: needs a number above 0, got nan"),
    "one beta": (["optimizer.betas=[0.9]"], "optimizer.betas: needs 2 numbers"),
    "channels and groups": (["model.channels=[12]"], "multiples of model.groups"),
    "a share above 1": (["trainer.mirror=2"], "trainer.mirror: needs a number from 0 to 1, got 2"),
    "unknown fixer": (
        ["model.fixers=[dryair]"],
        "model.fixers: needs one of .*Did you mean dry_air?",
    ),
    "a fixer twice": (["model.fixers=[water,water]"], "model.fixers: needs each entry once"),
    "a fixer without its fields": (
        ["model.fixers=[energy]"],
        "model.fixers: energy needs surface_pressure in data.prognostic, specific_humidity in "
        "data.prognostic, top_net_solar_radiation in data.diagnostic, .*Add what is missing, or "
        "take energy out of model.fixers",
    ),
    "no bounds": (["model.fixers=[bounds]"], "model.bounds: needs values for the fixer bounds"),
    "no fixer": (
        ["model.bounds={temperature:[0,1]}"],
        "model.bounds: needs the fixer bounds, got none",
    ),
    "bounds that are no range": (
        ["model.fixers=[bounds]", "model.bounds={temperature:[1,0]}"],
        r"model.bounds.temperature: needs \[low, high\]",
    ),
    "bounds of an unknown variable": (
        ["model.fixers=[bounds]", "model.bounds={temprature:[0,1]}"],
        "model.bounds.temprature: needs a name from .* Did you mean temperature?",
    ),
    "half of the coefficients": (["data.hybrid={a:[0,1]}"], "data.hybrid: needs {a:"),
    "coefficients that fall": (
        ["data.hybrid={a:[0,2,0],b:[0,0,0]}"],
        "data.hybrid: needs pressures .* that rise from the top, got 0, 2, 0 Pa",
    ),
    "coefficients that cross over mountains": (
        ["data.hybrid={a:[0,30000,0,0],b:[0,0,0.4,1]}"],
        "data.hybrid: needs pressures a [+] b x 5e4 Pa that rise .* got 0, 30000, 20000, 50000 Pa",
    ),
    "coefficients in multiples of a pressure": (
        ["data.hybrid={a:[0,0.2,0],b:[0,0.1,1]}"],
        "data.hybrid: needs a in Pa, got 0.2 at most. .* multiply them by it",
    ),
    "list in a list": (["model.channels=[[8],16]"], "model.channels: needs a list of integers, "),
    "no list in a list": (
        ["model=crossformer", "model.kernels=[2,4]"],
        r"model.kernels: needs a list of lists of integers, like \[\[a, b\], \[c\]\]",
    ),
    "more kernels than halves": (
        ["model=crossformer", "model.kernels=[[2,4,6,8,10,12,14,16],[2]]"],
        "model.kernels: 8 kernels halve the channels .* model.channels has 48",
    ),
    "weights that change": (
        ["model=crossformer", "model.spectral_norm=true", "model.activation_checkpointing=true"],
        "model.spectral_norm: needs model.activation_checkpointing=false",
    ),
    "one date": (["data.dates.train=[2000-01-01]"], "data.dates.train: needs .first, last."),
    "no date": (["data.dates.train=[a,b]"], "data.dates.train: needs .first, last."),
    "dates backwards": (
        ["data.dates.test=[2001-01-02,2001-01-01]"],
        "data.dates.test: .*after the last",
    ),
    "repeated variable": (["data.prognostic=[t,t]"], "data.prognostic: .*more than once"),
    "grid": (["data.grid=121"], "data.grid: needs ROWSxCOLUMNS"),
    "dates that are neither a span nor auto": (
        ["data.dates.valid=atuo"],
        "^data.dates.valid: needs .first, last. in ISO format, .* or auto, got 'atuo'$",
    ),
    "dates for all splits": (
        ["data.dates=[2000-01-01,2000-12-31]"],
        r"^data.dates: needs a group of keys \(train, valid, test, ",
    ),
    "resume without a name": (["resume=auto"], "resume: auto needs run.name"),
    "a path for a name": (["run.name=a/b"], "run.name: needs letters"),
    "interpolation": (["data.store=${nope}"], "data.store: Interpolation key 'nope' not found"),
    "several values": (["seed=1,2"], "seed: several values need --multirun"),
    "a comma in a grid": (
        ["data.grid=33,64"],
        r"^data.grid: several values need --multirun. A grid is data.grid=33x64.$",
    ),
    "several values of a list": (
        ["data.levels=500,850"],
        r"^data.levels: several values need --multirun. A list is data.levels=\[500,850\].$",
    ),
    "several values of a table": (
        ["trainer.rollout=4,8", "--cfg", "job"],
        "^trainer.rollout: several values need --multirun. One run takes a table from integers to "
        "integers, like {0: 1, 400: 2, 600: 4}.$",
    ),
    "no value": (["seed"], "seed: needs the form KEY=VALUE"),
    "no key": (["a b=1=2"], "can't be parsed"),
    "nothing for a key": (["=3"], "^=3: needs the form KEY=VALUE$"),
    "unknown dash": (["--frobnicate"], "--frobnicate"),
    "no such folder": (
        ["--config-dir", "/nope"],
        "--config-dir: needs a folder, but /nope is not a folder",
    ),
    "no such config": (["--config-name", "nope"], "nope"),
    "sweep of an unknown model": (["-m", "model=unet,unett"], "mean unet?"),
    "sweep of wrong types": (["-m", "seed=0,1", "parallel.domain=2,x"], "needs an integer"),
    "a name that is too long": (
        [f"run.name={'a' * 256}"],
        "run.name: needs at most 200 char.* 256",
    ),
    "a folder that is too long": (
        [f"run.dir=/tmp/{'a' * 256}"],
        "run.dir: cannot read /tmp/a+ .File name too long.. Give another run.dir.",
    ),
    "resume from an empty variable": (["resume="], "resume: needs `auto` or the path .* got none"),
    "sweep of names": (["-m", "run.name=a,b"], "run.name: names the folder of the sweep"),
    "sweep checked in a file": (
        ["-m", "--check", "seed=0,1", "run.dir=pyproject.toml/runs"],
        "run.dir: .*pyproject.toml is not a folder. Set run.dir to another folder.",
    ),
    "sweep checked": (["-m", "--check", "seed=0,1", "model.channels=[8],[9]"], "model.groups"),
    "sweep checked in all combinations": (
        ["-m", "--check", "parallel.domain=2,16", "model.channels=[8],[8,8,8]"],
        "parallel.domain: the model's coarsest level has 8 .* 16 ranks",
    ),
    "ranks without rows": (
        ["parallel.domain=9"],
        "parallel.domain: the model's coarsest level has 8 of the grid's 32 rows, too few for 9 "
        "ranks. Lower parallel.domain to 8 or less.",
    ),
    "ranks without rows of a grid": (
        ["parallel.domain=4", "data.grid=11x22"],
        "parallel.domain: the model's coarsest level has 3 of the grid's 11 rows",
    ),
    "ranks without members": (
        ["parallel.ensemble=2"],
        "^parallel.ensemble: 2 ranks need trainer.members to be a multiple of 2, with loss=crps "
        "and model.noise such as 32, got 1. Change one of them.$",
    ),
    "leads between steps": (
        ["trainer.evaluate_hours=[6,9]"],
        "trainer.evaluate_hours: needs multiples of data.step=6h, but got 9",
    ),
    "resume from nothing": (["resume=/nope/x.pt"], "resume: .* /nope/x.pt does not exist"),
    "seed beyond 63 bits": (["seed=99999999999999999999"], "seed: needs an integer from 0 to 9223"),
    "no start": (["data.quickstart.start=NaT"], "data.quickstart.start: needs a date .*'NaT'"),
    "a year as start": (["data.quickstart.start=20010101"], "data.quickstart.start: needs a date"),
    "bracket left open": (["seed=[1"], "^seed: needs an integer, got '.1'$"),
    "list left open": (["model.channels=[8"], "^model.channels: needs a list of integers"),
    "not a choice, nor parsed": (["device=a=b"], "^device: needs one of auto, cpu, cuda, got"),
    "not a name, nor parsed": (["run.name=[x"], r"^run.name: needs letters.*got '.x'$"),
    "equals in a number": (["optimizer.lr=a=b"], "^optimizer.lr: needs a number, got 'a=b'$"),
    "weight that is text": (
        ["loss.variable_weight={geopotential: x}"],
        "loss.variable_weight.geopotential: needs a number, got 'x'",
    ),
    "negative weight": (
        ["loss.variable_weight={2m_temperature: -1}"],
        "loss.variable_weight.2m_temperature: needs a number of at least 0",
    ),
    "name that no key can have": (
        ["loss.variable_weight.2m_temperature=2"],
        "write 'loss.variable_weight={2m_temperature: 2}'$",
    ),
    "dots in the name of an entry": (
        ["parallel.layout.encoder.0=cuda:0"],
        "write 'parallel.layout={encoder.0: cuda:0}'$",
    ),
    "three devices": (
        ["parallel.layout={root:[cpu,cpu,cpu]}"],
        r"^parallel.layout.root: needs a device like cuda:0, or two",
    ),
    "list for a table": (["parallel.layout=[cpu]"], "^parallel.layout: needs a table from text"),
    "folder in a file": (["run.dir=/proc/nope"], "run.dir: cannot write to /proc/nope"),
    "file for a folder": (["run.dir=/dev/null"], "run.dir: cannot write to /dev/null"),
    "sweep in a file": (["-m", "run.dir=/proc/nope", "seed=0,1"], "run.dir: cannot write to /proc"),
    "sweep in a device": (["-m", "run.dir=/dev/null", "seed=0,1"], "run.dir: cannot write to /dev"),
    "sweep of a bad value": (["-m", "model.channels=[8,16],[8,9]"], "model.groups"),
}


@pytest.mark.slow
def test_grids_and_checkpoints_that_are_there_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for arguments in (
        ["parallel.domain=8"],
        ["parallel.domain=3", "data.grid=11x22"],
        ["parallel.domain=11", "data.grid=11x22", "model.channels=[8]"],
    ):
        assert answer(monkeypatch, "--check", *arguments)[0] == 0
    check_run_config(
        Composer("train").compose_config([f"resume={tmp_path}"])
    )  # its content is read later


@pytest.mark.parametrize("name", every(3, CASES))
def test_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments, needed = CASES[name]
    with pytest.raises(AssertionError, match=needed):
        raise AssertionError(refusal(monkeypatch, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("program", [["train.py"], ["-c", "import credit_dp.cli as c; c.main()"]])
def test_as_a_program(program: list[str]) -> None:
    first = [] if program == ["train.py"] else ["train"]
    done = subprocess.run(
        [sys.executable, *program, *first, "model=unett"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model: needs one of")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_ranks_without_rows_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from credit_dp.cli.entry import run_command; "
        "from credit_dp.cli.train import train\n"
        "assert run_command(train, ['parallel.domain=9'], 'train') == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("error: parallel.domain: the model's coarsest")


def test_a_key_of_another_model_is_named() -> None:
    @dataclass
    class Mine:
        width: int = 3

    config = OmegaConf.create({"model": OmegaConf.structured(Mine)})
    with pytest.raises(OmegaConfBaseException) as error:
        OmegaConf.update(config, "model.channels", [8])
    expected = "model.channels: no such key of this model. Allowed in model: width."
    assert explain_error(error.value) == expected


@pytest.mark.slow
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


HANGS = 60  # seconds

Change = Callable[[xr.Dataset], xr.Dataset]


def with_nan(data: xr.Dataset) -> xr.Dataset:
    values = data["temperature"].values.copy()
    values[3, 1, 5, 2] = np.nan
    return data.assign(temperature=(stores.DIMS, values))


DATA_CASES: dict[str, tuple[Change, list[str], str]] = {
    "missing store": (lambda data: data, ["data.store=/nope.zarr"], "data.store"),
    "missing variable": (lambda data: data.drop_vars("temperature"), [], "data.prognostic"),
    "NaN in a variable": (with_nan, [], "data.prognostic"),
    "wrong dims": (lambda data: data.rename(longitude="x"), [], "data.store"),
    "dates outside": (
        lambda data: data,
        ["data.dates.train=[1980-01-01,1980-01-02]"],
        "data.dates.train",
    ),
    "too many ranks": (
        lambda data: data,
        ["parallel.domain=7", "parallel.whole_ops=refuse"],
        "parallel.domain",
    ),
}


def run(store: Path, more: list[str]) -> subprocess.CompletedProcess[str]:
    words = ["python", "train.py", *store_overrides(store), *more]
    return commands.run(words, ROOT, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=HANGS)


def the_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that says what is wrong."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", DATA_CASES.values(), ids=DATA_CASES.keys())
def test_one_line_and_the_end(tmp_path: Path, case: tuple[Change, list[str], str]) -> None:
    change, more, key = case
    store = stores.write(change(stores.dataset()), tmp_path / "store.zarr")
    assert key in the_error(run(store, more))


def cut_short(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:50])


DAMAGES: dict[str, Callable[[Path], None]] = {"cut short": cut_short, "missing": Path.unlink}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "when"), [("cut short", "before the statistics"), ("missing", "after them")]
)
def test_damaged_chunk(tmp_path: Path, damage: str, when: str) -> None:
    """A rank meets the damage while it reads ahead in a thread; all ranks end with one line."""
    store = stores.write(stores.dataset(), tmp_path / "store.zarr")
    if when == "after them":
        assert run(store, ["trainer.steps=8"]).returncode == 0
        shutil.rmtree(tmp_path / "run")
    DAMAGES[damage](store / "temperature" / "c" / "3" / "0" / "0" / "0")
    error = the_error(run(store, ["trainer.steps=8"]))
    assert str(store) in error
    assert "temperature at 2000-01-01T18:00" in error
