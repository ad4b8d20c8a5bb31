"""Environment variables that torch's backends read while groups are made, set and put back."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import final

from meshcomm.config import NetworkConfig
from meshcomm.errors import LaunchError


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
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
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
    return variables


def gloo_defaults(one_host: bool) -> dict[str, str]:
    """How Gloo connects unless the user says otherwise.

    Pairs of ranks connect when they first talk instead of all with all at the start. On one host
    it stays on the loopback interface, which needs no host name that resolves and no open port.
    """
    variables = {"TORCH_GLOO_LAZY_INIT": "1"}
    if one_host and (loopback := _loopback()) is not None:
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
