"""Which interfaces and addresses does this host have, and will the job's sockets find their way?"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshcomm.config import Config, ProcessConfig
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import LaunchError
from meshcomm.layout.names import nearest_name
from meshcomm.mesh.environment import network_variables, refuse_conflict
from meshcomm.mesh.exposure import exposed_file, is_loopback

# Of linux/sockios.h and linux/if.h.
_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_IFF_UP: Final = 1

SLOW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. up: None where the system does not say."""

    name: str
    up: bool | None
    addresses: tuple[str, ...]

    @property
    def loopback(self) -> bool:
        """Whether only this host reaches it."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    def facts(self) -> Facts:
        """As plain data."""
        return {"name": self.name, "up": self.up, "addresses": list(self.addresses)}


def interfaces() -> list[Interface]:
    """This host's interfaces in the system's order; addresses only on Linux."""
    names = [name for _, name in socket.if_nameindex()]
    if not sys.platform.startswith("linux"):
        return [Interface(name, None, ()) for name in names]
    six = _six()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in names:
            four = _asked(asking, _SIOCGIFADDR, name)
            flags = _asked(asking, _SIOCGIFFLAGS, name)
            addresses = [socket.inet_ntoa(four[20:24])] if four else []
            up = bool(struct.unpack_from("H", flags, 16)[0] & _IFF_UP) if flags else None
            found.append(Interface(name, up, (*addresses, *six.get(name, ()))))
    return found


def _asked(asking: socket.socket, request: int, name: str) -> bytes:
    import fcntl

    try:
        return fcntl.ioctl(asking.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return b""


def _six() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        digits, _, _, _, _, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


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
    wanted = env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    by_name = {interface.name: interface for interface in present}
    if wanted:
        addresses = by_name[wanted].addresses if wanted in by_name else ()
        return wanted, addresses[0] if addresses else "none"
    if one_host:
        found = next((interface for interface in present if interface.loopback), None)
        return (found.name, found.addresses[0]) if found else (None, "127.0.0.1")
    for address in resolve(name):
        for interface in present:
            if address in interface.addresses:
                return interface.name, address
        if is_loopback(address):
            return None, address
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
    wanted = [("[network] interfaces", name) for name in settings.network.interfaces]
    if not wanted and env.get("GLOO_SOCKET_IFNAME"):
        wanted = [("GLOO_SOCKET_IFNAME", name) for name in env["GLOO_SOCKET_IFNAME"].split(",")]
    for source, name in wanted:
        found = by_name.get(name)
        if found is None:
            near = nearest_name(name, by_name)
            yield Finding(
                "error",
                f"this host has no interface {name}",
                given=f"{name} in {source}",
                expected="one of " + ", ".join(by_name),
                hint=f'did you mean "{near}"?' if near else f"take it out of {source}",
            )
        elif found.up is False or (found.up and not found.addresses):
            yield Finding(
                "error",
                f"interface {name} cannot carry anything",
                given=f"{name} in {source}: {'down' if not found.up else 'no address'}",
                expected="an interface that is up and has an address",
                hint="one of "
                + (", ".join(each.name for each in present if each.up and each.addresses) or "none"),
            )
        else:
            shown = " ".join(found.addresses)
            yield Finding("ok", f"interface {name} is there", given=shown or None)


def name_findings(
    name: str, addresses: Sequence[str], present: Sequence[Interface], one_host: bool, told: bool
) -> Iterator[Finding]:
    """Whether other hosts would find this one by its name.

    one_host: all ranks are here. told: the interface is given, so no name is looked up.
    """
    if addresses and not all(is_loopback(address) for address in addresses):
        yield Finding("ok", f"this host's name {name} has an address", given=" ".join(addresses))
        return
    what = f"this host's name {name} " + ("means the loopback" if addresses else "has no address")
    given = f"{name} -> {' '.join(addresses)}" if addresses else f"{name}: unknown to the resolver"
    if one_host or told:
        yield Finding(
            "ok", what, given=f"{given}; " + ("the interface is given" if told else "one host needs none")
        )
        return
    yield Finding(
        "warn",
        what,
        given=given,
        expected="an address that the other hosts reach",
        hint=interface_hint(present),
    )


def interface_hint(present: Sequence[Interface]) -> str:
    """The setting that picks the first interface that leads out of this host."""
    outside = next((each for each in present if each.up and each.addresses and not each.loopback), None)
    return (
        f'network.interfaces = ["{outside.name}"]'
        if outside
        else "network.interfaces of one that leads outside"
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
    reason = _taken(host, port)
    if reason is None:
        yield Finding("ok", f"port {port} of {host} is free")
    else:
        yield Finding(
            "error",
            f"rank 0 could not listen on port {port} of {host}",
            given=reason,
            expected="a free port",
            hint=f'process.address = "{host}:{_free(host)}" is free now; or end what listens there',
        )


def _taken(host: str, port: int) -> str | None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(address)
            tried.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


def _free(host: str) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.bind(address)
        port: int = tried.getsockname()[1]
        return port


def _file(path: str) -> Iterator[Finding]:
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "error",
            f"the rendezvous file {path} cannot be made",
            given=f"the folder {folder}" + ("" if folder.exists() else ", which does not exist"),
            expected="a folder that all processes can write, shared by all hosts of the job",
            hint="another process.path",
        )
        return
    exposed = exposed_file(path)
    if exposed is not None:
        yield Finding.of(exposed, "warn")
    if Path(path).exists() and Path(path).stat().st_size:
        yield Finding(
            "warn",
            f"the rendezvous file {path} is there already",
            given=f"{Path(path).stat().st_size} bytes, perhaps of an earlier job",
            expected="a new file for each job: the ranks would read the old job's keys",
            hint=f"rm {path}, unless a job is using it",
        )
    elif exposed is None:
        yield Finding("ok", f"the rendezvous file {path} can be made")
