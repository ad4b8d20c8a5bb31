"""Findings about interfaces, names, limits and sockets of a host."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import NetworkConfig, load_config
from meshcomm.doctor import Finding, host
from meshcomm.doctor.host import Interface, Limit
from meshcomm.predict.lint import GLOO_DESCRIPTORS, footprint
from meshcomm.testing import Pool
from tests.doctor.test_examine import MESH

pytestmark = pytest.mark.usefixtures("no_launcher")

LO, ETH = Interface("lo", True, ("127.0.0.1", "::1")), Interface("eth0", True, ("10.0.0.7",))


HERE = [LO, ETH, Interface("eth1", False, ())]


def spent(sizes: dict[str, int]) -> tuple[int, int]:
    gc.collect()  # other tests left groups in this process
    before = host.descriptors(None).used
    with meshcomm.init(dims=sizes, merge={"all": list(sizes)}, device="cpu", timeout_s=30) as mesh:
        for name in (*sizes, "all"):
            mesh.all_reduce(name, torch.ones(8))
            mesh.all_to_all(name, torch.ones(8))
        used = host.descriptors(None).used - before
        settings = load_config({"mesh": {"dims": sizes, "merge": {"all": list(sizes)}, "device": "cpu"}})
        return used, footprint(settings, mesh.plan, mesh.world_size).descriptors


def test_the_need_of_a_plan_is_what_a_mesh_then_uses(pool: Pool) -> None:
    for files, most in pool.run(spent, {"pp": 2, "dp": 2, "tp": 2}):
        assert most - 4 <= files <= most


def test_the_cost_of_a_group_is_what_gloo_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # The first group may also use descriptors that all groups share.
    groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))]
    before = host.descriptors(None).used
    groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10)))
    assert host.descriptors(None).used - before == GLOO_DESCRIPTORS


def test_too_small_a_limit_is_an_error() -> None:
    small = Limit(1024, 20, 4000)
    assert lines(host.limit_findings(small)) == [
        "error | the plan needs more file descriptors than a process may open"
        " | 20 in use, 4000 more for the plan, the limit is 1024"
        " | ulimit -n 4020, or fewer dims with separate groups",
    ]
    for enough in ({"limit": 5000}, {"limit": None}, {"needed": None}):
        assert lines(host.limit_findings(small._replace(**enough))) == []  # type: ignore[arg-type]


def lines(findings: Iterable[Finding]) -> list[str]:
    """The level, the text, the given value and the hint of each finding."""
    return [" | ".join(filter(None, (one.level, one.what, one.given, one.hint))) for one in findings]


def test_an_interface_set_twice_or_down_or_missing_in_the_environment() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        down = load_config({"mesh": MESH, "network": {"interfaces": ["eth1"]}})
        twice, cannot = lines(host.interface_findings(down.network, HERE, env))
    assert twice.startswith("error | GLOO_SOCKET_IFNAME is set twice, to different values")
    assert cannot == (
        "error | interface eth1 cannot carry traffic | eth1 in [network] interfaces: down | one of lo, eth0"
    )
    (missing,) = lines(host.interface_findings(NetworkConfig(), HERE, env))
    assert missing.startswith("error | this host has no interface eth7 | eth7 in GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.1.1"], ['warn | this host\'s name n is the loopback address | n -> 127.0.1.1 | network.interfaces = ["eth0"]']),
        ([], ['warn | this host\'s name n has no address | n: unknown to the resolver | network.interfaces = ["eth0"]']),
        (["10.0.0.7"], []),
    ],
)  # fmt: skip
def test_whether_others_find_this_host_by_its_name(addresses: list[str], expected: list[str]) -> None:
    assert lines(host.name_findings("n", addresses, HERE)) == expected


def test_a_slow_name_server() -> None:
    assert lines(host.lookup_findings(0.02)) == []
    (slow,) = lines(host.lookup_findings(5.01))
    assert slow.startswith("warn | the name server is slow to look up 127.0.0.1 | 5.0 s | export RES_OPTIONS")
    asked: list[str] = []

    def look(address: str) -> None:
        asked.append(address)
        raise OSError("nobody knows")

    assert host.lookup_s(look) < 1
    assert asked == ["127.0.0.1", "::ffff:127.0.0.1"]


@pytest.mark.parametrize(
    ("env", "one_host", "name", "expected"),
    [
        ("eth0,lo", True, "x", ("eth0", "10.0.0.7")),
        ("eth9", True, "x", ("eth9", "none")),
        ("", True, "x", ("lo", "127.0.0.1")),
        ("", False, "10.0.0.7", ("eth0", "10.0.0.7")),
        ("", False, "127.0.0.1", ("lo", "127.0.0.1")),
        ("", False, "127.0.1.1", (None, "127.0.1.1")),
        ("", False, "10.9.9.9", (None, "127.0.0.1")),
    ],
)
def test_what_gloo_will_choose(env: str, one_host: bool, name: str, expected: tuple[str | None, str]) -> None:
    assert host.chosen(HERE, {"GLOO_SOCKET_IFNAME": env}, one_host, name) == expected
