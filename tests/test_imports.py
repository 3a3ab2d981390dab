"""Each module imports what it uses: nothing works only because another one has imported it.

`import torch` makes some of torch's submodules attributes of it, and others not, as
`torch._functorch.config`. Those are there only if something else in the process has imported them,
as the processes do from which tests fork ranks and commands.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import credit_dp
from tests.ranks import TIMEOUT

# Imports the packages alone, then looks for attributes as the modules do.
FIND_MISSING = """
import importlib, json, sys
for name in sorted({name.split(".")[0] for name in sys.argv[1:]}):
    importlib.import_module(name)
missing = []
for name in sys.argv[1:]:
    module, *parts = name.split(".")
    found = sys.modules[module]
    for part in parts:
        found = vars(found).get(part)  # `getattr` would make torch import some of its own late
        if found is None:
            break
    if found is None:
        missing.append(name)
print(json.dumps(missing))
"""


def _used_without_import(tree: ast.Module) -> Iterator[str]:
    """Yield the submodules that a module uses as attributes, as `torch.fft`, and imports nowhere.

    What it imports under another name is looked up where it is imported.
    """
    imported = set()
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                imported |= {".".join(parts[: i + 1]) for i in range(len(parts))}
                packages |= set() if alias.asname else {parts[0]}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            imported |= {".".join(parts[: i + 1]) for i in range(len(parts))}
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            parts = name.split(".")
            is_used = parts[0] in packages and all(part.isidentifier() for part in parts)
            if is_used and name not in imported and _is_module(name):
                yield name


@lru_cache(None)
def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


@pytest.mark.slow
def test_modules_import_what_they_use():
    users: dict[str, str] = {}
    for path in Path(credit_dp.__file__).parent.rglob("*.py"):
        for name in _used_without_import(ast.parse(path.read_text())):
            users[name] = str(path)
    assert {"torch.fft", "torch.cuda"} <= users.keys()
    command = [sys.executable, "-c", FIND_MISSING, *users]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert {name: users[name] for name in json.loads(done.stdout)} == {}
