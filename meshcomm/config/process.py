"""How do the processes of a job find each other, and over which network? `[process]` and `[network]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from meshcomm.config.model import Model
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.table import FrozenList
from meshcomm.config.wording import toml
from meshcomm.layout.names import nearest_name

# What NCCL's own parser knows; it ignores every other word without saying so.
_SUBSYSTEMS: Final = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL",
)  # fmt: skip

# NCCL ignores a pair of settings that asks for more sockets for one connection.
_MOST_SOCKETS: Final = 64

# Which keys say something for which way of finding each other.
_USED: Final = {
    "env": (),
    "tcp": ("address", "rank", "world_size"),
    "file": ("path", "rank", "world_size"),
}
_EXAMPLES: Final = {"address": '"127.0.0.1:29500"', "path": '"/shared/rendezvous"'}

Text = Annotated[str, Field(min_length=1)]


def _no_number(value: object) -> object:
    # 1 == True: the choices alone would let a number pass.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "a number is no choice")
    return value


class ProcessConfig(Model):
    """`[process]`: how the processes of the job find each other. Default: by a launcher's variables."""

    init: Literal["env", "tcp", "file"] = Field(
        default="env",
        description='"env": a launcher\'s variables. "tcp": address. "file": path. Default "env".',
    )
    address: Text | None = Field(default=None, description="tcp only, and needed there: host:port of rank 0.")
    path: Text | None = Field(
        default=None, description="file only, and needed there: a file that all processes can write."
    )
    rank: int | None = Field(
        default=None, ge=0, description="tcp and file: this process. None: a launcher's variable."
    )
    world_size: int | None = Field(
        default=None, ge=1, description="tcp and file: number of processes. None: a launcher's variable."
    )
    device_id: Annotated[Literal["auto", True, False], BeforeValidator(_no_number)] = Field(
        default="auto",
        description="Whether torch's default group is bound to the process's device: NCCL then connects all ranks with "
        'all at the start, and splits the groups of the dims from that. Default "auto": no, each group connects when '
        "it is first used.",
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        if not broken.touches("init"):
            used = _USED[self.init]
            for field in ("address", "path", "rank", "world_size"):
                if self.given(field) and field not in used:
                    yield self._no_effect(field)
            for field in ("address", "path"):
                if field in used and getattr(self, field) is None and not broken.touches(field):
                    yield Problem(
                        field,
                        f"missing for init = {toml(self.init)}",
                        given=f"no {field}",
                        expected="host:port of rank 0"
                        if field == "address"
                        else "a file that all processes can write",
                        hint=f"process.{field} = {_EXAMPLES[field]}",
                    )
        if self.address is not None:
            yield from _address_problems(self.address)
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            yield Problem(
                "rank",
                f"rank {self.rank} is not in a world of {self.world_size}",
                given=f"rank = {self.rank}, world_size = {self.world_size}",
                expected=f"0 to {self.world_size - 1}",
                hint=either(
                    [f"process.rank = {self.world_size - 1}", f"process.world_size = {self.rank + 1}"]
                ),
            )

    def _no_effect(self, field: str) -> Problem:
        fitting = [init for init, used in _USED.items() if field in used]
        return Problem(
            field,
            f"no effect with init = {toml(self.init)}",
            given=f"{field} = {toml(getattr(self, field))}",
            expected=f"{field} only where init is {' or '.join(map(toml, fitting))}",
            hint=either([f"remove process.{field}", *(f"process.init = {toml(init)}" for init in fitting)]),
        )


def _address_problems(address: str) -> Iterator[Problem]:
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):([0-9]{1,5})", address)
    if match is not None and 1 <= int(match.group(1)) <= 65535:
        return
    host = re.match(r"\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+", address)
    yield Problem(
        "address",
        f"{toml(address)} is not host:port",
        given=f"address = {toml(address)}",
        expected="a host name or address (IPv6 in brackets), and a port from 1 to 65535",
        hint=f'process.address = "{host.group() if host else "127.0.0.1"}:29500"',
    )


class NetworkConfig(Model):
    """`[network]`: which network interfaces carry the traffic, what NCCL logs about it, and its sockets."""

    interfaces: FrozenList[Text] = Field(
        default=(), description="Names of network interfaces for Gloo and NCCL. Default: theirs to choose."
    )
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(
        default=None, description="How much NCCL logs. None: what NCCL does by itself."
    )
    nccl_debug_subsys: FrozenList[str] = Field(
        default=(),
        description='With nccl_debug INFO or TRACE: the parts of NCCL that log; "^NAME" leaves one out.',
    )
    nccl_socket_nthreads: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Threads with which NCCL serves a connection over sockets. None: what NCCL chooses.",
    )
    nccl_nsocks_perthread: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Sockets that each of those threads has; at most 64 in all. None: what NCCL chooses.",
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        for index, word in enumerate(self.nccl_debug_subsys):
            name = word.removeprefix("^")
            if name not in _SUBSYSTEMS:
                near = nearest_name(name.upper(), _SUBSYSTEMS) or "ALL"
                mark = "^" if word.startswith("^") else ""
                mended = [*self.nccl_debug_subsys]
                mended[index] = mark + near
                yield Problem(
                    f"nccl_debug_subsys[{index}]",
                    f"NCCL has no part {toml(word)}",
                    given=f"nccl_debug_subsys = {toml(self.nccl_debug_subsys)}",
                    expected=f"parts out of {', '.join(_SUBSYSTEMS[:9])},\n{', '.join(_SUBSYSTEMS[9:])}",
                    hint=f"network.nccl_debug_subsys = {toml(mended)}",
                )
        silent = self.nccl_debug not in ("INFO", "TRACE") and not broken.touches("nccl_debug")
        if self.nccl_debug_subsys and silent:
            level = "no nccl_debug" if self.nccl_debug is None else f"nccl_debug = {toml(self.nccl_debug)}"
            yield Problem(
                "nccl_debug_subsys",
                f"no effect with {level}",
                given=f"nccl_debug_subsys = {toml(self.nccl_debug_subsys)}, {level}",
                expected='nccl_debug = "INFO" or "TRACE" beside it',
                hint=either(['network.nccl_debug = "INFO"', "remove network.nccl_debug_subsys"]),
            )
        yield from self._socket_problems()

    def nccl_settings(self) -> dict[str, object]:
        """What is set here for NCCL alone, by key; it has no effect where no group runs on NCCL."""
        keys = ("nccl_debug", "nccl_socket_nthreads", "nccl_nsocks_perthread")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}

    def _socket_problems(self) -> Iterator[Problem]:
        threads, sockets = self.nccl_socket_nthreads, self.nccl_nsocks_perthread
        if threads is not None and sockets is not None and threads * sockets > _MOST_SOCKETS:
            yield Problem(
                "nccl_nsocks_perthread",
                f"more than {_MOST_SOCKETS} sockets: {threads}*{sockets} = {threads * sockets}",
                given=f"nccl_socket_nthreads = {threads}, nccl_nsocks_perthread = {sockets}",
                expected=f"at most {_MOST_SOCKETS} sockets for a connection, which is NCCL's own limit",
                hint=f"network.nccl_nsocks_perthread = {_MOST_SOCKETS // threads}",
            )
