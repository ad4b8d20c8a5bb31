"""Environment variables that torch's backends read while groups are made, set and put back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

from meshcomm.config.process import NetworkConfig
from meshcomm.errors import LaunchError

# What the backends of one group must read alike: else they choose different algorithms or protocols,
# connect at different times, or check calls that the others do not check. What names a host's own
# parts may differ and is left out: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, files, what is logged.
SHARED: Final = (
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_COMM_BLOCKING",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_GLOO_LAZY_INIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
)


def shared_variables() -> dict[str, str]:
    """Those variables of this process that must be equal on all ranks, where they are set."""
    return {name: os.environ[name] for name in SHARED if name in os.environ}


def put(variables: Mapping[str, str | None]) -> None:
    """Set `variables`; those that are None are taken away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside of the block `variables` are set, whatever they were; after it they are that again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        put(before)


@final
class Environment:
    """Sets variables, remembers what they were, puts that back. Never overrides what a user set."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, variables: Mapping[str, str]) -> None:
        """Set `variables`. Raises LaunchError where one is already set to something else."""
        for name, value in variables.items():
            given = os.environ.get(name)
            if given not in (None, value):
                raise LaunchError(
                    f"{name} is set twice, differently",
                    given=f"{name}={given} in the environment, {value} by the config",
                    expected="one value",
                    hint=f"unset {name}, or take it out of [network]",
                )
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def default(self, variables: Mapping[str, str]) -> None:
        """Set those of `variables` that are not set."""
        self.set({name: value for name, value in variables.items() if name not in os.environ})

    def restore(self) -> None:
        """Everything as it was before."""
        put(self._before)
        self._before.clear()


def network_variables(network: NetworkConfig) -> dict[str, str]:
    """What `[network]` means to Gloo and NCCL."""
    variables: dict[str, str] = {}
    if network.interfaces:
        listed = ",".join(network.interfaces)
        # NCCL takes names as prefixes unless they are marked as exact.
        variables |= {"GLOO_SOCKET_IFNAME": listed, "NCCL_SOCKET_IFNAME": f"={listed}"}
    if network.nccl_debug is not None:
        variables["NCCL_DEBUG"] = network.nccl_debug
    if network.nccl_debug_subsys:
        variables["NCCL_DEBUG_SUBSYS"] = ",".join(network.nccl_debug_subsys)
    if network.nccl_socket_nthreads is not None:
        variables["NCCL_SOCKET_NTHREADS"] = str(network.nccl_socket_nthreads)
    if network.nccl_nsocks_perthread is not None:
        variables["NCCL_NSOCKS_PERTHREAD"] = str(network.nccl_nsocks_perthread)
    return variables


# Every rank of a group that connects while it is made holds a socket to every other rank.
EAGER_RANKS: Final = 64


def gloo_defaults(one_host: bool, ranks: int | None = None) -> dict[str, str]:
    """How the ranks of a Gloo group connect unless the user says otherwise.

    All with all while the group is made, as Gloo then ends every call at its timeout; a group of more than
    64 ranks, and the default group (ranks: None), when two ranks first talk. On one host Gloo stays on the
    loopback interface, which needs no host name that resolves and no open port.
    """
    lazy = ranks is None or ranks > EAGER_RANKS
    variables = {"TORCH_GLOO_LAZY_INIT": "1" if lazy else "0"}
    if one_host and (loopback := _loopback()) is not None:
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
