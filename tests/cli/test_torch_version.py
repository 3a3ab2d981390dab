"""Which releases of torch are refused, and of which a command warns."""

import importlib.metadata

import pytest

from tests.cli.invocation import answer

WARNING = (
    "warning: torch {} is newer than 2.15, the newest that was tested. `credit-dp doctor` checks "
    "that sharding works with it.\n"
)


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
    return answer(monkeypatch, "--help", program="credit-dp")


def test_an_old_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.1", "1.13.0+cpu"):
        assert _answer_with(version, monkeypatch) == (
            2,
            "",
            f"error: torch: needs 2.11 or newer, got {version}. Run `pip install 'torch>=2.11'`.\n",
        )


def test_only_one_rank_warns_and_only_of_a_torch_that_is_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in ("2.11.0", "2.15.3+cu132", "built here"):
        code, out, err = _answer_with(version, monkeypatch)
        assert (code, bool(out), err) == (0, True, ""), version
    for version in ("2.16.0", "3.0.0a0+git12"):
        for rank in (0, 1):
            code, _, err = _answer_with(version, monkeypatch, rank)
            assert (code, err) == (0, "" if rank else WARNING.format(version))
