"""Cutting connections releases the calls that wait on them, and leaves other connections alone."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from meshcomm.transport import torch_changes, torch_private
from meshcomm.transport.connections import Connections, connections
from meshcomm.transport.torch_changes import held_calls
from meshcomm.transport.torch_private import default_group
from tests.ranks import on_ranks


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A socket that listens, and both ends of a connection to it."""
    listens = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listens.getsockname())
    there, _ = listens.accept()
    return listens, here, there


def test_only_what_was_made_meanwhile_is_cut() -> None:
    before, connections = pair(), Connections()
    with connections.making():
        meanwhile = pair()
    after = pair()
    connections.cut()
    for one, other, works in (
        (before[1:], before, True),
        (meanwhile[1:], meanwhile, False),
        (after[1:], after, True),
    ):
        here, there = one
        try:
            here.sendall(b"x")
            assert works and there.recv(1) == b"x"
        except OSError:
            assert not works
        for each in other:
            each.close()


def test_a_later_connection_to_a_port_that_listened_is_cut_too() -> None:
    connections = Connections()
    with connections.making():
        listens = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listens.getsockname())
    there, _ = listens.accept()
    connections.cut()
    assert here.recv(1) == b""
    for each in (listens, here, there):
        each.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_are_those_that_psutil_finds(family: socket.AddressFamily) -> None:
    """Those of other protocols, of files and of pipes are not. A default timeout leaves blocking sockets blocking."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    socket.setdefaulttimeout(60)
    try:
        listens = socket.create_server(
            ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family
        )
        here = socket.create_connection(listens.getsockname()[:2])
        there, _ = listens.accept()
        others = [*socket.socketpair(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()]
        for each in (here, there, *others):
            each.setblocking(True)
        found = connections()
        wanted = {
            (each.fd, tuple(each.laddr), tuple(each.raddr))
            for each in psutil.Process().net_connections("tcp")
            if each.raddr
        }
        assert found == wanted and {here.fileno(), there.fileno()} <= {each.descriptor for each in found}
        assert all(os.get_blocking(each.fileno()) for each in (here, there, *others))
    finally:
        socket.setdefaulttimeout(None)
    for each in (listens, here, there, *others):
        each.close()


def test_connections_are_found_without_a_free_descriptor() -> None:
    listens = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listens.getsockname()[:2])
    there, _ = listens.accept()
    found, taken = connections(), list[int]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(here.fileno()))
        os.close(taken.pop())
        taken.append(os.open(os.devnull, os.O_RDONLY))
        assert {here.fileno(), there.fileno()} <= {each.descriptor for each in connections()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert connections() == found
    for each in (listens, here, there):
        each.close()


@on_ranks(2)
def test_a_call_that_waits_on_gloo_ends_within_seconds() -> None:
    """This holds for calls that Gloo forgets when the connection breaks: only waiting in slices avoids the group's 60 s."""
    given_up = [float("inf")]
    put_back = torch_changes.changed()
    torch_changes.interruptible_waits(lambda: time.monotonic() > given_up[0])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        for attempt in range(6):
            connections = Connections()
            with connections.making():
                group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=60))

            def cut(connections: Connections = connections) -> None:
                given_up[0] = time.monotonic() + 0.5
                connections.cut()

            timer = threading.Timer(0.1 + 0.01 * attempt * dist.get_rank(), cut)
            timer.start()
            x, y = torch.ones(20_000), torch.ones(10_000)
            began = time.monotonic()
            try:
                while True:
                    dist.all_reduce(x, group=group) if attempt % 2 else dist.reduce_scatter_tensor(
                        y, x, group=group
                    )
            except RuntimeError:
                assert time.monotonic() - began < 10
            timer.join()
            given_up[0] = float("inf")
            if held_calls:
                torch_private.keep_for_good([group])
                held_calls.clear()
            dist.destroy_process_group(group)
        assert default_group() is not None
    finally:
        torch_changes.interruptible_waits(lambda: False)
        put_back()
        dist.destroy_process_group()
