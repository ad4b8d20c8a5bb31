"""Who else can reach a job's rendezvous, and the warnings about it."""

from __future__ import annotations

import socket
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshcomm.config import ProcessConfig
from meshcomm.rendezvous import exposure
from meshcomm.rendezvous.exposure import ExposedRendezvous
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import meet
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_torchs_store_listens_everywhere_and_ours_on_the_loopback() -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert exposure.listening(theirs.port) in (["::"], ["0.0.0.0"])
    port = free_port()
    ours = exposure.serve_on_loopback("127.0.0.1", port, timedelta(seconds=10))
    assert ours is not None and exposure.listening(port) == ["127.0.0.1"]
    assert exposure.exposed_store("127.0.0.1", port, "x", 2) is None
    # If the port is taken or the address is not the loopback, torch decides.
    assert exposure.serve_on_loopback("127.0.0.1", port, timedelta(seconds=10)) is None
    assert exposure.serve_on_loopback("10.0.0.7", port, timedelta(seconds=10)) is None


def test_a_job_by_tcp_on_one_host_is_not_reachable_and_warns_of_nothing() -> None:
    port = free_port()
    place = ProcessConfig(init="tcp", address=f"127.0.0.1:{port}", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = meet(place, Launch("single", 0, 1, 0, 1), 20)
    assert exposure.listening(port) == ["127.0.0.1"]
    joined.store.set("key", "value")
    assert joined.store.get("key") == b"value"


def everywhere() -> str:
    """The address at which torch's store listens. It depends on whether this system has IPv6."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (found,) = exposure.listening(store.port) or []
    return found


def own_name() -> str:
    """The name of this host. Skips the test if the name does not resolve."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        pytest.skip(f"the name of this host, {name}, leads nowhere: {error}")
    return name


def test_a_store_that_others_reach_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    name = own_name()
    port = free_port()
    place = ProcessConfig(init="tcp", address=f"{name}:{port}", rank=0, world_size=1)
    with pytest.warns(ExposedRendezvous) as caught:
        joined = meet(place, Launch("single", 0, 1, 0, 1), 20)
    assert [str(each.message) for each in caught] == [
        f"others can reach the job's store at {name}:{port}, though all its ranks are on this host: "
        f'process.address = "127.0.0.1:{port}", or see meshcomm doctor'
    ]
    # The doctor prints the whole finding.
    assert str(exposure.exposed_store(name, port, "MASTER_ADDR=127.0.0.1", 1)) == (
        f"others can reach the job's store at {name}:{port}, though its one rank is on this host\n"
        f"  given:    {name}:{port}; it listens on {everywhere()}\n"
        "  expected: an address that only this host can reach, 127.0.0.1: torch's TCPStore has no authentication,\n"
        "            so anyone who reaches it can read and change everything that the ranks exchange\n"
        "  try:      MASTER_ADDR=127.0.0.1"
    )
    del joined


def test_a_job_on_several_hosts_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = ProcessConfig(init="tcp", address=f"{own_name()}:{free_port()}", rank=0, world_size=1)
    # One process runs here, and the number on other hosts is unknown.
    meet(place, Launch("torchrun", 0, 1, 0, 2), 20)


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o1777, False), (0o755, False), (0o775, False)])
def test_a_rendezvous_file_that_all_can_replace(tmp_path: Path, mode: int, warned: bool) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    place = ProcessConfig(init="file", path=str(folder / "meet"), rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meet(place, Launch("single", 0, 1, 0, 1), 20)
    texts = [str(each.message) for each in caught if each.category is ExposedRendezvous]
    assert texts == (
        [
            f"any user can replace the rendezvous file {folder}/meet\n"
            f"  given:    the folder {folder} with mode 0777\n"
            "  expected: a folder that others cannot write to, or one with the sticky bit, like /tmp\n"
            f"  try:      chmod o-w {folder}, or another process.path"
        ]
        if warned
        else []
    )
