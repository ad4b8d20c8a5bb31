"""The sections `[process]`, `[network]` and `[topology]`: rendezvous, network interfaces, and machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from meshcomm.config.problems import Problem
from meshcomm.config.section import FrozenList, NoEffect, Section, Text
from meshcomm.config.write import toml

# The subsystem names that NCCL's own parser knows. NCCL silently ignores all other names.
_SUBSYSTEMS: Final = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL",
)  # fmt: skip

# NCCL ignores both socket settings if together they exceed this number of sockets per connection.
_MOST_SOCKETS: Final = 64
_ADDRESS: Final = "host:port of rank 0 (IPv6 in brackets), a port from 1 to 65535"


def _no_number(value: object) -> object:
    # Because 1 == True, the Literal type would accept a number.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise PydanticCustomError("literal_error", '"auto", true or false')
    return value


def _host_and_port(address: str) -> str:
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]+):([0-9]{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise PydanticCustomError("address", _ADDRESS)
    return address


def _nccl_part(word: str) -> str:
    name = word.removeprefix("^")
    if name not in _SUBSYSTEMS:
        sign = "^" * (name != word)
        choices = ", ".join(toml(sign + known) for known in _SUBSYSTEMS)
        raise PydanticCustomError("literal_error", choices)
    return word


def _what_init_needs(process: ProcessConfig) -> Iterator[Problem]:
    examples = {"tcp": ("address", "127.0.0.1:29500"), "file": ("path", "/shared/rendezvous")}
    field, example = examples.get(process.init, ("init", ""))
    if getattr(process, field) is None:
        expected = _ADDRESS if field == "address" else "a file that all processes can write"
        ways = [f"process.{field} = {toml(example)}"]
        yield Problem(field, f"missing for init = {toml(process.init)}", expected, ways, f"no {field}")


class ProcessConfig(Section):
    """`[process]`: the rendezvous of the job's processes. By default, the launcher's environment variables are used."""

    place = "process"
    rules = (
        NoEffect("address", "init", ("tcp",), 'init = "tcp"'),
        NoEffect("path", "init", ("file",), 'init = "file"'),
        NoEffect("rank world_size", "init", ("tcp", "file"), 'init = "tcp"'),
        _what_init_needs,
    )
    init: Literal["env", "tcp", "file"] = "env"
    """How processes find each other: "env" uses the launcher's variables, "tcp" uses `address`, "file" uses `path`."""
    address: Annotated[Text, AfterValidator(_host_and_port)] | None = Field(
        default=None, examples=["127.0.0.1:29500"]
    )
    """With tcp, required: host:port of rank 0."""
    path: Text | None = None
    """With file, required: a file that all processes can write to."""
    rank: int | None = Field(default=None, ge=0)
    """With tcp or file: the rank of this process. If omitted, the launcher's variables determine it."""
    world_size: int | None = Field(default=None, ge=1)
    """With tcp or file: number of processes. If omitted, the launcher's variables determine it."""
    device_id: Annotated[Literal["auto", True, False], BeforeValidator(_no_number)] = "auto"
    """Bind torch's default group to the process's device. NCCL then connects all ranks at startup and creates the dims'
    groups by splitting the default group. With the default "auto", the group is not bound, and each group connects on
    first use.
    """


def _sockets_of_nccl(network: NetworkConfig) -> Iterator[Problem]:
    threads, sockets = network.nccl_socket_nthreads or 0, network.nccl_nsocks_perthread or 0
    if threads * sockets > _MOST_SOCKETS:
        what = f"more than {_MOST_SOCKETS} sockets: {threads}*{sockets} = {threads * sockets}"
        expected = f"at most {_MOST_SOCKETS} sockets per connection, which is NCCL's own limit"
        ways = [f"network.nccl_nsocks_perthread = {_MOST_SOCKETS // threads}"]
        given = network.written("nccl_nsocks_perthread nccl_socket_nthreads")
        yield Problem("nccl_nsocks_perthread", what, expected, ways, given)


class NetworkConfig(Section):
    """`[network]`: network interfaces, and NCCL's logging and sockets."""

    place = "network"
    rules = (
        NoEffect("nccl_debug_subsys", "nccl_debug", ("INFO", "TRACE"), 'nccl_debug = "INFO"'),
        _sockets_of_nccl,
    )
    interfaces: FrozenList[Text] = ()
    """Names of the network interfaces that Gloo and NCCL use. By default, the backends choose."""
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL's log level. If omitted, NCCL decides."""
    nccl_debug_subsys: FrozenList[Annotated[str, AfterValidator(_nccl_part)]] = ()
    """With nccl_debug INFO or TRACE: the NCCL subsystems that log. "^NAME" excludes one."""
    nccl_socket_nthreads: int | None = Field(default=None, ge=1, le=16)
    """Number of threads per socket connection in NCCL. If omitted, NCCL chooses."""
    nccl_nsocks_perthread: int | None = Field(default=None, ge=1, le=16)
    """Number of sockets per socket thread in NCCL, at most 64 sockets per connection. If omitted, NCCL chooses."""

    def nccl_settings(self) -> dict[str, object]:
        """Return the settings of this section that affect only NCCL, by key."""
        keys = ("nccl_debug", "nccl_socket_nthreads", "nccl_nsocks_perthread")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


class Link(Section):
    """`[topology.links.NAME]`: latency and bandwidth between two ranks over this link."""

    latency_us: float = Field(ge=0, examples=[10.0])
    """Microseconds until the first byte arrives."""
    bandwidth_gbytes_s: float = Field(gt=0, examples=[50.0])
    """Gigabytes (10^9 bytes) per second, in one direction, per rank."""


class Links(Section):
    """`[topology.links]`: the links within a node, between nodes in a rack, and between racks."""

    node: Link | None = None
    """Link between ranks on the same node. If omitted, the link is unknown."""
    rack: Link | None = None
    """Link between nodes in the same rack; requires nodes_per_rack. If omitted, the network link is used."""
    network: Link | None = None
    """Link between ranks on different nodes. If omitted, the link is unknown."""


class TopologyConfig(Section):
    """`[topology]`: the placement of ranks on nodes, and the link speeds. Both are unknown by default."""

    place = "topology"
    rules = (
        NoEffect("links nodes_per_rack", "ranks_per_node", way="ranks_per_node = 8"),
        NoEffect("links.rack", "nodes_per_rack", way="nodes_per_rack = 4"),
    )
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks per node. Ranks r with the same r // ranks_per_node share a node. If omitted, the placement is unknown."""
    nodes_per_rack: int | None = Field(default=None, ge=1)
    """Nodes per rack. Nodes n with the same n // nodes_per_rack share a rack. If omitted, racks are ignored."""
    links: Links = Links()
    """Latency and bandwidth of each link. Default: unknown."""
    call_us: float = Field(default=0.0, ge=0)
    """Fixed overhead of each call in microseconds, in addition to its messages."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Accelerators per node, for `meshcomm lint`. If omitted, the number is unknown."""
    memory_gbytes: float | None = Field(default=None, gt=0)
    """Memory per rank in gigabytes (10^9 bytes), for `meshcomm tune` and `lint`. If omitted, it is unknown."""
    memory_bandwidth_gbytes_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth per rank in GB/s (10^9 bytes), at which `meshcomm dryrun` times operators other than matmuls. If
    omitted, they take no time, and `tflops` stands for whole steps."""
    tflops: float | None = Field(default=None, gt=0)
    """Throughput per rank in 10^12 FLOP/s, for `meshcomm tune` and `dryrun`: of whole steps, or with
    `memory_bandwidth_gbytes_s` of matmuls alone. If omitted, it is unknown."""
