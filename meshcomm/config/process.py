"""How do the processes of a job find each other, and over which network? `[process]` and `[network]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from meshcomm.config.problems import Problem
from meshcomm.config.section import FrozenList, Section, Text, no_effect, rule, setting
from meshcomm.config.write import toml
from meshcomm.layout.names import nearest_name

# What NCCL's own parser knows; it ignores every other word without saying so.
_SUBSYSTEMS: Final = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL",
)  # fmt: skip

# NCCL ignores a pair of settings that asks for more sockets for one connection.
_MOST_SOCKETS: Final = 64
_ADDRESS: Final = "host:port of rank 0 (IPv6 in brackets), a port from 1 to 65535"


def _no_number(value: object) -> object:
    # 1 == True: the choices alone would let a number pass.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", "a number is no choice")
    return value


class ProcessConfig(Section):
    """`[process]`: how the processes of the job find each other. Default: by a launcher's variables."""

    place = "process"
    init: Literal["env", "tcp", "file"] = setting(
        "env", '"env": a launcher\'s variables. "tcp": address. "file": path.'
    )
    address: Text | None = setting(None, "tcp only, and needed there: host:port of rank 0.")
    path: Text | None = setting(None, "file only, and needed there: a file that all processes can write.")
    rank: int | None = setting(None, "tcp and file: this process. None: a launcher's variable.", ge=0)
    world_size: int | None = setting(
        None, "tcp and file: number of processes. None: a launcher's variable.", ge=1
    )
    device_id: Annotated[Literal["auto", True, False], BeforeValidator(_no_number)] = setting(
        "auto",
        "Whether torch's default group is bound to the process's device: NCCL then connects all ranks with "
        'all at the start, and splits the groups of the dims from that. Default "auto": no, each group connects when '
        "it is first used.",
    )


for _field, _ways in {"address": ["tcp"], "path": ["file"], "rank world_size": ["tcp", "file"]}.items():
    no_effect(
        ProcessConfig,
        _field,
        "init",
        lambda process, ways=_ways: process.init in ways,  # type: ignore[misc]
        f"init {' or '.join(map(toml, _ways))} beside it",
        *(f"process.init = {toml(way)}" for way in _ways),
    )


@rule(ProcessConfig, "init", "address", "path")
def _what_init_needs(process: ProcessConfig) -> Iterator[Problem]:
    needed = {
        "tcp": ("address", _ADDRESS, "127.0.0.1:29500"),
        "file": ("path", "a file that all processes can write", "/shared/rendezvous"),
    }
    field, expected, example = needed.get(process.init, ("init", "", ""))
    if getattr(process, field) is None:
        what = f"missing for init = {toml(process.init)}"
        yield Problem(what, expected, [f"process.{field} = {toml(example)}"], f"no {field}", field)


@rule(ProcessConfig, "address")
def _host_and_port(process: ProcessConfig) -> Iterator[Problem]:
    host = re.match(r"\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+", process.address or "")
    port = re.fullmatch(r":([0-9]{1,5})", (process.address or "")[host.end() if host else 0 :])
    if process.address and not (host and port and 1 <= int(port[1]) <= 65535):
        fit = f'process.address = "{host.group() if host else "127.0.0.1"}:29500"'
        yield Problem(f"{toml(process.address)} is not host:port", _ADDRESS, [fit])


@rule(ProcessConfig, "rank", "world_size")
def _rank_in_the_world(process: ProcessConfig) -> Iterator[Problem]:
    rank, world = process.rank, process.world_size
    if rank is not None and world is not None and rank >= world:
        ways = [f"process.rank = {world - 1}", f"process.world_size = {rank + 1}"]
        yield Problem(f"rank {rank} is not in a world of {world}", f"0 to {world - 1}", ways)


class NetworkConfig(Section):
    """`[network]`: which network interfaces carry the traffic, what NCCL logs about it, and its sockets."""

    place = "network"
    interfaces: FrozenList[Text] = setting(
        (), "Names of network interfaces for Gloo and NCCL. Default: theirs to choose."
    )
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = setting(
        None, "How much NCCL logs. None: what NCCL does by itself."
    )
    nccl_debug_subsys: FrozenList[str] = Field(
        default=(),
        description='With nccl_debug INFO or TRACE: the parts of NCCL that log; "^NAME" leaves one out.',
    )
    nccl_socket_nthreads: int | None = setting(
        None,
        "Threads with which NCCL serves a connection over sockets. None: what NCCL chooses.",
        ge=1,
        le=16,
    )
    nccl_nsocks_perthread: int | None = setting(
        None,
        "Sockets that each of those threads has; at most 64 in all. None: what NCCL chooses.",
        ge=1,
        le=16,
    )

    def nccl_settings(self) -> dict[str, object]:
        """What is set here for NCCL alone, by key; it has no effect where no group runs on NCCL."""
        keys = ("nccl_debug", "nccl_socket_nthreads", "nccl_nsocks_perthread")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


@rule(NetworkConfig, "nccl_debug_subsys")
def _parts_of_nccl(network: NetworkConfig) -> Iterator[Problem]:
    for index, word in enumerate(network.nccl_debug_subsys):
        name = word.removeprefix("^")
        if name in _SUBSYSTEMS:
            continue
        mended = [*network.nccl_debug_subsys]
        mended[index] = "^" * (name != word) + (nearest_name(name.upper(), _SUBSYSTEMS) or "ALL")
        yield Problem(
            f"NCCL has no part {toml(word)}",
            f"parts out of {', '.join(_SUBSYSTEMS[:9])},\n{', '.join(_SUBSYSTEMS[9:])}",
            [f"network.nccl_debug_subsys = {toml(mended)}"],
            key=f"nccl_debug_subsys[{index}]",
        )


no_effect(
    NetworkConfig,
    "nccl_debug_subsys",
    "nccl_debug",
    lambda network: network.nccl_debug in ("INFO", "TRACE") or not network.nccl_debug_subsys,
    'nccl_debug = "INFO" or "TRACE" beside it',
    'network.nccl_debug = "INFO"',
)


@rule(NetworkConfig, "nccl_nsocks_perthread", "nccl_socket_nthreads")
def _sockets_of_nccl(network: NetworkConfig) -> Iterator[Problem]:
    threads, sockets = network.nccl_socket_nthreads or 0, network.nccl_nsocks_perthread or 0
    if threads * sockets > _MOST_SOCKETS:
        yield Problem(
            f"more than {_MOST_SOCKETS} sockets: {threads}*{sockets} = {threads * sockets}",
            f"at most {_MOST_SOCKETS} sockets for a connection, which is NCCL's own limit",
            [f"network.nccl_nsocks_perthread = {_MOST_SOCKETS // threads}"],
        )
