"""Two hosts on one machine: two sets of Linux namespaces, joined by one slow cable.

Each host has a separate network, host name, `/etc/hosts`, process table and mount table. It exists as long as its first
process, which ends when its stdin closes, even if the process that made the host is killed. Then the kernel ends all
other processes of the host and removes its interfaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, final

INTERFACE: Final = "net0"
NAMES: Final = ("node0", "node1")
_TOOLS: Final = ("unshare", "nsenter", "ip", "tc", "mount")
# Process 1 of a host. It has to reap orphans, and must not end by accident, because all others end with it.
_FIRST_PROCESS: Final = """
import signal, socket, subprocess, sys
name, hosts = sys.argv[1:]
socket.sethostname(name)
subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


class Link(NamedTuple):
    """The cable, in each direction: a token bucket (`tc ... tbf`).

    rate: bits per second, in the notation of tc. burst: bytes that may be sent at once.
    wait: how long a packet may wait at most; packets that would wait longer are dropped.
    """

    rate: str = "200mbit"
    burst: str = "128kb"
    wait: str = "50ms"

    def __str__(self) -> str:
        return f"{self.rate}, burst {self.burst}, longest wait {self.wait}"


@final
class Host:
    """One of the two hosts. name: its host name; address: its only address apart from 127.0.0.1."""

    def __init__(self, name: str, address: str, first: int) -> None:
        self.name = name
        self.address = address
        self._first = str(first)

    def start(
        self, command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host, in `folder`; its output goes to `log`."""
        words = self.command(command, folder)
        with log.open("wb") as out:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(env)
            )

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """The command that starts a program on this host, in `folder`."""
        enter = ["nsenter", "--target", self._first, "--net", "--uts", "--mount", "--pid"]
        # The working folder is lost on entering a mount table.
        return [*enter, "--", "env", "-C", str(folder), *words]

    def processes(self) -> list[str]:
        """The command lines of the processes on this host, without its first process and zombies."""
        found = []
        space = os.readlink(f"/proc/{self._first}/ns/pid")
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or entry.name == self._first:
                continue
            try:
                if os.readlink(entry / "ns" / "pid") == space:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    found += [words] if words else []
            except OSError:
                continue
        return found

    def sent_bytes(self) -> int:
        """Bytes that this host has sent over the cable since it was made."""
        return sent_bytes(Path("/proc") / self._first)

    def cut(self) -> None:
        """Take the interface down. The other host is not notified: its packets get no answer."""
        self._run("ip", "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Undo `cut`."""
        self._run("ip", "link", "set", INTERFACE, "up")

    def join(self, link: Link) -> None:
        """Set up both interfaces of this host."""
        self._run("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "set", INTERFACE, "up")
        bucket = ["rate", link.rate, "burst", link.burst, "latency", link.wait]
        self._run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)

    def _run(self, *words: str) -> str:
        return _run("nsenter", "--target", self._first, "--net", "--", *words)


@contextmanager
def two_hosts(folder: Path, link: Link) -> Iterator[tuple[Host, Host]]:
    """Two joined hosts. No part of them is left at the end of the block.

    folder: for the file that replaces `/etc/hosts`. Raises RuntimeError if the machine does not allow it.
    """
    addresses = ("10.77.0.1", "10.77.0.2")
    book = folder / "hosts"
    lines = [f"{address} {name}" for address, name in zip(addresses, NAMES, strict=True)]
    book.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    with ExitStack() as stack:
        firsts = [stack.enter_context(_first_process(name, book)) for name in NAMES]
        # Both ends are created inside the hosts, so the machine's network never contains them.
        ends = [["name", INTERFACE, "netns", str(first)] for first in firsts]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        hosts = [Host(*three) for three in zip(NAMES, addresses, firsts, strict=True)]
        for host in hosts:
            host.join(link)
        yield hosts[0], hosts[1]


def sent_bytes(process: Path) -> int:
    """Bytes that the host of a process has sent over the cable; process: its folder in /proc."""
    lines = (process / "net" / "dev").read_text().splitlines()
    words = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(words.split(":")[1].split()[8])


def refusal(folder: Path) -> str | None:
    """Why this machine cannot have two hosts, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: util-linux and iproute2 have them"
    if os.geteuid() != 0:
        return "only root may make network namespaces and a veth pair"
    try:
        with two_hosts(folder, Link()):
            return None
    except (RuntimeError, OSError) as error:
        return str(error)


@contextmanager
def _first_process(name: str, book: Path) -> Iterator[int]:
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = ["unshare", *spaces, "--", sys.executable, "-c", _FIRST_PROCESS, name, str(book)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None and parent.stderr is not None
        try:
            if parent.stdout.readline() != "ready\n":
                parent.stdin.close()
                raise RuntimeError(f"unshare: {parent.stderr.read().strip()}")
            # The process that unshare forked, by its number outside the host.
            yield int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())
        finally:
            parent.stdin.close()
            parent.wait(30)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        # Name the tool that was refused, with its error.
        tool = next((word for word in words if word in ("ip", "tc")), words[0])
        raise RuntimeError(f"{tool}: {done.stderr.strip()}")
    return done.stdout
