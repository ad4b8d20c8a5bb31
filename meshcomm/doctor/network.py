"""Which interfaces and addresses does this host have, and will the job's sockets find their way?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from meshcomm.config import Config, ProcessConfig
from meshcomm.doctor.finding import Finding
from meshcomm.errors import LaunchError
from meshcomm.mesh.environment import network_variables, no_interface, refuse_conflict
from meshcomm.mesh.exposure import exposed_file, is_loopback

SLOW_S: Final = 1.0


class Interface(NamedTuple):
    """A network interface. up: whether it is switched on and has a carrier."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def leads_outside(self) -> bool:
        """Whether other hosts could reach it."""
        return self.up and not all(map(is_loopback, self.addresses))


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
    """The interface and address that Gloo will take, by its own rules and meshcomm's default.

    env: with what `[network]` sets. name: this host's.
    """
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
    settings: Config, present: Sequence[Interface], env: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether the interfaces that are asked for exist, are up, and are asked for once."""
    try:
        refuse_conflict(network_variables(settings.network))
    except LaunchError as error:
        yield Finding.of(error)
    by_name = {interface.name: interface for interface in present}
    names, source = list(settings.network.interfaces), "[network] interfaces"
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
        else:
            yield Finding("ok", f"interface {name} is there", given=" ".join(found.addresses))


def name_finding(
    name: str, addresses: Sequence[str], present: Sequence[Interface], one_host: bool, told: bool
) -> Finding:
    """Whether other hosts would find this one by its name.

    one_host: all ranks are here. told: the interface is given, so no name is looked up.
    """
    if not all(map(is_loopback, addresses)):
        return Finding("ok", f"this host's name {name} has an address", given=" ".join(addresses))
    what = f"this host's name {name} " + ("means the loopback" if addresses else "has no address")
    given = f"{name} -> {' '.join(addresses)}" if addresses else f"{name}: unknown to the resolver"
    if one_host or told:
        why = "the interface is given" if told else "one host needs none"
        return Finding("ok", what, given=f"{given}; {why}")
    return Finding(
        "warn", what, given, expected="an address that the other hosts reach", hint=interface_hint(present)
    )


def interface_hint(present: Sequence[Interface]) -> str:
    """The setting that picks the first interface that leads out of this host."""
    outside = next((each.name for each in present if each.leads_outside), None)
    return (
        f'network.interfaces = ["{outside}"]' if outside else "network.interfaces of one that leads outside"
    )


def lookup_s(look: Callable[[str], object] = socket.gethostbyaddr) -> float:
    """Seconds to ask who 127.0.0.1 is, in both ways in which a store's server sees it."""
    began = time.perf_counter()
    for address in ("127.0.0.1", "::ffff:127.0.0.1"):
        try:
            look(address)
        except OSError:
            continue
    return time.perf_counter() - began


def lookup_finding(seconds: float) -> Finding:
    """Whether the name server is quick enough not to be felt at the start."""
    if seconds <= SLOW_S:
        return Finding("ok", "the name server is quick", given=f"{seconds * 1e3:.1f} ms for 127.0.0.1")
    return Finding(
        "warn",
        "the name server is slow to say who 127.0.0.1 is",
        given=f"{seconds:.1f} s",
        expected=f"at most {SLOW_S:g} s: torch's TCPStore asks for each process that connects",
        hint='export RES_OPTIONS="timeout:1 attempts:1", or 127.0.0.1 in /etc/hosts',
    )


def process_findings(
    process: ProcessConfig, present: Sequence[Interface], one_host: bool
) -> Iterator[Finding]:
    """Whether the meeting place of `[process]` can be used from here."""
    if process.init == "tcp" and process.address is not None:
        yield from _tcp(process.address, present, one_host)
    if process.init == "file" and process.path is not None:
        yield from _file(process.path)


def _tcp(address: str, present: Sequence[Interface], one_host: bool) -> Iterator[Finding]:
    host, _, number = address.rpartition(":")
    host, port = host.strip("[]"), int(number)
    found = resolve(host)
    if not found:
        yield Finding(
            "error",
            f"nobody knows the host {host}",
            given=f'process.address = "{address}"',
            expected="a host name that resolves, or an address",
            hint=f'process.address = "127.0.0.1:{port}" for one host',
        )
        return
    if not is_loopback(host):
        yield Finding(
            "warn" if one_host else "ok",
            f"others can reach the job's store at {address}",
            given=f'process.address = "{address}", a TCPStore, which has no authentication',
            expected="127.0.0.1 where all ranks are on one host, else a network that only the job's hosts reach",
            hint=f'process.address = "127.0.0.1:{port}", or a firewall',
        )
    mine = {each for interface in present for each in interface.addresses}
    if not any(each in mine or is_loopback(each) for each in found):
        yield Finding("ok", f"rank 0 listens at {address}, on another host", given=" ".join(found))
        return
    try:
        _listen(host, port)
        yield Finding("ok", f"port {port} of {host} is free")
    except OSError as error:
        yield Finding(
            "error",
            f"rank 0 could not listen on port {port} of {host}",
            given=error.strerror or str(error),
            expected="a free port",
            hint=f'process.address = "{host}:{_listen(host, 0)}" is free now; or end what listens there',
        )


def _listen(host: str, port: int) -> int:
    """Listen for a moment; the port, chosen by the system for port 0."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)
        tried.listen(1)
        return int(tried.getsockname()[1])


def _file(path: str) -> Iterator[Finding]:
    file = Path(path).absolute()
    if not os.access(file.parent, os.W_OK | os.X_OK):
        yield Finding(
            "error",
            f"the rendezvous file {path} cannot be made",
            given=f"the folder {file.parent}" + ("" if file.parent.exists() else ", which does not exist"),
            expected="a folder that all processes can write, shared by all hosts of the job",
            hint="another process.path",
        )
        return
    exposed = exposed_file(path)
    if exposed is not None:
        yield Finding.of(exposed, "warn")
    if size := file.stat().st_size if file.exists() else 0:
        yield Finding(
            "warn",
            f"the rendezvous file {path} is there already",
            given=f"{size} bytes, perhaps of an earlier job",
            expected="a new file for each job: the ranks would read the old job's keys",
            hint=f"rm {path}, unless a job is using it",
        )
    elif exposed is None:
        yield Finding("ok", f"the rendezvous file {path} can be made")
