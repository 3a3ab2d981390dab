"""The layout of the tests: folders mirror the package, and no module imports a test module."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "credit_dp"
WITHOUT_COUNTERPART = {"docs", "slurm", "zoo"}  # pages, a cluster, other packages


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)


def imported_modules(path: Path) -> set[str]:
    """Return the absolute names that a file imports anywhere, with those of its `from` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".")[: -node.level] if node.level else []
            module = ".".join([*package, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.slow
def test_no_module_imports_a_test_module() -> None:
    modules = sorted(TESTS.rglob("*.py"))
    tests = {module_name(path) for path in modules if path.name.startswith("test_")}
    found = {module_name(path): imported_modules(path) & tests for path in modules}
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_folders_are_those_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    folders = {
        path for path in folders if path.parts[:1] not in {(n,) for n in WITHOUT_COUNTERPART}
    }
    assert [str(path) for path in sorted(folders) if not (PACKAGE / path).is_dir()] == []
