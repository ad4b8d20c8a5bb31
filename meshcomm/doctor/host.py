"""The interfaces, addresses and file descriptors of this host, and whether the job's sockets can connect."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from meshcomm.config import NetworkConfig
from meshcomm.doctor.finding import Finding
from meshcomm.errors import LaunchError
from meshcomm.rendezvous.exposure import is_loopback
from meshcomm.transport.variables import network_variables, no_interface, refuse_conflict

SLOW_S: Final = 1.0


class Limit(NamedTuple):
    """The limit on file descriptors, or None if there is none. used: how many are in use now. needed: how many more a rank
    needs at most; None without a plan.
    """

    limit: int | None
    used: int
    needed: int | None


def descriptors(needed: int | None) -> Limit:
    """Return this process's limit on file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = None if soft == resource.RLIM_INFINITY else soft
    return Limit(limit, psutil.Process().num_fds(), needed)


def limit_findings(limit: Limit) -> Iterator[Finding]:
    """Yield a finding if the plan needs more file descriptors than are left."""
    total = limit.used + (limit.needed or 0)
    if limit.needed is not None and limit.limit is not None and total > limit.limit:
        yield Finding(
            "error",
            "the plan needs more file descriptors than a process may open",
            given=f"{limit.used} in use, {limit.needed} more for the plan, the limit is {limit.limit}",
            expected=f"a limit of at least {total}",
            hint=f"ulimit -n {total}, or fewer dims with separate groups",
        )


class Interface(NamedTuple):
    """A network interface. up: whether it is enabled and has a carrier."""

    name: str
    up: bool
    addresses: tuple[str, ...]


def interfaces() -> list[Interface]:
    """Return this host's interfaces in the system's order. Each lists its IPv4 addresses first."""
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name,
            name in states and states[name].isup,
            # Drop the scope, such as %eth0 in fe80::1%eth0, which is not part of the address.
            tuple(a.address.partition("%")[0] for a in addresses.get(name, ()) if a.family in families),
        )
        for _, name in socket.if_nameindex()
    ]


def resolve(host: str) -> list[str]:
    """Return the addresses that this host's resolver finds for `host`, or an empty list if it finds none."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def chosen(
    present: Sequence[Interface], env: Mapping[str, str], one_host: bool, name: str
) -> tuple[str | None, str]:
    """Return the interface and address that Gloo will use.

    env: the environment, including the variables that `[network]` sets. name: this host's name.
    """
    if requested := env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        addresses = next((interface.addresses for interface in present if interface.name == requested), ())
        return requested, addresses[0] if addresses else "none"
    for address in ["127.0.0.1"] if one_host else resolve(name):
        holder = next((interface.name for interface in present if address in interface.addresses), None)
        if holder or is_loopback(address):
            return holder, address
    # Gloo falls back to this address if the host's name does not resolve to one of its addresses.
    return None, "127.0.0.1"


def interface_findings(
    network: NetworkConfig, present: Sequence[Interface], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each requested interface that does not exist or is not up, and for conflicting requests."""
    try:
        refuse_conflict(network_variables(network))
    except LaunchError as error:
        yield Finding.of(error)
    by_name = {interface.name: interface for interface in present}
    names, source = list(network.interfaces), "[network] interfaces"
    if not names and env.get("GLOO_SOCKET_IFNAME"):
        names, source = env["GLOO_SOCKET_IFNAME"].split(","), "GLOO_SOCKET_IFNAME"
    for name in names:
        interface = by_name.get(name)
        if interface is None:
            yield Finding.of(no_interface(name, source, list(by_name)))
        elif not (interface.up and interface.addresses):
            usable = ", ".join(
                interface.name for interface in present if interface.up and interface.addresses
            )
            yield Finding(
                "error",
                f"interface {name} cannot carry traffic",
                given=f"{name} in {source}: {'no address' if interface.up else 'down'}",
                expected="an interface that is up and has an address",
                hint=f"one of {usable or 'none'}",
            )


def name_findings(name: str, addresses: Sequence[str], present: Sequence[Interface]) -> Iterator[Finding]:
    """Yield a finding if other hosts cannot reach this host by its name, which Gloo uses unless an interface is given."""
    if all(map(is_loopback, addresses)):
        yield Finding(
            "warn",
            f"this host's name {name} " + ("is the loopback address" if addresses else "has no address"),
            given=f"{name} -> {' '.join(addresses)}" if addresses else f"{name}: unknown to the resolver",
            expected="an address that the other hosts can reach",
            hint=interface_hint(present),
        )


def interface_hint(present: Sequence[Interface]) -> str:
    """Return the setting that selects the first interface with a route out of this host."""
    outside = [
        interface.name
        for interface in present
        if interface.up and not all(map(is_loopback, interface.addresses))
    ]
    return (
        f'network.interfaces = ["{outside[0]}"]'
        if outside
        else "network.interfaces with an interface that can reach other hosts"
    )


def lookup_s(look: Callable[[str], object] = socket.gethostbyaddr) -> float:
    """Return how many seconds reverse lookups of 127.0.0.1 take, in the two forms in which a store's server sees it."""
    began = time.perf_counter()
    for address in ("127.0.0.1", "::ffff:127.0.0.1"):
        with suppress(OSError):
            look(address)
    return time.perf_counter() - began


def lookup_findings(seconds: float) -> Iterator[Finding]:
    """Yield a finding if the name server is so slow that it delays the start of a job."""
    if seconds > SLOW_S:
        yield Finding(
            "warn",
            "the name server is slow to look up 127.0.0.1",
            given=f"{seconds:.1f} s",
            expected=f"at most {SLOW_S:g} s, because torch's TCPStore looks up every process that connects",
            hint='export RES_OPTIONS="timeout:1 attempts:1", or 127.0.0.1 in /etc/hosts',
        )
