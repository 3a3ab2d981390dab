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
from tests.cli.invocation import answer, assert_refused, store_overrides
from tests.data import stores
from tests.ranks import TIMEOUT
from tests.tier_cases import tiers

ROOT = Path(__file__).parents[2]

KEYS = {
    "paralel.domain=2": "paralel.domain: no such key.*parallel.domain?",
    "data.batchsize=2": "data.batchsize: no such key.*data.batch_size?",
    "lr=1e-3": "^lr: no such key. Did you mean optimizer.lr?",
    "trainer.step=5": "Did you mean trainer.steps?",
    "trainer.lr=1e-3": "Did you mean optimizer.lr?",
    "trainer.epochs=3": "Did you mean trainer.steps?",
    "logger.foo=1": "Allowed in logger: trackers, wandb, project, mlflow.",
    "seed.a=1": "seed takes a value",
    "+foo=1": "foo: no such key",
    "++trainer.stepz=1": "trainer.stepz: no such key.*trainer.steps?",
    "~seed": "seed: keys can't be removed",
    "seed": "seed: needs the form KEY=VALUE",
    "'a b=1=2'": "can't be parsed",
    "=3": "^=3: needs the form KEY=VALUE$",
    "--frobnicate": "--frobnicate",
}
CHOICES = {
    "model=unett": "model: needs one of .*, unet, .*got 'unett'.*mean unet?",
    "model=mine": "'mine'.* CREDIT_DP_PLUGINS=my_model.py",
    "model=null": "model: needs one of",
    "experiment=fasst": "mean fast?",
    "+model=unet": "Write model=unet, without the",
    "hydra/lancher=basic": "mean hydra/launcher?",
    "hydra/launcher=basik": "mean basic?",
    "-m model=unet,unett": "mean unet?",
    "--config-dir /nope": "--config-dir: needs a folder, but /nope is not a folder",
    "--config-name nope": "nope",
}
SEVERAL_VALUES = {
    "seed=1,2": "seed: several values need --multirun",
    "data.grid=33,64": "^data.grid: several values need --multirun. A grid is data.grid=33x64.$",
    "data.levels=500,850": (
        r"^data.levels: several values need --multirun. A list is data.levels=\[500,850\].$"
    ),
    "trainer.rollout=4,8 --cfg job": (
        "^trainer.rollout: several values need --multirun. One run takes a table from integers to "
        "integers, like {0: 1, 400: 2, 600: 4}.$"
    ),
}
UNPARSED = {
    "seed=[1": "^seed: needs an integer, got '.1'$",
    "model.channels=[8": "^model.channels: needs a list of integers",
    "device=a=b": "^device: needs one of auto, cpu, cuda, got",
    "run.name=[x": r"^run.name: needs letters.*got '.x'$",
    "optimizer.lr=a=b": "^optimizer.lr: needs a number, got 'a=b'$",
    "loss.variable_weight.2m_temperature=2": ("write 'loss.variable_weight={2m_temperature: 2}'$"),
    "parallel.layout.encoder.0=cuda:0": "write 'parallel.layout={encoder.0: cuda:0}'$",
}
# Refused once the config is composed, which takes a quarter of a second. One of each kind:
TYPES = {
    "model=pangu model.depth=[2]": (
        "^model.depth: no such key. Did you mean model.depths[?] Allowed in model: (?!.*groups)"
    ),
    "parallel.domain=two": "parallel.domain: needs an integer, got 'two'",
    "trainer.rollout=3": (
        "^trainer.rollout: needs a table from integers to integers, like {0: 1, 400: 2, 600: 4}$"
    ),
    "model.channels=[a]": "model.channels: needs a list of integers.*got 'a'",
    "'loss.variable_weight={geopotential: x}'": (
        "loss.variable_weight.geopotential: needs a number, got 'x'"
    ),
    "trainer.callbacks.norms=3": "^trainer.callbacks.norms: needs a table from texts",
    "data.variables.z=3": r"^data.variables.z: needs a group of keys [(].*[)], got '3'$",
    "'data.store=${nope}'": "data.store: Interpolation key 'nope' not found",
}
VALUES = {
    "parallel.domain=0": "parallel.domain: needs an integer of at least 1, got 0",
    "model.channels=[12]": "multiples of model.groups",
    "model.fixers=[dryair]": "model.fixers: needs one of .*Did you mean dry_air?",
    "data.dates.test=[2001-01-02,2001-01-01]": "data.dates.test: .*after the last",
}
RUNS = {
    "parallel.domain=9": (
        "parallel.domain: the model's coarsest level has 8 of the grid's 32 rows, too few for 9 "
        "ranks. Lower parallel.domain to 8 or less."
    ),
    "parallel.ensemble=2": (
        "^parallel.ensemble: 2 ranks need trainer.members to be a multiple of 2, with loss=crps "
        "and model.noise such as 32, got 1. Change one of them.$"
    ),
    "--check experiment=finetune": (
        "^init_from: needs a run's folder or a checkpoint, got none. Give one.$"
    ),
    "resume=/nope/x.pt": "resume: .* /nope/x.pt does not exist",
    "run.dir=/dev/null": "run.dir: cannot write to /dev/null",
    "-m --check parallel.domain=2,16 model.channels=[8],[8,8,8]": (
        "parallel.domain: the model's coarsest level has 8 .* 16 ranks"
    ),
}
MORE_VALUES = {
    "device=gpu": "needs one of auto, cpu, cuda, got 'gpu'. Did you mean cuda?",
    "model.bounds={temperature:[0,1]}": "model.bounds: needs the fixer bounds, got none",
    "data.store=era5.zarr": (
        "^data.store: data=quickstart simulates its own store, got era5.zarr. Add data=zarr, or"
    ),
    "trainer.evaluate_hours=[6,9]": (
        "trainer.evaluate_hours: needs multiples of data.step=6h, but got 9"
    ),
    "data.hybrid={a:[0,2,0],b:[0,0,0]}": (
        "data.hybrid: needs pressures .* that rise from the top, got 0, 2, 0 Pa"
    ),
    "data.prognostic=[t,t]": "data.prognostic: .*more than once",
    "model.batch_size=2": "mean data.batch_size?",
    "model.channels=[[8],16]": "model.channels: needs a list of integers, ",
    "parallel.data=x": "parallel.data: needs an integer or null, got 'x'",
    "hydra.foo=1": "hydra.foo",
    "seed=[1]": "seed: needs an integer",
    "data.levels=500": r"needs a list of integers, like \[a\] or \[a, b\]",
    "data.levels=[]": "^data.levels: needs at least one level, or null for all",
    "trainer.dtype=float16": "set trainer.autocast=bfloat16",
    "loss.latitude_weight=2x": "needs true or false",
    "optimizer.lr=nan": "optimizer.lr: needs a number above 0, got nan",
    "optimizer.betas=[0.9]": "optimizer.betas: needs 2 numbers",
    "trainer.mirror=2": "trainer.mirror: needs a number from 0 to 1, got 2",
    "model.fixers=[water,water]": "model.fixers: needs each entry once",
    "model.fixers=[energy]": (
        "model.fixers: energy needs surface_pressure in data.prognostic, specific_humidity in "
        "data.prognostic, top_net_solar_radiation in data.diagnostic, .*Add what is missing, or "
        "take energy out of model.fixers"
    ),
    "model.fixers=[bounds]": "model.bounds: needs values for the fixer bounds",
    "model.fixers=[bounds] model.bounds={temperature:[1,0]}": (
        r"model.bounds.temperature: needs \[low, high\]"
    ),
    "model.fixers=[bounds] model.bounds={temprature:[0,1]}": (
        "model.bounds.temprature: needs a name from .* Did you mean temperature?"
    ),
    "data.hybrid={a:[0,1]}": "data.hybrid: needs {a:",
    "data.hybrid={a:[0,30000,0,0],b:[0,0,0.4,1]}": (  # levels that cross over mountains
        "data.hybrid: needs pressures a [+] b x 5e4 Pa that rise .* got 0, 30000, 20000, 50000 Pa"
    ),
    "data.hybrid={a:[0,0.2,0],b:[0,0.1,1]}": (
        "data.hybrid: needs a in Pa, got 0.2 at most. .* multiply them by it"
    ),
    "model=crossformer model.kernels=[2,4]": (
        r"model.kernels: needs a list of lists of integers, like \[\[a, b\], \[c\]\]"
    ),
    "model=crossformer model.kernels=[[2,4,6,8,10,12,14,16],[2]]": (
        "model.kernels: 8 kernels halve the channels .* model.channels has 48"
    ),
    "model=crossformer model.spectral_norm=true model.activation_checkpointing=true": (
        "model.spectral_norm: needs model.activation_checkpointing=false"
    ),
    "data.dates.train=[2000-01-01]": "data.dates.train: needs .first, last.",
    "data.dates.train=[a,b]": "data.dates.train: needs .first, last.",
    "data.grid=121": "data.grid: needs ROWSxCOLUMNS",
    "data.dates.valid=atuo": (
        "^data.dates.valid: needs .first, last. in ISO format, .* or auto, got 'atuo'$"
    ),
    "data.dates=[2000-01-01,2000-12-31]": (
        r"^data.dates: needs a group of keys \(train, valid, test, "
    ),
    "resume=auto": "resume: auto needs run.name",
    "run.name=a/b": "run.name: needs letters",
    f"run.name={'a' * 256}": "run.name: needs at most 200 char.* 256",
    f"run.dir=/tmp/{'a' * 256}": (
        "run.dir: cannot read /tmp/a+ .File name too long.. Give another run.dir."
    ),
    "resume=": "resume: needs `auto` or the path .* got none",
    "-m seed=0,1 parallel.domain=2,x": "needs an integer",
    "-m run.name=a,b": "run.name: names the folder of the sweep",
    "-m --check seed=0,1 run.dir=pyproject.toml/runs": (
        "run.dir: .*pyproject.toml is not a folder. Set run.dir to another folder."
    ),
    "-m --check seed=0,1 model.channels=[8],[9]": "model.groups",
    "seed=99999999999999999999": "seed: needs an integer from 0 to 9223",
    "data.quickstart.truncation=600": (
        "data.quickstart.truncation: needs a number from 5 to 255, got 600"
    ),
    "data.quickstart.start=NaT": "data.quickstart.start: needs a date .*'NaT'",
    "data.quickstart.start=20010101": "data.quickstart.start: needs a date",
    "'loss.variable_weight={2m_temperature: -1}'": (
        "loss.variable_weight.2m_temperature: needs a number of at least 0"
    ),
    "parallel.layout={root:[cpu,cpu,cpu]}": (
        "^parallel.layout.root: needs a device like cuda:0, or two"
    ),
    "parallel.layout=[cpu]": "^parallel.layout: needs a table from text",
    "-m run.dir=/proc/nope seed=0,1": "run.dir: cannot write to /proc",
}


@pytest.mark.parametrize(
    "table", [KEYS, CHOICES, SEVERAL_VALUES, UNPARSED], ids=["keys", "choices", "lists", "syntax"]
)
def test_what_is_typed_wrong_is_one_line(table: dict[str, str]) -> None:
    assert_refused(table)


@pytest.mark.parametrize(
    "table",
    [TYPES, VALUES, RUNS, pytest.param(MORE_VALUES, marks=pytest.mark.slow)],
    ids=["types", "values", "runs", "more"],
)
def test_what_no_run_can_have_is_one_line(table: dict[str, str]) -> None:
    assert_refused(table)


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


@pytest.mark.slow
def test_as_a_program_and_before_torch_is_imported() -> None:
    """`train.py` and the console script print the same line."""
    script = (
        "import sys; import credit_dp.cli as c\n"
        "try:\n    c.main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    for program in (["train.py"], ["-c", script, "train"]):
        done = subprocess.run(
            [sys.executable, *program, "parallel.domain=9"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: parallel.domain: the model's coarsest")
        assert done.stderr.count("\n") == 1


def test_a_key_of_another_model_is_named() -> None:
    @dataclass
    class Mine:
        width: int = 3

    config = OmegaConf.create({"model": OmegaConf.structured(Mine)})
    with pytest.raises(OmegaConfBaseException) as error:
        OmegaConf.update(config, "model.channels", [8])
    expected = "model.channels: no such key of this model. Allowed in model: width."
    assert explain_error(error.value) == expected


def test_a_users_file_is_checked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "conf" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [schema_unet, _self_]\nchanels: [8]\n")
    (own / "typed.yaml").write_text("defaults: [schema_unet, _self_]\nchannels: eight\n")
    (own / "broken.yaml").write_text("channels: [8\n")
    (own / "unet.yaml").write_bytes(b"defaults: [schema_unet, _self_]\n# K\xf6ln\n")
    (own / "pangu.yaml").write_text("defaults: [pangu, _self_]\n")
    monkeypatch.chdir(tmp_path)
    assert_refused(
        {
            "model=mine": (
                "^conf/model/mine.yaml: model.chanels: no such key. Did you mean model.ch"
            ),
            "model=typed": "model.channels: needs a list of integers",
            "model=broken": ".",
            "model=unet": "needs config files in UTF-8, but one has other bytes in '# K",
            "model=pangu": "^defaults: a config file includes itself",
        }
    )


HANGS = 60  # seconds

Change = Callable[[xr.Dataset], xr.Dataset]


def with_nan(data: xr.Dataset) -> xr.Dataset:
    values = data["temperature"].values.copy()
    values[3, 1, 5, 2] = np.nan
    return data.assign(temperature=(stores.DIMS, values))


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


# What needs no rank is also in `test_check_run.REFUSED`.
@pytest.mark.parametrize(
    ("mistake", "key"),
    tiers(
        [],
        [("a NaN", "data.prognostic")],
        [
            ("too many ranks", "parallel.domain"),
            ("no store", "data.store"),
            ("no variable", "data.prognostic"),
            ("other dims", "data.store"),
            ("other dates", "data.dates.train"),
        ],
    ),
)
def test_one_line_and_the_end_of_all_ranks(tmp_path: Path, mistake: str, key: str) -> None:
    changes: dict[str, Change] = {
        "a NaN": with_nan,
        "no variable": lambda data: data.drop_vars("temperature"),
        "other dims": lambda data: data.rename(longitude="x"),
    }
    more = {
        "too many ranks": ["parallel.domain=7", "parallel.whole_ops=refuse"],
        "no store": ["data.store=/nope.zarr"],
        "other dates": ["data.dates.train=[1980-01-01,1980-01-02]"],
    }
    data = changes.get(mistake, lambda data: data)(stores.dataset())
    store = stores.write(data, tmp_path / "store.zarr")
    assert key in the_error(run(store, more.get(mistake, [])))


def cut_short(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:50])


DAMAGES: dict[str, Callable[[Path], None]] = {"cut short": cut_short, "missing": Path.unlink}


@pytest.mark.parametrize(
    ("damage", "when"),
    tiers([], [("cut short", "before the statistics")], [("missing", "after them")]),
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
