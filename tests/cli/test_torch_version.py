"""Which releases of torch are refused, and of which a command warns."""

import importlib.metadata

import pytest

from tests.cli.invocation import answer


def _answer_with(
    version: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0
) -> tuple[int, str, str]:
    versions = {"torch": version}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return answer(monkeypatch, "--help")


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cpu"])
def test_an_old_torch_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = _answer_with(version, monkeypatch)
    assert (code, out) == (2, "")
    assert err == (
        f"error: torch: needs 2.11 or newer, got {version}. Run `pip install 'torch>=2.11'`.\n"
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3+cu132", "built here"])
def test_a_torch_that_was_tested_is_not_mentioned(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _answer_with(version, monkeypatch)
    assert (code, err) == (0, "")
    assert out


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0a0+git12"])
def test_one_rank_warns_of_a_torch_that_is_newer(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for rank in (0, 1):
        code, _, err = _answer_with(version, monkeypatch, rank)
        assert code == 0
        lines += err.splitlines()
    assert lines == [
        f"warning: torch {version} is newer than 2.15, the newest that was tested. "
        "`credit-dp doctor` checks that sharding works with it."
    ]
