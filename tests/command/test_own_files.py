"""A model in a file that CREDIT_DP_MODELS names: chosen, checked, sent to ranks, and trained."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from credit_dp.command import own_models
from credit_dp.command.compose import Composer
from credit_dp.command.own_files import VARIABLE
from credit_dp.config import OwnModelConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.command.answers import answer, refusal

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


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is gone after it."""
    models, modules = ConfigStore.instance().repo.setdefault("model", {}), set(sys.modules)
    known = dict(models)
    yield
    models.clear()
    models.update(known)
    for name in set(sys.modules) - modules:
        if name.startswith("credit_dp.command.own_files."):
            del sys.modules[name]


def told(monkeypatch: pytest.MonkeyPatch, variable: object, *arguments: str) -> str:
    """The refusal of a command line, with the variable set."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, str(variable))
        return refusal(monkeypatch, "--check", *arguments)


def written(folder: Path, text: str, name: str = "my_model.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_the_variable_makes_the_model_a_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = [
        written(tmp_path, MODEL),
        written(tmp_path, MODEL.replace('"custom"', '"other"'), "my.2nd-model"),
    ]
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, two)))
    composer = Composer("train")
    assert {"custom", "other", "unet"} <= set(composer.groups["model"])
    config = composer.config(["model=custom", "model.width=4", "model.layer.kernel=5"])
    assert isinstance(config.model, OwnModelConfig)
    assert vars(config.model) | {"layer": None} == {
        **{"name": "custom", "frames": 1, "residual": True},
        **{"width": 4, "layer": None, "weights": {}},
    }
    assert config.model.layer.kernel == 5
    assert composer.config(["model=other"]).model.name == "other"
    model = config.model.build(3, 2, (8, 16))
    assert model[0].weight.shape == (4, 3, 5, 5)


def test_a_process_with_the_variable_unpickles_the_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(written(tmp_path, MODEL)))
    config = Composer("train").config(["model=custom", "model.layer.kernel=5"])
    sent = tmp_path / "config.pickle"
    sent.write_bytes(pickle.dumps(config))
    code = (
        "import pickle, sys; config = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert (config.model.name, config.model.layer.kernel) == ('custom', 5)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, sent], cwd=ROOT, check=True, timeout=60)


def test_its_keys_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = written(tmp_path, MODEL)
    for arguments, needed in {
        ("model.widht=4",): "model.widht: no such key. Did you mean model.width?",
        ("model.width=wide",): "model.width: needs an integer, got 'wide'",
        ("model.channels=[8]",): "model.channels: no such key of this model.",
        ("model.layer.kernle=3",): "model.layer.kernle: no such key. Did you mean model.layer.k",
        ("model.frames=0",): "model.frames: needs an integer of at least 1, got 0",
    }.items():
        assert told(monkeypatch, file, "model=custom", *arguments).startswith(needed)


@pytest.mark.parametrize("program", ["train", "credit-dp"])
def test_a_sweep_and_tables_of_new_entries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    arguments = ["model=custom", "model.weights.a=2", "--check", "--multirun", "model.width=4,8"]
    if program == "credit-dp":
        arguments = ["plan", "--json", *arguments[:2], "data.grid=8x16", "parallel.domain=2"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, str(written(tmp_path, MODEL)))
        code, out, err = answer(monkeypatch, *arguments, program=program)
    assert (code, err) == (0, "")
    assert ("of all 2 runs" if program == "train" else '"model": "custom"') in out


def test_without_the_variable_the_line_says_how_to_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = told(monkeypatch, "", "model=custom")
    assert line.startswith("model: needs one of crossformer, ")
    assert line.endswith(f"got 'custom'. A model of your own is known by its file: set {VARIABLE}="
                         "my_model.py.")  # fmt: skip


def _named(name: str, of: str = "MyModelConfig") -> str:
    return MODEL.replace('"custom"', f'"{name}"').replace("MyModelConfig", of)


BAD = {
    "syntax": ("import os\ndef f(:\n", r"my_model.py, line 2: SyntaxError: invalid syntax"),
    "import": ("\n\nimport nope", r"my_model.py, line 3: ModuleNotFoundError: No module named"),
    "failure": ("def f():\n    1 / 0\n\nf()", r"my_model.py, line 2: ZeroDivisionError: division"),
    "no model": ("import torch.nn", r"my_model.py has no model. It needs a dataclass that"),
    "imported only": (HEAD, r"my_model.py has no model. It needs a dataclass that"),
    "two of one name": (MODEL + _named("custom", "B"), r"MyModelConfig and B are both named 'cust"),
    "name of ours": (_named("pangu"), r"named 'pangu', as a model of this package is. Give it an"),
    "name of a preset": (_named("unet_base"), r"named 'unet_base', as a model of this package is"),
    "no name": (MODEL.replace('    name: str = "custom"\n', ""), r"a field `name: str = .*None"),
    "name without a type": (MODEL.replace("name: str", "name"), r"needs a field `name: str = ...`"),
    "name with a space": (_named("my model"), r"letters, digits, _ and -, got 'my model'"),
    "hidden name": (_named("schema_mine"), r"needs a field `name: str"),
    "not a dataclass": (
        f"{HEAD}\nclass Mine(OwnModelConfig):\n    name: str = 'mine'\n",
        r"Mine in .*my_model.py is no dataclass. Write @dataclass above it.",
    ),
    "a type that YAML has not": (
        MODEL.replace("width: int = 8", "width: object = object()"),
        r"model=custom: the fields of MyModelConfig need types that YAML has \(Unexpected type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: tuple[str, str]
) -> None:
    text, needed = case
    with pytest.raises(AssertionError, match=needed):
        raise AssertionError(told(monkeypatch, written(tmp_path, text)))


def test_no_file_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = told(monkeypatch, "nowhere.py")
    assert line == f"{VARIABLE}: there is no file nowhere.py. Give the path of a Python file."
    assert "there is no file" in told(monkeypatch, tmp_path)


def test_a_name_of_an_installed_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_models, "own_models", lambda: {"custom": OwnModelConfig})
        line = told(monkeypatch, written(tmp_path, MODEL))
    assert "named 'custom', as a model of the entry point of OwnModelConfig is." in line


def test_one_model_may_derive_from_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide = "\n@dataclass\nclass Wide(MyModelConfig):\n    name: str = 'wide'\n    width: int = 64\n"
    base = MODEL.replace('    name: str = "custom"\n', "")
    for text, names in ((MODEL + wide, {"custom", "wide"}), (base + wide, {"wide"})):
        monkeypatch.setenv(VARIABLE, str(written(tmp_path, text, f"{len(names)}.py")))
        assert set(own_models.all_own_models(())) == names
    assert Composer("train").config(["model=wide"]).model.width == 64


def _train(folder: Path, *overrides: str) -> str:
    command = [sys.executable, ROOT / "train.py", "model=custom", "experiment=fast", *overrides]
    environment = {**os.environ, VARIABLE: "my_model.py", "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [*map(str, command), "trainer.dtype=float64", "data.grid=25x48"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_py_is_exact_on_two_ranks_resumes_and_sweeps(tmp_path: Path) -> None:
    import torch

    from credit_dp.export.trained import read_trained
    from credit_dp.training.checkpoint_files import whole_steps

    written(tmp_path, MODEL)
    states = []
    for ranks in (1, 2):
        name = f"run.name=on{ranks}", f"parallel.domain={ranks}"
        _train(tmp_path, *name, "trainer.steps=3")
        weights = read_trained(str(tmp_path / f"outputs/on{ranks}")).weights
        states.append(torch.cat([weights[name].flatten() for name in sorted(weights)]))
    alone, sharded = states
    assert (sharded - alone).norm() <= 1e-10 * alone.norm()
    _train(tmp_path, "run.name=on2", "parallel.domain=2", "trainer.steps=4", "resume=auto")
    log = (tmp_path / "outputs/on2/metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in log[1:]] == ["1", "2", "3", "4"]
    sweep = "-m", "run.name=many", "model.width=2,4", "trainer.steps=1", "parallel.domain=2"
    _train(tmp_path, *sweep)
    assert whole_steps(tmp_path / "outputs/many/1/checkpoint")


BROKEN = """
from torch import nn

@dataclass
class Broken(OwnModelConfig):
    name: str = "custom"

    def build(self, in_channels, out_channels, grid):
        {build}
"""


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ("return 3", r"model: Broken\.build has to return a torch\.nn\.Module, got int\."),
        ("return 1 // 0", r"model: Broken\.build fails at .*my_model\.py:\d+ \(ZeroDivisionError"),
        ("return nn.Linear(3)", r"model: Broken\.build fails at .* \(TypeError: .*out_features"),
    ],
)
def test_a_build_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, expected: str
) -> None:
    monkeypatch.setenv(VARIABLE, str(written(tmp_path, HEAD + BROKEN.format(build=build))))
    config = Composer("train").config(["model=custom"]).model
    with pytest.raises(UserError, match=expected):
        build_model(config, Fields.flat(2), (4, 6))


def test_a_config_without_build_is_one_line() -> None:
    with pytest.raises(UserError, match=r"OwnModelConfig has no build\. It needs a method"):
        build_model(OwnModelConfig("custom"), Fields.flat(2), (4, 6))


def test_a_check_of_the_users_own_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = MODEL + "\n    def __post_init__(self):\n        raise ValueError('eight is too wide')\n"
    found = told(monkeypatch, written(tmp_path, text), "model=custom")
    assert found.startswith("model: ValueError: eight is too wide")


def test_a_file_that_exits_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = told(monkeypatch, written(tmp_path, "import sys\nsys.exit(3)\n"), "model=custom")
    assert found.endswith("line 2: SystemExit: 3")
