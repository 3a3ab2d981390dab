"""Private names of other libraries stand in one module for each, and do there what they are for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig
from torch import Tensor, nn
from xarray import DataArray, Dataset
from zarr.storage import MemoryStore

import credit_dp
from credit_dp.cli.compose import UserConfigSource
from credit_dp.cli.hydra_private import (
    ConfigLoaderImpl,
    FileConfigSource,
    Hydra,
    create_config_search_path,
)

PACKAGE = Path(credit_dp.__file__).parent
PLACES = {"torch_private.py", "cli/hydra_private.py"}
# Of the standard library: documented, or needed to end a process and to look at its frames.
PYTHON = {
    *("_replace", "_asdict", "_fields", "_make"),
    *("_exit", "_getframe", "_current_frames", "_run_finalizers"),
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def _names_of_libraries() -> set[str]:
    objects = (
        *(Tensor, nn.Module, nn.Module(), torch.UntypedStorage, torch.ops.aten.add.Tensor),
        *(DictConfig, ListConfig, MemoryStore, Dataset, DataArray),
    )
    return {name for x in objects for name in dir(x) if _is_private(name)}


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Return the private names that the package defines itself."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
    return names


def _private_uses(tree: ast.Module, own: set[str], foreign: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of another library's private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            is_ours = module.split(".")[0] == "credit_dp" or getattr(node, "level", 0)
            used = [] if is_ours else [x for x in names if any(map(_is_private, x.split(".")))]
            yield from ((node.lineno, name) for name in used)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_operator = owner.startswith("torch.ops.")  # has no other name
            is_known = node.attr in PYTHON or (
                node.attr in own and (node.attr not in foreign or owner in ("self", "cls"))
            )
            if _is_private(node.attr) and not is_operator and not is_known:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("getattr", "hasattr", "setattr", "delattr"),
        ):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _is_private(name) and (name in foreign or name not in own | PYTHON):
                yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_private_names_of_libraries_stand_in_one_module_for_each():
    paths = sorted(PACKAGE.rglob("*.py"))
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}
    own, foreign = _own_names(list(trees.values())), _names_of_libraries()
    uses = {name: list(_private_uses(tree, own, foreign)) for name, tree in trees.items()}
    assert {name for name, found in uses.items() if found} == PLACES, uses


def test_each_kind_of_use_is_found():
    uses = (
        "from torch._subclasses import FakeTensor",
        "import torch._dynamo",
        "from hydra._internal import utils",
        "torch._C._is_alias_of(a, b)",
        "torch._foreach_add_(a, b)",
        "self.model._buffers",
        "x._version",
        "node._metadata",
        "store._store_dict",
        "super()._apply(f)",
        "getattr(key, '_opoverload', key)",
    )
    foreign = _names_of_libraries()
    for code in uses:
        found = list(_private_uses(ast.parse(code), {"_version", "_apply"}, foreign))
        assert {line for line, _ in found} == {1}, code


def test_names_of_our_own_and_operators_are_no_uses():
    code = "self._version\nx._mine\ntorch.ops.aten._softmax\nfrom credit_dp.rules import _mine\n"
    assert not list(_private_uses(ast.parse(code), {"_version", "_mine"}, _names_of_libraries()))


# ---------------------------------------------------------------- Hydra


def _loader(folder: Path) -> ConfigLoaderImpl:
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("defaults: [_self_, {model: small}]\nsteps: 3\n")
    (folder / "model" / "small.yaml").write_text("width: 8\n")
    (folder / "model" / "large.yaml").write_text("width: 16\n")
    return ConfigLoaderImpl(create_config_search_path(f"file://{folder}"))


def test_runs_would_not_get_what_files_and_overrides_say(tmp_path):
    loader = _loader(tmp_path / "conf")
    composed = loader.load_configuration("config", ["model=large", "steps=5"], RunMode.RUN)
    assert (composed.steps, composed.model.width) == (5, 16)


def test_choices_of_a_group_would_not_be_listed(tmp_path):
    repository = _loader(tmp_path / "conf").repository
    assert {"large", "small"} <= set(repository.get_group_options("model", ObjectType.CONFIG))


def test_own_folders_would_not_come_first(tmp_path):
    path = create_config_search_path(f"file://{tmp_path}")
    assert isinstance(path, ConfigSearchPath)
    path.prepend("user", "user:///mine", anchor="main")
    providers = [element.provider for element in path.get_path()]
    assert providers.index("user") < providers.index("main")


def test_a_foreign_config_file_would_be_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "other.yaml").write_text("b: 2\n")
    address = f"user://{tmp_path}"
    Plugins.instance().register(UserConfigSource)
    ours, plain = UserConfigSource("user", address), FileConfigSource("main", f"file://{tmp_path}")
    assert [source.is_config("config") for source in (ours, plain)] == [False, True]
    assert ours.load_config("other").config == {"b": 2}


def test_configs_would_not_be_shown(tmp_path, capsys):
    hydra = Hydra("job", _loader(tmp_path / "conf"))
    hydra.show_cfg("config", ["steps=7"], "job", None, False)
    assert "steps: 7" in capsys.readouterr().out
