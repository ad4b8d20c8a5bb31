"""Network settings become the variables of backends."""

from __future__ import annotations

import os

import meshcomm
from meshcomm.config import NetworkConfig
from meshcomm.errors import LaunchError
from meshcomm.testing import Pool
from meshcomm.transport.variables import network_variables


def network() -> list[str | None]:
    seen = [os.environ.get("GLOO_SOCKET_IFNAME")]
    config = {
        "mesh": {"dims": {"dp": 2}, "device": "cpu", "timeout_s": 30.0},
        "network": {"interfaces": ["lo"]},
    }
    with meshcomm.init(config) as mesh:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        mesh.barrier("dp")
    return [*seen, os.environ.get("GLOO_SOCKET_IFNAME")]


def test_network_settings_are_set_before_and_put_back_after(pool: Pool) -> None:
    assert pool.run(network, ranks=2) == [[None, "lo", None]] * 2


def test_an_interface_that_is_set_twice_is_refused(pool: Pool) -> None:
    for error in pool.run(network, ranks=2, env={"GLOO_SOCKET_IFNAME": "eth7"}, allow=True):
        assert isinstance(error, LaunchError)
        assert error.what == "GLOO_SOCKET_IFNAME is set twice, to different values"


def test_interfaces_and_sockets_become_variables() -> None:
    network = NetworkConfig(
        interfaces=("eth0", "eth1"),
        nccl_debug="INFO",
        nccl_debug_subsys=("INIT", "NET"),
        nccl_socket_nthreads=4,
        nccl_nsocks_perthread=2,
    )
    assert network_variables(network) == {
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "=eth0,eth1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }
