"""Environment variables that torch's backends read when a group is created."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from meshcomm.config.process import NetworkConfig
from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.layout.names import nearest_name

# Variables that the backends of one group must read identically: otherwise they choose different algorithms or
# protocols, connect at different times, or check calls that the others do not. Variables that name parts of a host
# are not included.
SHARED: Final = (
    "GLOO_DEVICE_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_GLOO_LAZY_INIT", "NCCL_ALGO", "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE", "NCCL_COMM_BLOCKING", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_USE_COMM_NONBLOCKING",
)  # fmt: skip

# Every rank of a group that connects at creation holds a socket to every other rank.
EAGER_RANKS: Final = 64


def set_env(variables: Mapping[str, str | None]) -> None:
    """Set environment variables. A value of None removes the variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def with_variables(variables: Mapping[str, str], *, keep: bool = False) -> Iterator[None]:
    """Set `variables` inside the block, and restore the old values afterwards. With `keep`, set only unset variables."""
    before = {name: os.environ.get(name) for name in variables if not (keep and name in os.environ)}
    os.environ.update({name: variables[name] for name in before})
    try:
        yield
    finally:
        set_env(before)


def refuse_conflict(variables: Mapping[str, str]) -> None:
    """Raise LaunchError if the user has set one of the config's `variables` to a different value."""
    for name, value in variables.items():
        in_environment = os.environ.get(name)
        if in_environment not in (None, value):
            raise LaunchError(
                f"{name} is set twice, to different values",
                given=f"{name}={in_environment} in the environment, {value} by the config",
                expected="one value",
                hint=f"unset {name}, or remove it from [network]",
            )


def check_interfaces(plan: Plan, network: NetworkConfig) -> None:
    """Raise LaunchError if `[network]` or GLOO_SOCKET_IFNAME names a missing interface.

    The variables of `[network]` must already be set.
    """
    source = "[network] interfaces" if network.interfaces else "GLOO_SOCKET_IFNAME"
    reads = ["gloo", *["nccl"] * bool(network.interfaces)]
    backends = {plan.defaults.backend, *(family.options.backend for family in plan.families)}
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names or not any(word in backend for backend in backends for word in reads):
        return
    present = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name not in present:
            raise no_interface(name, source, present)


def no_interface(name: str, source: str, present: Sequence[str]) -> LaunchError:
    """Return the error for a network interface that this host lacks.

    source: the setting or variable that names the interface.
    """
    near = nearest_name(name, present)
    return LaunchError(
        f"this host has no interface {name}",
        given=f"{name} in {source}",
        expected="one of " + ", ".join(present),
        hint=f'did you mean "{near}"?' if near else f"remove it from {source}",
    )


def network_variables(network: NetworkConfig) -> dict[str, str]:
    """Return the Gloo and NCCL environment variables for `[network]`."""
    listed = ",".join(network.interfaces)
    variables = {
        "GLOO_SOCKET_IFNAME": listed,
        # NCCL treats names as prefixes unless they are marked as exact.
        "NCCL_SOCKET_IFNAME": listed and f"={listed}",
        "NCCL_DEBUG": network.nccl_debug,
        "NCCL_DEBUG_SUBSYS": ",".join(network.nccl_debug_subsys),
        "NCCL_SOCKET_NTHREADS": network.nccl_socket_nthreads,
        "NCCL_NSOCKS_PERTHREAD": network.nccl_nsocks_perthread,
    }
    return {name: str(value) for name, value in variables.items() if value not in (None, "")}


# Settings of torch's NCCL watchdog for the loss of a rank, which NCCL detects on other hosts: the watchdog neither ends
# this process nor waits a minute for the dumps of other ranks. torchrun sets the first variable to 1.
NCCL_RECOVERS: Final[Mapping[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


def nccl_defaults(world_size: int) -> dict[str, str]:
    """Return the setting for how often each rank's NCCL watchdog polls the store: every second, or less often if all ranks
    together would exceed 1,000 polls per second.
    """
    return {"TORCH_NCCL_COORD_CHECK_MILSEC": str(max(1_000, world_size))}


def gloo_defaults(one_host: bool, ranks: int | None = None) -> dict[str, str]:
    """Return the default connection settings of a Gloo group. On one host, Gloo uses the loopback interface.

    All ranks connect when the group is created, because Gloo then ends every call at its timeout. In a group of more than
    64 ranks, and in the default group (`ranks` is None), two ranks connect when they send their first message.
    """
    lazy = ranks is None or ranks > EAGER_RANKS
    variables = {"TORCH_GLOO_LAZY_INIT": "1" if lazy else "0"}
    names = [name for _, name in socket.if_nameindex()] if one_host else []
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables
