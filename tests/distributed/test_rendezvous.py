"""Ranks that can't meet: one line of ours, and none of torch's."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from credit_dp.distributed import worker
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.worker import join_rendezvous
from credit_dp.errors import UserError
from tests.distributed.processes import free_port

SOON = timedelta(milliseconds=500)


def join(rank: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join a run of two ranks, in which each waits for a key that is never written."""
    monkeypatch.setattr(worker, "GROUP_TIMEOUT", SOON)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    join_rendezvous("env://", RankInfo(rank, 2, rank, 2), lambda store: store.wait(["never"], SOON))


def refusal(rank: int, port: int, reason: str) -> str:
    return (
        rf"^MASTER_ADDR: rank {rank} does not meet all 2 ranks at 127\.0\.0\.1:{port} "
        rf"\(.*{reason}.*\)\. Start all ranks, and set MASTER_ADDR to the host of rank 0 and "
        r"MASTER_PORT to a free port there, the same on all ranks\.$"
    )


@pytest.fixture
def nothing_said(capfd: pytest.CaptureFixture[str]) -> object:
    yield
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("nothing_said")
def test_a_rank_0_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(UserError, match=refusal(1, port, "refused")):
        join(1, port, monkeypatch)


@pytest.mark.usefixtures("nothing_said")
def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(UserError, match=refusal(0, port, "1/2 clients joined")):
        join(0, port, monkeypatch)


@pytest.mark.usefixtures("nothing_said")
def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that has come after the port was found free."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=refusal(0, port, "address already in use")):
            join(0, port, monkeypatch)


def test_a_rank_that_does_not_come_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent serves the store, so that each rank waits for the others itself."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for rank in (0, 1):
        with pytest.raises(UserError, match=refusal(rank, agent.port, "wait timeout after 500ms")):
            join(rank, agent.port, monkeypatch)


@pytest.mark.usefixtures("nothing_said")
def test_an_agent_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when rank 0 has failed while it started: nobody waits for 10 minutes."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: pytest.fail("waits for it"))
    port = free_port()
    with pytest.raises(UserError, match=refusal(1, port, "refused")):
        join(1, port, monkeypatch)


def test_other_errors_are_no_mistake_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the connection to a rank 0 that is killed before all ranks have met."""

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    for error in (RuntimeError("a mistake of ours"), DistNetworkError("Connection reset by peer")):

        def fail(store: object, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            join_rendezvous("env://", RankInfo(1, 2, 1, 2), fail)
