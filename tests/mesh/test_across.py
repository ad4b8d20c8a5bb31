"""A mesh over the processes of two jobs: both own meshes stay usable, and a loss on either side is named."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CallMismatchError, LaunchError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.across import across
from meshcomm.rendezvous.job_store import find_common_store
from meshcomm.rendezvous.processes import is_stopped, process_name
from meshcomm.testing import Pool
from tests.ports import free_port
from tests.two_jobs import OPENS_S, Place, client, error_of, run, values

pytestmark = pytest.mark.long


def sum_along(mesh: Mesh, dim: str, value: float) -> float:
    return float(mesh.all_reduce(dim, torch.tensor([value])))


def exchanged(place: Place) -> None:
    """Every message arrives both ways, between calls on the own mesh, whose default group ends before the link."""
    mine = torch.arange(5.0) + 10 * place.number
    with place.mesh() as own:
        link = across(place.shared, "policy/1", place.number, 4, OPENS_S)
        assert (link.rank, link.dims, link.world_size, link.label) == (
            place.number,
            {"link": 4},
            4,
            f"rank {place.number} (link={place.number})",
        )
        peer = (place.number + 2) % 4
        for turn in range(3):
            out = torch.empty(5)
            if place.number < 2:
                link.send("link", mine + turn, peer)
                link.recv("link", out, src=peer)
            else:
                link.recv("link", out, src=peer)
                link.send("link", mine + turn, peer)
            assert torch.equal(out, torch.arange(5.0) + 10 * peer + turn)
            assert sum_along(own, "dp", 1.0 + place.number) == (3.0 if place.number < 2 else 7.0)
            assert sum_along(link, "link", 1.0 + place.number) == 10.0
        assert "all_reduce" in str(link.stats()) and "send" in str(link.stats())
        assert not any("across" in str(name) for name in dist.distributed_c10d._world.pg_names.values())
        with pytest.raises(UnsupportedOp, match="no DeviceMesh"):
            link["link"]
        with pytest.raises(LaunchError, match="was opened before"):
            across(place.shared, "policy/1", place.number, 4, OPENS_S)
    assert not dist.is_initialized() and sum_along(link, "link", 2.0) == 8.0
    with pytest.raises(CallMismatchError) as raised:
        link.all_reduce("link", torch.ones(3 if place.number == 1 else 2))
    assert raised.value.mismatched_ranks == (1,) and not raised.value.of_job
    link.close()


def test_messages_pass_both_ways_beside_the_own_meshes_and_after_them(pool: Pool, tmp_path: Path) -> None:
    values(run(pool, tmp_path, exchanged, source=2, target=2))


def without_group(place: Place) -> None:
    """The target has no default group when the link opens, and opens its own mesh later."""
    own = place.mesh() if place.job == "source" else None
    with across(place.shared, "policy/1", place.number, 4, OPENS_S) as link:
        assert sum_along(link, "link", 1.0) == 4.0
        if own is None:
            assert not dist.is_initialized()
            own = place.mesh()
        assert sum_along(own, "dp", 1.0) == 2.0 and sum_along(link, "link", 1.0) == 4.0
        own.close()
        assert sum_along(link, "link", 1.0) == 4.0


def test_a_job_needs_no_default_group(pool: Pool, tmp_path: Path) -> None:
    values(run(pool, tmp_path, without_group, source=2, target=2))


def lost(place: Place, victim: int, sign: int, timeout_s: float, port: int) -> Any:
    """The process `victim` is lost. Returns the others' error, and what they do afterwards. port: rank 0 serves the link's store."""
    own = place.mesh()
    own.warm_up()
    store = place.shared
    if port:
        store = find_common_store(
            "127.0.0.1", port, "", store.timeout, serves=place.number == 0, in_vain=bool
        )
    link = across(store, "policy/1", place.number, 4, timeout_s)
    link.warm_up()
    place.tell("warm")
    place.until("warm", *range(4))
    if place.number == victim:
        os.kill(os.getpid(), sign)
    found = error_of(partial(sum_along, link, "link", 1.0))
    link.close()
    of_victim = (victim < 2) == (place.number < 2)
    if not of_victim:
        assert sum_along(own, "dp", 1.0) == 2.0
    others = [number for number in range(4) if number != victim]
    with across(place.shared, "policy/2", others.index(place.number), 3, OPENS_S) as again:
        assert sum_along(again, "link", 1.0) == 3.0
    if not of_victim:
        assert sum_along(own, "dp", 1.0) == 2.0
        own.close()
    place.tell("over")
    if place.number == others[0]:
        place.until("over", *others)
        (process,) = place.until("warm", victim)
        if sign == signal.SIGSTOP:
            os.kill(process, signal.SIGKILL)
    return found


@pytest.mark.parametrize(("victim", "served"), [(1, False), (2, False), (0, True)])
def test_a_loss_on_either_side_is_named_on_both(
    pool: Pool, tmp_path: Path, victim: int, served: bool
) -> None:
    port = free_port() if served else 0
    ended = run(pool, tmp_path, lost, victim, signal.SIGKILL, 20.0, port, source=2, target=2)
    assert ended.pop(victim).state == "died"
    for kind, text, missing, seconds in values(ended):
        # Gloo may lose a call whose connection breaks while it is written: it ends at the timeout.
        assert kind == "PeerLost" and missing == (victim,) and seconds < 40, text
        assert f"rank {victim}" in text and "(link=" in text


@pytest.mark.faults
@pytest.mark.parametrize(("victim", "served"), [(1, False), (3, False), (0, True)])
def test_a_stopped_process_is_named_after_the_timeout_and_ends_no_other(
    pool: Pool, tmp_path: Path, victim: int, served: bool
) -> None:
    port = free_port() if served else 0
    ended = run(pool, tmp_path, lost, victim, signal.SIGSTOP, 10.0, port, source=2, target=2)
    assert ended.pop(victim).state == "died"
    for kind, text, missing, seconds in values(ended):
        assert kind == "PeerLost" and missing == (victim,) and seconds < 25, text


def stopped(place: Place, port: int) -> Any:
    """The process that serves the store stops while the other one waits for it."""
    if place.number == 0:
        store = find_common_store(
            "127.0.0.1", port, "", timedelta(seconds=OPENS_S), serves=True, in_vain=bool
        )
        place.tell("serves")
        place.until("connected", 1)
        os.kill(os.getpid(), signal.SIGSTOP)
        return store
    (process,) = place.until("serves", 0)
    store = client(port)
    place.tell("connected")
    while not is_stopped(process_name(process)):
        time.sleep(0.02)
    with patch("meshcomm.mesh.across._TELLS_S", 1.0):
        found = error_of(lambda: across(store, "policy/1", 1, 2, 1.0))
    os.kill(process, signal.SIGKILL)
    return found


@pytest.mark.faults
def test_a_store_that_stops_while_a_link_opens_is_not_waited_for(pool: Pool, tmp_path: Path) -> None:
    server, waiter = run(pool, tmp_path, stopped, free_port(), source=1, target=1)
    (found,) = values([waiter])
    assert server.state == "died" and found[0] == "StoreError" and found[3] < 5, found


def incomplete(place: Place) -> Any:
    own = place.mesh()
    found = None
    if place.number != 2:
        found = error_of(lambda: across(place.shared, "policy/1", place.number, 4, 4.0))
    assert sum_along(own, "dp", 1.0) == 2.0
    with across(place.shared, "policy/2", place.number, 4, OPENS_S) as link:
        assert sum_along(link, "link", 1.0) == 4.0
    own.close()
    return found


def test_a_process_that_does_not_come_is_named(pool: Pool, tmp_path: Path) -> None:
    found = values(run(pool, tmp_path, incomplete, source=2, target=2))
    assert found.pop(2) is None
    for kind, text, missing, _ in found:
        assert kind == "MeshMismatchError" and missing == (2,), text
        assert "rank 2 of 4 never arrived to agree on the link policy/1" in text


def refused_here(mesh: Mesh) -> None:
    with pytest.raises(UnsupportedOp, match="cannot be simulated"):
        across(dist.HashStore(), "policy/1", 0, 2, 1.0)


def test_a_link_between_jobs_is_refused_in_the_simulator() -> None:
    meshcomm.simulate(refused_here, dims={"dp": 2})


def alone(place: Place) -> None:
    """A link of one process copies."""
    with across(place.shared, "policy/1", 0, 1, OPENS_S) as link:
        assert sum_along(link, "link", 3.0) == 3.0


def test_a_link_of_one_process(pool: Pool, tmp_path: Path) -> None:
    values(run(pool, tmp_path, alone, source=1))
