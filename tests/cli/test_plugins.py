"""Plug-ins in files that CREDIT_DP_PLUGINS names: chosen, checked, sent to ranks, and trained."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from credit_dp import plugins
from credit_dp.cli import saved_config
from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.saved_config import config_of_checkpoint, overrides_of_run
from credit_dp.config import (
    Config,
    OwnLossConfig,
    OwnModelConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
    as_dict,
)
from credit_dp.config.training import plugin_schedule
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.plugins import LEGACY_VARIABLE, PLUGINS_VARIABLE, find_plugins
from credit_dp.training.run_folder import RunFolder, resolved_yaml
from tests import commands
from tests.cli.invocation import answer, assert_refused, forget_plugins
from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
HEAD = """\
from dataclasses import dataclass, field
from credit_dp.config import OwnModelConfig
"""
MODEL = (
    HEAD
    + """
@dataclass
class Layer:
    kernel: int = 3

@dataclass
class MyModelConfig(OwnModelConfig):
    name: str = "custom"
    width: int = 8
    layer: Layer = field(default_factory=Layer)
    weights: dict[str, float] = field(default_factory=dict)

    def build(self, in_channels, out_channels, grid):
        from torch import nn

        conv = nn.Conv2d(in_channels, self.width, self.layer.kernel, padding=1)
        return nn.Sequential(conv, nn.GroupNorm(2, self.width), nn.SiLU(),
                             nn.Conv2d(self.width, out_channels, 3, padding=1))
"""
)
TRAINING = """\
from dataclasses import dataclass
from credit_dp.config import (
    OwnCallbackConfig, OwnLossConfig, OwnOptimizerConfig, OwnScheduleConfig
)

@dataclass
class Norms(OwnCallbackConfig):
    name: str = "norms"
    every: int = 100

@dataclass
class LogCosh(OwnLossConfig):
    name: str = "logcosh"
    scale: float = 1.0  # where it turns

    def build(self):
        from torch.nn.functional import softplus

        return lambda forecast, truth: (forecast - truth) / self.scale + softplus(
            -2 * (forecast - truth) / self.scale
        )

@dataclass
class SGD(OwnOptimizerConfig):
    name: str = "sgd"
    momentum: float = 0.9

    def build(self, groups):
        from torch import optim

        return optim.SGD(groups, momentum=self.momentum)

@dataclass
class Power(OwnScheduleConfig):
    name: str = "power"
    power: float = 1.0

    def factor(self, step, steps):
        return (1 - step / steps) ** self.power
"""
MEAN = """\
from dataclasses import dataclass
from credit_dp.config import OwnLossConfig

@dataclass
class Mean(OwnLossConfig):
    name: str = "mean"
"""
ALL = ["loss=logcosh", "optimizer=sgd", "optimizer.schedule=power"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Remove the plug-ins that a test registered."""
    with forget_plugins():
        yield


def assert_refused_with(variable: object, table: Mapping[str, str]) -> None:
    """Check command lines of a table with the variable set."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLUGINS_VARIABLE, str(variable))
        assert_refused(table, "train", "--check")


def assert_files_refused(folder: Path, files: Mapping[str, str], typed: str = "") -> None:
    """Check a table of files: their text, and the line that refuses a check with each of them."""
    for number, (text, expected) in enumerate(files.items()):
        (folder / str(number)).mkdir()
        with forget_plugins():
            assert_refused_with(written(folder / str(number), text), {typed: expected})


def written(folder: Path, text: str, name: str = "my_model.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.slow
def test_the_variable_makes_the_model_a_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = [
        written(tmp_path, MODEL),
        written(tmp_path, MODEL.replace('"custom"', '"other"'), "my.2nd-model"),
    ]
    monkeypatch.setenv(PLUGINS_VARIABLE, os.pathsep.join(map(str, two)))
    composer = Composer("train")
    assert {"custom", "other", "unet"} <= set(composer.groups["model"])
    config = composer.compose_config(["model=custom", "model.width=4", "model.layer.kernel=5"])
    assert isinstance(config.model, OwnModelConfig)
    assert vars(config.model) | {"layer": None} == {
        **{"name": "custom", "frames": 1, "residual": True, "bounds": {}, "fixers": []},
        **{"width": 4, "layer": None, "weights": {}},
    }
    assert config.model.layer.kernel == 5
    assert composer.compose_config(["model=other"]).model.name == "other"
    model = config.model.build(3, 2, (8, 16))
    assert model[0].weight.shape == (4, 3, 5, 5)


def test_a_process_with_the_variable_unpickles_the_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks unpickle configs with plug-ins of every kind, and import no torch for it."""
    monkeypatch.setenv(PLUGINS_VARIABLE, str(written(tmp_path, MODEL + TRAINING)))
    config = Composer("train").compose_config(["model=custom", "model.layer.kernel=5", *ALL])
    sent = tmp_path / "config.pickle"
    sent.write_bytes(pickle.dumps(config))
    code = (
        "import pickle, sys; config = pickle.load(open(sys.argv[1], 'rb'))\n"
        "from credit_dp.config.training import plugin_schedule\n"
        "assert (config.model.name, config.model.layer.kernel) == ('custom', 5)\n"
        "assert (config.loss.scale, config.optimizer.momentum) == (1.0, 0.9)\n"
        "assert plugin_schedule(config.optimizer).factor(1, 2) == 0.5\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, sent], cwd=ROOT, check=True, timeout=TIMEOUT)


@pytest.mark.slow
def test_a_file_may_have_plugins_of_every_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PLUGINS_VARIABLE, str(written(tmp_path, TRAINING, "training.py")))
    monkeypatch.setenv(LEGACY_VARIABLE, str(written(tmp_path, MODEL)))  # both variables name files
    composer = Composer("train")
    options = ["loss.scale=2", "optimizer.momentum=0.5", "++optimizer.schedule_options.power=2"]
    config = composer.compose_config(["model=custom", *ALL, *options, "loss.level_weight=true"])
    assert isinstance(config.loss, OwnLossConfig)
    assert vars(config.loss) == {
        **{"name": "logcosh", "latitude_weight": True, "level_weight": True, "scale": 2.0},
        **{"variable_weight": {}, "tendency": True, "spectrum": 0.0},
        **{"gradient": 0.0, "sphere_spectrum": 0.0, "sphere_error": "amplitude"},
    }
    assert isinstance(config.optimizer, OwnOptimizerConfig)
    assert vars(config.optimizer)["momentum"] == 0.5
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-3, 0.01)
    schedule = plugin_schedule(config.optimizer)
    assert schedule is not None
    assert schedule.factor(1, 2) == 0.25
    assert composer.compose_config(["model=custom"]).loss.name == "mse"


@pytest.mark.slow
def test_its_keys_are_checked(tmp_path: Path) -> None:
    options = "optimizer.schedule_options"
    table = {
        "loss=logcsh": "^loss: needs one of crps, huber, logcosh, mae, mse, got 'logcsh'. Did",
        "loss=logcosh loss.scael=2": "^loss.scael: no such key. Did you mean loss.scale[?] Allo",
        "loss=logcosh loss.huber_delta=2": "^loss.huber_delta: no such key of this loss. Allo",
        "loss=logcosh loss.spectrum=-1": "^loss.spectrum: needs a number",
        "optimizer=sgd optimizer.betas=[0,0]": "^optimizer.betas: no such key of this optimize",
        "optimizer=sgd optimizer.momentum=much": "^optimizer.momentum: needs a number, got 'm",
        "optimizer=sgd optimizer.lr=0": "^optimizer.lr: needs a number above 0",
        "optimizer.schedule=pwoer": "^optimizer.schedule: needs one of cosine, constant, step, p",
        f"optimizer.schedule=power {options}.powr=2": (
            f"^{options}.powr: power has no such key. Did you mean power[?] Allowed: power."
        ),
        f"optimizer.schedule=power {options}.power=two": f"^{options}: Value 'two' of type 'st",
        "trainer.callbacks.norms.evry=2": (
            "^trainer.callbacks.norms.evry: norms has no such key. Did you mean every[?] Allowed"
        ),
        "trainer.callbacks.nroms={}": "^trainer.callbacks: needs one of norms, got 'nroms'. Did",
        "trainer.callbacks.norms.every=often": "^trainer.callbacks.norms: Value 'often' of type",
        "trainer.callbacks=norms": "^trainer.callbacks: needs a table from texts to values",
        f"{options}.power=2": f"^{options}: is for a schedule of your own, but optimizer.schedul",
        "model=custom model.widht=4": "^model.widht: no such key. Did you mean model.width[?]",
        "model=custom model.width=wide": "^model.width: needs an integer, got 'wide'",
        "model=custom model.channels=[8]": "^model.channels: no such key of this model.",
        "model=custom model.layer.kernle=3": (
            "^model.layer.kernle: no such key. Did you mean model.layer.k"
        ),
        "model=custom model.frames=0": "^model.frames: needs an integer of at least 1, got 0",
    }
    assert_refused_with(written(tmp_path, MODEL + TRAINING), table)


def test_help_shows_the_keys_of_a_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, TRAINING)))
        code, out, _ = answer(monkeypatch, "loss=logcosh", "--help")
    assert code == 0
    assert "  loss: crps, huber, logcosh, mae, mse\n" in out
    assert f"{'  scale: 1.0':<36}  # where it turns\n" in out


@pytest.mark.slow
def test_a_sweep_and_tables_of_new_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = ("model=custom", "model.weights.a=2")
    plan = ("plan", "--json", *keys, "data.grid=8x16", "parallel.domain=2")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, MODEL)))
        swept = answer(monkeypatch, *keys, "--check", "--multirun", "model.width=4,8")
        planned = answer(monkeypatch, *plan, program="credit-dp")
    assert (swept[0], swept[2], planned[0], planned[2]) == (0, "", 0, "")
    assert "of all 2 runs" in swept[1]
    assert '"model": "custom"' in planned[1]


DECIDING = (
    HEAD
    + """
@dataclass
class MyModelConfig(OwnModelConfig):
    name: str = "custom"
    cut: bool = False

    def build(self, in_channels, out_channels, grid):
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Conv2d(in_channels, out_channels, 3, padding=1)

            def forward(inner, x):
                y = inner.layer(x)
                if torch.isnan(y).any():
                    raise ValueError("NaN")
                return y + y[y > 0].mean() if self.cut else y

        return Model()
"""
)


def test_a_plan_says_where_a_model_decides_by_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cut, needed in (
        (False, "my_model.py:20: decides by values of fields or weights. The plan is that of Fals"),
        (True, "my_model.py:22: reads values of tensors, by which shapes or control flow may be"),
    ):
        words = ["plan", "model=custom", f"model.cut={cut}", "data.grid=9x16", "parallel.domain=2"]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, DECIDING)))
            code, out, err = answer(monkeypatch, *words, program="credit-dp")
        assert (code, err) == (0, "")
        assert needed in out


def test_without_the_file_the_line_says_how_to_register() -> None:
    own = "To use {} {} of your own, set {} to its file, like {}=my_{}.py."
    for choice in ("model=custom", *ALL):
        key, _, name = choice.partition("=")
        word = key.rpartition(".")[2]
        article = "an" if word == "optimizer" else "a"
        hint = own.format(article, word, PLUGINS_VARIABLE, PLUGINS_VARIABLE, word)
        assert_refused_with("", {choice: f"^{key}: needs one of .*, got '{name}'. {hint}$"})


def test_a_users_file_may_change_a_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "conf/loss").mkdir(parents=True)
    (tmp_path / "conf/loss/wide.yaml").write_text("defaults: [logcosh, _self_]\nscale: 3\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(tmp_path)
        environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, TRAINING)))
        assert vars(Composer("train").compose_config(["loss=wide"]).loss)["scale"] == 3
        environment.delenv(PLUGINS_VARIABLE)
        ConfigStore.instance().repo["loss"].clear()
        line = "^In 'loss/wide': Could not load 'loss/logcosh'. To use a loss of your"
        assert_refused({"loss=wide": line})


@pytest.mark.slow
def test_the_run_again_says_which_variable_is_missing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, TRAINING)))
        config = Composer("train").compose_config([*ALL, "++optimizer.schedule_options.power=2"])
        (tmp_path / "config.yaml").write_text(resolved_yaml(config))
        composer = Composer("train")
        earlier = parse_overrides(overrides_of_run(str(tmp_path), [], composer))
        assert composer.compose_config([str(override.input_line) for override in earlier]) == config
    for group in ("loss", "optimizer"):
        ConfigStore.instance().repo[group].clear()
    line = "^loss: needs one of crps, huber, mae, mse, got 'logcosh'."
    hint = f".* like {PLUGINS_VARIABLE}=my_loss.py."
    assert_refused({f"--again {tmp_path} --check": line + hint})


def test_a_batch_script_names_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written(tmp_path, TRAINING, "my training.py")
    written(tmp_path, MODEL)
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(tmp_path)
        environment.setenv(PLUGINS_VARIABLE, "my training.py")
        environment.setenv(LEGACY_VARIABLE, "my_model.py")
        words = "slurm", "script", *ALL, "model=custom", "device=cpu"
        code, out, err = answer(monkeypatch, *words, program="credit-dp")
    assert (code, err) == (0, "")
    assert (
        f"\nexport {PLUGINS_VARIABLE}='{tmp_path}/my training.py:{tmp_path}/my_model.py'\n" in out
    )


def test_the_command_that_repeats_a_run_names_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again = f"credit-dp train --again {tmp_path}/run"
    assert RunFolder(tmp_path / "run").rerun_command == again
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PLUGINS_VARIABLE, "my model.py")
    setting = f"{PLUGINS_VARIABLE}='{tmp_path}/my model.py'"
    assert RunFolder(tmp_path / "run").rerun_command == f"{setting} {again}"


@pytest.mark.slow
def test_a_forecast_needs_the_model_of_a_run_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLUGINS_VARIABLE, str(written(tmp_path, TRAINING)))
        callback = parse_overrides(["trainer.callbacks.norms.every=2"])[0].input_line
        saved = as_dict(Composer("train").compose_config([*ALL, str(callback)]))
    assert saved["trainer"]["callbacks"] == {"norms": {"every": 2}}
    monkeypatch.setattr(saved_config, "read_checkpoint_config", lambda path: saved)
    for group in ("loss", "optimizer"):
        ConfigStore.instance().repo[group].clear()
    config = config_of_checkpoint(tmp_path, ["parallel.domain=2"], Composer("forecast"))
    assert (config.model.name, config.loss.name, config.parallel.domain) == ("unet", "mse", 2)


def test_packages_name_plugins_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "credit_dp.losses": "tests.training.plugins:LogCoshConfig",
        "credit_dp.optimizers": "tests.training.plugins:TorchOptimizerConfig",
        "credit_dp.schedules": "tests.training.plugins:LogCoshConfig",  # of another kind
    }
    found = EntryPoints(EntryPoint("mine", value, group) for group, value in entries.items())
    monkeypatch.setattr(plugins, "entry_points", lambda: found)
    config = Composer("train").compose_config(["loss=mine", "optimizer=mine", "loss.above=3"])
    assert (config.loss.name, config.optimizer.name) == ("mine", "mine")
    assert vars(config.loss)["above"] == 3
    assert find_plugins(OwnScheduleConfig, ()) == {}


def _named(name: str, of: str = "MyModelConfig") -> str:
    return MODEL.replace('"custom"', f'"{name}"').replace("MyModelConfig", of)


def _training(old: str, new: str) -> str:
    assert old in TRAINING
    return TRAINING.replace(old, new)


BAD = {
    "import os\ndef f(:\n": "my_model.py, line 2: SyntaxError: invalid syntax",
    "\n\nimport nope": "my_model.py, line 3: ModuleNotFoundError: No module named",
    "def f():\n    1 / 0\n\nf()": "my_model.py, line 2: ZeroDivisionError: division",
    "import sys\nsys.exit(3)\n": "line 2: SystemExit: 3$",
    "import torch.nn": "my_model.py has no plug-in. It needs a dataclass that",
    HEAD: "no plug-in. It needs a .*: OwnModelConfig, OwnLossConfig, OwnOpti",
    MODEL + _named("custom", "B"): "MyModelConfig and B are both named 'cust",
    _named("pangu"): "named 'pangu', like a model of this package. Give it an",
    _named("unet_base"): "named 'unet_base', like a model of this package",
    MODEL.replace('    name: str = "custom"\n', ""): "a field `name: str = .*None",
    MODEL.replace("name: str", "name"): "needs a field `name: str = ...`",
    _named("my model"): "letters, digits, .* chooses it, got 'my model'",
    _named("schema_mine"): "needs a field `name: str",
    f"{HEAD}\nclass Mine(OwnModelConfig):\n    name: str = 'mine'\n": (
        "Mine in .*my_model.py is not a dataclass. Write @dataclass above it."
    ),
    MODEL.replace("width: int = 8", "width: object = object()"): (
        "model=custom: the fields of MyModelConfig need types that YAML has (Unexpected type"
    ),
    _training('"logcosh"', '"mae"'): "LogCosh is named 'mae', like a loss of th",
    _training('"sgd"', '"adamw"'): "named 'adamw', like an optimizer of th",
    _training('"power"', '"step"'): "named 'step', like a schedule of th",
    _training('    name: str = "logcosh"\n', ""): "by which loss=NAME chooses it, got None",
    _training('    name: str = "power"\n', ""): "which optimizer.schedule=NAME chooses",
    _training("@dataclass\nclass Power", "class Power"): "Power in .* is not a dataclass. ",
    _training("power: float = 1.0", "power: object = object()"): (
        "optimizer.schedule=power: the fields of Power need types that YAML has (Unexpected ty"
    ),
    _training("momentum: float = 0.9", "momentum: object = object()"): (
        "optimizer=sgd: the fields of SGD need types that YAML has"
    ),
}


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    assert_files_refused(tmp_path, BAD)
    there_is_none = f"^{PLUGINS_VARIABLE}: there is no file "
    needed = "nowhere.py. Give the path of a Python file.$"
    assert_refused_with("nowhere.py", {"": there_is_none + needed})
    assert_refused_with(tmp_path, {"": there_is_none})


def test_a_name_of_an_installed_package_is_refused(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            plugins,
            "find_packaged_plugins",
            lambda base: {"custom": OwnModelConfig} if base is OwnModelConfig else {},
        )
        line = "named 'custom', like a model of the entry point of OwnModelConfig."
        assert_refused_with(written(tmp_path, MODEL), {"": line})


def test_a_check_tries_the_loss_and_the_schedule(tmp_path: Path) -> None:
    mixing = "lambda f, t: (f - t) ** 2 - (f - t).mean((2, 3), keepdim=True)"
    text = f"{MEAN}\n    def build(self):\n        return {mixing}\n"
    line = "^loss: Mean.build: its function needs errors that depend only on their"
    assert_refused_with(written(tmp_path, text, "mean.py"), {"loss=mean": line})
    text = TRAINING.replace("return (1", "return -1 or (1")
    line = "^optimizer.schedule: Power.factor has to return a finite number"
    assert_refused_with(written(tmp_path, text), {"optimizer.schedule=power": line})


def test_kinds_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = MODEL.replace('"custom"', '"power"') + TRAINING.replace('"logcosh"', '"power"')
    monkeypatch.setenv(PLUGINS_VARIABLE, str(written(tmp_path, text)))
    config = Composer("train").compose_config(
        ["model=power", "loss=power", "optimizer=sgd", "optimizer.schedule=power"]
    )
    assert (config.model.name, config.loss.name) == ("power", "power")


def test_one_model_may_derive_from_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide = "\n@dataclass\nclass Wide(MyModelConfig):\n    name: str = 'wide'\n    width: int = 64\n"
    base = MODEL.replace('    name: str = "custom"\n', "")
    for text, names in ((MODEL + wide, {"custom", "wide"}), (base + wide, {"wide"})):
        monkeypatch.setenv(PLUGINS_VARIABLE, str(written(tmp_path, text, f"{len(names)}.py")))
        assert set(find_plugins(OwnModelConfig, ())) == names
    assert Composer("train").compose_config(["model=wide"]).model.width == 64


Run = Callable[[list[str], Path, dict[str, str]], subprocess.CompletedProcess[str]]


def _in_a_new_interpreter(
    words: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command as `commands.run` does; its ranks find the plug-ins by themselves."""
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip


def _train(folder: Path, *overrides: str, run: Run = commands.run) -> None:
    words = ["python", str(ROOT / "train.py"), "model=custom", "experiment=fast", *overrides]
    environment = {**os.environ, PLUGINS_VARIABLE: "my_model.py", "WANDB_MODE": "disabled"}
    done = run([*words, *ALL, "trainer.dtype=float64", "data.grid=25x48"], folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr


def _forecast_without_its_loss(folder: Path, run: Path) -> None:
    """Export and forecast with only the model's file."""
    written(folder, MODEL, "only_model.py")
    environment = {**os.environ, PLUGINS_VARIABLE: "only_model.py"}
    for words in (
        ["checkpoint", "export", str(run)],
        ["forecast", f"checkpoint={run}", "init=2001-02-10", "lead=6h"],
    ):
        done = commands.run(["credit-dp", *words], folder, environment)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_train_py_is_exact_on_two_ranks_resumes_and_sweeps(tmp_path: Path) -> None:
    import torch

    from credit_dp.export.file import read_trained
    from credit_dp.training.checkpoint_files import list_checkpoints

    written(tmp_path, MODEL + TRAINING)
    states = []
    for ranks, start in ((1, commands.run), (2, _in_a_new_interpreter)):
        name = f"run.name=on{ranks}", f"parallel.domain={ranks}"
        _train(tmp_path, *name, "trainer.steps=3", run=start)
        weights = read_trained(str(tmp_path / f"outputs/on{ranks}")).weights
        states.append(torch.cat([weights[name].flatten() for name in sorted(weights)]))
    alone, sharded = states
    assert (sharded - alone).norm() <= 1e-10 * alone.norm()
    _train(tmp_path, "run.name=on2", "parallel.domain=1", "trainer.steps=4", "resume=auto")
    log = (tmp_path / "outputs/on2/metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in log[1:]] == ["1", "2", "3", "4"]
    _forecast_without_its_loss(tmp_path, tmp_path / "outputs/on2")
    sweep = "-m", "run.name=many", "model.width=2,4", "trainer.steps=1", "parallel.domain=1"
    _train(tmp_path, *sweep)
    assert list_checkpoints(tmp_path / "outputs/many/1/checkpoint")


def _rules_of_the_docs() -> str:
    """Return the file of the docs that adds a rule for a type and one for a function."""
    page = (ROOT / "docs/write-a-rule.md").read_text()
    return "# my_rules.py" + page.split("# my_rules.py", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize("layer", ["difference", "soften"])
def test_rules_of_a_plugin_are_used_and_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layer: str
) -> None:
    from credit_dp.cli.verify import verify_model
    from credit_dp.costs.budget import plan_step

    file = written(tmp_path, _rules_of_the_docs(), "my_rules.py")
    monkeypatch.setenv(PLUGINS_VARIABLE, str(file))
    words = ["model=with_rules", f"model.layer={layer}", "data.grid=13x16", "parallel.domain=3"]
    config = Composer("train").compose_config([*words, "data.batch_size=1"])
    report = plan_step(config).report
    assert report.problems == ()
    assert report.whole_calls == ()
    assert report.on_globe is (layer == "soften")
    verified = verify_model(config)
    assert verified.passed, verified.worst


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", ["difference", "soften"])
def test_train_py_uses_rules_of_a_plugin_on_two_ranks(tmp_path: Path, layer: str) -> None:
    import torch

    from credit_dp.export.file import read_trained

    written(tmp_path, _rules_of_the_docs(), "my_rules.py")
    environment = {**os.environ, PLUGINS_VARIABLE: "my_rules.py", "WANDB_MODE": "disabled"}
    states, outputs = [], []
    for ranks in (1, 2):
        words = ["python", str(ROOT / "train.py"), "model=with_rules", "experiment=fast"]
        words += [f"model.layer={layer}", f"run.name=on{ranks}", f"parallel.domain={ranks}"]
        words += ["trainer.steps=3", "trainer.dtype=float64", "data.grid=25x48"]
        done = _in_a_new_interpreter(words, tmp_path, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
        weights = read_trained(str(tmp_path / f"outputs/on{ranks}")).weights
        states.append(torch.cat([weights[name].flatten() for name in sorted(weights)]))
    alone, sharded = states
    assert (sharded - alone).norm() <= 1e-10 * alone.norm()
    assert "run whole on every rank" not in outputs[1]


RULE = f"""{HEAD}
from torch import nn
from credit_dp.domain_parallel.rules import register

class Own(nn.Conv2d):
    pass

RULES
@dataclass
class MyModelConfig(OwnModelConfig):
    name: str = "custom"

    def build(self, in_channels, out_channels, grid):
        return nn.Sequential(Own(in_channels, out_channels, 3, padding=1))
"""
WRONG_RULES = {
    "@register(Own)\ndef rule(layer):\n    return layer.nothing\n": (
        r"0: the rule of Own fails at .*my_model.py:\d+ \(AttributeError: .*'nothing'\)\. It"
    ),
    "@register(Own)\ndef rule(layer):\n    pass\n": (
        r"0: the rule of Own needs to return the module that replaces it, got None\.$"
    ),
    "@register(nn.Conv2d)\ndef rule(layer):\n    return layer\n": (
        r"register: Conv2d has a rule already, credit_dp.*\. Register a type of your own"
    ),
    "register(nn.functional.conv2d)(lambda layer: layer)\n": (
        r"register: needs a type of module or a custom operator, got conv2d\. Call an op"
    ),
    "register(Own)(lambda layer: layer)\nregister(Own)(lambda layer: None)\n": (
        r"register: Own has a rule already, \S+<lambda>, line \d+\. Register a type of your own"
    ),
    "register('mine')(lambda layer: layer)\n": (
        r"register: needs a type of module or a custom operator, got 'mine'\. Write @register\("
    ),
    "@register(3)\ndef rule(layer):\n    return layer\n": (
        r"register: needs a type of module or a custom operator, got 3\. Write @register\("
    ),
}


def test_a_wrong_rule_is_one_line(tmp_path: Path) -> None:
    files = {RULE.replace("RULES", rule): line for rule, line in WRONG_RULES.items()}
    assert_files_refused(tmp_path, files, "model=custom parallel.domain=2")


BROKEN = """
from torch import nn

@dataclass
class Broken(OwnModelConfig):
    name: str = "custom"

    def build(self, in_channels, out_channels, grid):
        {build}
"""


def broken_config(monkeypatch: pytest.MonkeyPatch, folder: Path, build: str, *words: str) -> Config:
    """Compose the config of a model that is built in this way."""
    folder.mkdir()
    monkeypatch.setenv(PLUGINS_VARIABLE, str(written(folder, HEAD + BROKEN.format(build=build))))
    return Composer("train").compose_config(["model=custom", *words])


def test_a_build_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for build, expected in {
        "return 3": r"model: Broken\.build has to return a torch\.nn\.Module, got int\.",
        "return 1 // 0": r"model: Broken\.build fails at .*my_model\.py:\d+ \(ZeroDivisionError",
        "return nn.Linear(3)": r"model: Broken\.build fails at .* \(TypeError: .*out_features",
    }.items():
        with forget_plugins():
            config = broken_config(monkeypatch, tmp_path / build.replace("/", ""), build).model
            with pytest.raises(UserError, match=expected):
                build_model(config, Fields.flat(2), (4, 6))


def test_plan_check_and_verify_refuse_what_a_run_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from credit_dp.cli.verify import verify_model
    from credit_dp.costs.budget import plan_step

    for build, expected in {
        "nn.Conv2d(in_channels, 1, 1)": (r"Conv2d needs to return \(2, 14, 24, 48\) for an input"),
        "nn.Conv2d(in_channels, out_channels, 3)": (
            r"got \(2, 14, 22, 46\)\. It has to return one"
        ),
        "nn.Conv2d(1, out_channels, 1)": (
            r"Conv2d\.forward fails at .* \(RuntimeError: Given group"
        ),
        "nn.LazyConv2d(out_channels, 1)": (r"model: weight has no values: it is of a lazy layer"),
        "nn.AvgPool2d(3, 1, 1)": r"model: AvgPool2d has no parameters to train",
    }.items():
        words = ["data.grid=24x48", "parallel.domain=2"]
        with forget_plugins():
            config = broken_config(monkeypatch, tmp_path / build, f"return {build}", *words)
            for use in (plan_step, verify_model) if "Lazy" in build else (plan_step,):
                with pytest.raises(UserError, match=expected):
                    use(config)


def test_a_config_without_build_is_one_line() -> None:
    with pytest.raises(UserError, match=r"OwnModelConfig has no build\. It needs a method"):
        build_model(OwnModelConfig("custom"), Fields.flat(2), (4, 6))


def test_a_check_of_the_users_own_is_one_line(tmp_path: Path) -> None:
    check = "\n    def __post_init__(self):\n        raise ValueError('too much')\n"
    text = TRAINING.replace("    momentum: float = 0.9\n", f"    momentum: float = 0.9\n{check}")
    for name, file, choice, line in (
        ("a.py", MODEL + check, "model=custom", "^model: ValueError: too much$"),
        ("b.py", text, "optimizer=sgd", "^optimizer: ValueError: too much$"),
        ("c.py", TRAINING + check, ALL[2], "^optimizer.schedule_options: ValueError: too much$"),
    ):
        with forget_plugins():
            assert_refused_with(written(tmp_path, file, name), {choice: line})
