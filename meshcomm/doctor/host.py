"""What does this host have: interfaces, addresses, limits? Will the job's sockets find their way, and do its files and threads fit?"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import psutil
import torch

from meshcomm.config import NetworkConfig
from meshcomm.doctor.finding import Finding
from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.mesh.environment import network_variables, no_interface, refuse_conflict
from meshcomm.mesh.exposure import is_loopback
from meshcomm.predict.lint import GLOO_DESCRIPTORS
from meshcomm.transport.support import backend_on

SLOW_S: Final = 1.0
# Threads of one Gloo group; measured with torch 2.15 on Linux.
GLOO_THREADS: Final = 3


_REMEDIES: Final = {
    "process": "ulimit -n {}, or fewer dims with groups of their own",
    "container": "a container with at least {} tasks (pids.max), or fewer ranks in it",
}


class Cost(NamedTuple):
    """Open file descriptors and threads."""

    descriptors: int
    threads: int


class Limit(NamedTuple):
    """used: now. needed: by the ranks on this host beyond that, at most; None without a plan. limit: None if unlimited."""

    name: str
    scope: Literal["process", "container"]
    limit: int | None
    used: int
    needed: int | None


def in_use() -> Cost:
    """What this process has open."""
    process = psutil.Process()
    return Cost(process.num_fds(), process.num_threads())


def needs(plan: Plan, device: torch.device) -> Cost:
    """What one rank's Gloo groups cost at most: connected with every peer.

    With the idle default group of torch.distributed, the connection to the store, and the two threads of a mesh.
    """
    sizes = [
        family.size
        for family in plan.families
        if family.creates and backend_on(family.options.backend, device) == "gloo"
    ]
    groups = len(sizes) + (backend_on(plan.defaults.backend, device) == "gloo")
    peers = sum(size - 1 for size in sizes)
    return Cost(1 + groups * GLOO_DESCRIPTORS + peers, 2 + groups * GLOO_THREADS)


def limits(need: Cost | None, local_ranks: int) -> list[Limit]:
    """The limits that apply here, and what `local_ranks` ranks of such a need would use."""
    used = in_use()
    # Each rank is a process like this one, before its groups.
    many = None if need is None else local_ranks * (used.threads + need.threads)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = None if soft == resource.RLIM_INFINITY else soft
    found = [Limit("file descriptors", "process", files, used.descriptors, need and need.descriptors)]
    if (group := _pids_folder()) is not None:
        most, current = ((group / name).read_text().strip() for name in ("pids.max", "pids.current"))
        limit = None if most == "max" else int(most)
        found.append(Limit("threads", "container", limit, int(current), many))
    return found


def limit_findings(found: list[Limit]) -> Iterator[Finding]:
    """Whether what is needed is left."""
    for limit in found:
        total = limit.used + (limit.needed or 0)
        if limit.needed is None or limit.limit is None or total <= limit.limit:
            continue
        yield Finding(
            "error",
            f"the plan needs more {limit.name} than a {limit.scope} may have",
            given=f"{limit.used} in use, {limit.needed} more for the plan, the limit is {limit.limit}",
            expected=f"a limit of at least {total}",
            hint=_REMEDIES[limit.scope].format(total),
        )


def _pids_folder() -> Path | None:
    """Where the kernel says how many tasks this container may have."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    paths = {kind: path.lstrip("/") for _, kind, path in (line.split(":", 2) for line in lines)}
    folders = (root / paths.get("", ""), root / "pids" / paths.get("pids", ""), root, root / "pids")
    return next((folder for folder in folders if (folder / "pids.max").is_file()), None)


class Interface(NamedTuple):
    """A network interface. up: whether it is switched on and has a carrier."""

    name: str
    up: bool
    addresses: tuple[str, ...]


def interfaces() -> list[Interface]:
    """This host's interfaces in the system's order, IPv4 addresses first."""
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name,
            name in states and states[name].isup,
            # The kernel's scope, as in fe80::1%eth0, is not part of an address.
            tuple(a.address.partition("%")[0] for a in addresses.get(name, ()) if a.family in families),
        )
        for _, name in socket.if_nameindex()
    ]


def resolve(host: str) -> list[str]:
    """The addresses that this host's resolver gives for `host`; none where it knows none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def chosen(
    present: Sequence[Interface], env: Mapping[str, str], one_host: bool, name: str
) -> tuple[str | None, str]:
    """The interface and address that Gloo will take. env: with what `[network]` sets. name: this host's."""
    if wanted := env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        addresses = next((each.addresses for each in present if each.name == wanted), ())
        return wanted, addresses[0] if addresses else "none"
    for address in ["127.0.0.1"] if one_host else resolve(name):
        holder = next((each.name for each in present if address in each.addresses), None)
        if holder or is_loopback(address):
            return holder, address
    # What Gloo falls back to where its host's name is no address of the host.
    return None, "127.0.0.1"


def interface_findings(
    asked: NetworkConfig, present: Sequence[Interface], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether the interfaces that are asked for exist, are up, and are asked for once."""
    try:
        refuse_conflict(network_variables(asked))
    except LaunchError as error:
        yield Finding.of(error)
    by_name = {interface.name: interface for interface in present}
    names, source = list(asked.interfaces), "[network] interfaces"
    if not names and env.get("GLOO_SOCKET_IFNAME"):
        names, source = env["GLOO_SOCKET_IFNAME"].split(","), "GLOO_SOCKET_IFNAME"
    for name in names:
        found = by_name.get(name)
        if found is None:
            yield Finding.of(no_interface(name, source, list(by_name)))
        elif not (found.up and found.addresses):
            usable = ", ".join(each.name for each in present if each.up and each.addresses)
            yield Finding(
                "error",
                f"interface {name} cannot carry anything",
                given=f"{name} in {source}: {'no address' if found.up else 'down'}",
                expected="an interface that is up and has an address",
                hint=f"one of {usable or 'none'}",
            )


def name_findings(name: str, addresses: Sequence[str], present: Sequence[Interface]) -> Iterator[Finding]:
    """Whether other hosts find this one by its name, as Gloo does unless an interface is given."""
    if all(map(is_loopback, addresses)):
        yield Finding(
            "warn",
            f"this host's name {name} " + ("means the loopback" if addresses else "has no address"),
            given=f"{name} -> {' '.join(addresses)}" if addresses else f"{name}: unknown to the resolver",
            expected="an address that the other hosts reach",
            hint=interface_hint(present),
        )


def interface_hint(present: Sequence[Interface]) -> str:
    """The setting that picks the first interface that leads out of this host."""
    outside = [each.name for each in present if each.up and not all(map(is_loopback, each.addresses))]
    return (
        f'network.interfaces = ["{outside[0]}"]'
        if outside
        else "network.interfaces of one that leads outside"
    )


def lookup_s(look: Callable[[str], object] = socket.gethostbyaddr) -> float:
    """Seconds to ask who 127.0.0.1 is, in both ways in which a store's server sees it."""
    began = time.perf_counter()
    for address in ("127.0.0.1", "::ffff:127.0.0.1"):
        with suppress(OSError):
            look(address)
    return time.perf_counter() - began


def lookup_findings(seconds: float) -> Iterator[Finding]:
    """Whether the name server is so slow that the start of a job suffers."""
    if seconds > SLOW_S:
        yield Finding(
            "warn",
            "the name server is slow to say who 127.0.0.1 is",
            given=f"{seconds:.1f} s",
            expected=f"at most {SLOW_S:g} s: torch's TCPStore asks for each process that connects",
            hint='export RES_OPTIONS="timeout:1 attempts:1", or 127.0.0.1 in /etc/hosts',
        )
