"""The version of the code that a run records."""

import subprocess

import pytest

from credit_dp.training import run_folder
from credit_dp.training.run_folder import provenance, provenance_text


def git(folder, *arguments):
    own = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *own, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that passes for the package's."""
    folder = tmp_path / "project" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(run_folder, "PACKAGE", folder)
    provenance.cache_clear()
    yield folder
    provenance.cache_clear()


@pytest.fixture
def checkout(package):
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return package


def test_a_commit_without_changes(checkout, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    found = provenance()
    monkeypatch.delenv("GIT_DIR")
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert found["changed"] == "no"
    assert "diff" not in provenance_text()


def test_changes_are_a_patch(checkout, tmp_path):
    binary = checkout / "field.bin"
    binary.write_bytes(bytes(range(256)))
    git(checkout.parent, "add", str(binary))
    (checkout / "__init__.py").write_text("one = 2\n")
    (checkout / "new.py").touch()
    assert provenance()["changed"] == "yes"
    text = provenance_text()
    assert "not in git: new.py\n" in text
    patch = tmp_path / "code.diff"
    patch.write_text(text)
    git(checkout.parent, "reset", "-q", "--hard")
    git(checkout.parent, "apply", str(patch))
    assert (checkout / "__init__.py").read_text() == "one = 2\n"
    assert binary.read_bytes() == bytes(range(256))


def test_a_patch_whatever_the_user_has_set(checkout, tmp_path):
    for key, value in (("noprefix", "true"), ("relative", "true"), ("context", "0")):
        git(checkout.parent, "config", f"diff.{key}", value)
    changed = "zero = 0\none = 1\n"
    (checkout / "__init__.py").write_text(changed)
    patch = tmp_path / "code.diff"
    patch.write_text(provenance_text())
    git(checkout.parent, "checkout", "-q", "package/__init__.py")
    git(checkout.parent, "apply", str(patch))
    assert (checkout / "__init__.py").read_text() == changed


def test_a_long_difference_is_cut(checkout, monkeypatch):
    monkeypatch.setattr(run_folder, "MAX_PATCH_CHARACTERS", 200)
    (checkout / "__init__.py").write_text("two = 2\n" * 1000)
    text = provenance_text()
    assert "the first 200 follow" in text
    assert len(text) < 1000


def test_a_package_that_git_does_not_know(package, monkeypatch):
    assert set(provenance()) == {"credit_dp", "torch", "python"}
    git(package.parent, "init", "-q")  # a project of the user's, with the package in its folder
    provenance.cache_clear()
    assert "commit" not in provenance()
    assert "commit" not in provenance_text()
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    provenance.cache_clear()
    assert "commit" in provenance()
    provenance.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")  # no git
    assert "commit" not in provenance()
