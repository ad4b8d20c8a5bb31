"""Examine a running job: gather every rank's host and address through the store, and report them on rank 0."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

from meshcomm.config import Config, NetworkConfig, ProcessConfig, TopologyConfig
from meshcomm.doctor import host
from meshcomm.doctor.examine import examine, versions
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import MeshcommError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.devices import choose_device
from meshcomm.predict.links import discovered
from meshcomm.predict.lint import scattered
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.exposure import ExposedRendezvous, exposed_store, is_loopback
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import meet
from meshcomm.rendezvous.store import prefixed
from meshcomm.transport.variables import gloo_defaults, network_variables

_AGREED: Final = ("meshcomm", "torch", "python")
_SHOWN: Final = ("rank", "coords", "host", "interface", "address", "device")


def examine_together(settings: Config | None, launch: Launch, timeout_s: float) -> tuple[Facts | None, int]:
    """Run `examine` on every host of a job, and collect facts about each rank.

    Called by: every rank. The first rank on each host examines the host; rank 0 gathers the results.
    Returns: on rank 0, information about its host, the findings from all hosts, and an entry in `ranks` for each rank;
        None on other ranks. The second value is the exit code, which is the same on all ranks.
    Raises: LaunchError if the rendezvous fails; MeshcommError on the other ranks if rank 0 does not respond in time.
    """
    examined = examine(settings) if launch.local_rank == 0 else None
    row = _row(settings, launch)
    row["findings"] = examined["findings"] if examined is not None else []
    process = settings.process if settings is not None else ProcessConfig()
    with warnings.catch_warnings():
        # The exposed rendezvous is reported below as a finding.
        warnings.simplefilter("ignore", ExposedRendezvous)
        joined = meet(process, launch, timeout_s)
    # Each rank counts its examinations, including those before a restart, so the count is the same on all ranks.
    count = joined.store.add(keys.EXAMINED.format(joined.rank), 1)
    store: Any = prefixed(f"meshcomm/doctor{count}", joined.store)
    wait = timedelta(seconds=timeout_s)
    store.set_timeout(wait)
    store.set(f"row/{joined.rank}", json.dumps(row))
    if joined.rank != 0:
        code = int(store.get("code"))
        store.set(f"left/{joined.rank}", "")
        return None, code
    rows, findings = _gather(store, joined.world_size, wait)
    assert examined is not None
    findings += judge(rows, None if len(rows) < joined.world_size else settings)
    one_host = len({row["host"] for row in rows}) == 1
    joined_launch = joined.launch
    if (
        process.init == "env"
        and one_host
        and joined_launch.address is not None
        and joined_launch.port is not None
    ):
        exposed = exposed_store(
            joined_launch.address, joined_launch.port, "MASTER_ADDR=127.0.0.1", launch.world_size
        )
        if exposed is not None:
            findings.append(Finding.of(exposed, "warn"))
    code = int(any(finding.level == "error" for finding in findings))
    store.set("code", str(code))
    # This process may host the store, so it must leave last.
    if came := [f"left/{row['rank']}" for row in rows if row["rank"] != 0]:
        store.wait(came, wait)
    ranks = [{key: row[key] for key in _SHOWN} for row in rows]
    return {**examined, "ranks": ranks, "findings": [finding.facts() for finding in findings]}, code


def _row(settings: Config | None, launch: Launch) -> Facts:
    present = host.interfaces()
    name = socket.gethostname()
    network = settings.network if settings is not None else NetworkConfig()
    # The environment as a mesh would set it.
    env = {**gloo_defaults(launch.one_host), **os.environ, **network_variables(network)}
    interface, address = host.chosen(present, env, launch.one_host, name)
    coords, device = None, "unknown"
    if settings is not None:
        # On this host's first rank, `examine` already reports such an error as a finding.
        with suppress(MeshcommError):
            device = str(choose_device(settings.mesh.device, launch))
            layout = settings.plan(launch.world_size).layout
            coords = layout.coords(launch.rank) if launch.rank in layout else None
    return {
        "rank": launch.rank,
        "coords": coords,
        "host": name,
        "interface": interface,
        "address": address,
        "device": device,
        "hint": host.interface_hint(present),
        **{name: versions()[name] for name in _AGREED},
    }


def _gather(store: Any, world_size: int, wait: timedelta) -> tuple[list[Facts], list[Finding]]:
    keys = [f"row/{rank}" for rank in range(world_size)]
    findings: list[Finding] = []
    arrived = list(range(world_size))
    try:
        store.wait(keys, wait)
    except RuntimeError:
        arrived = [rank for rank in arrived if store.check([keys[rank]])]
        gone = sorted({*range(world_size)} - {*arrived})
        findings.append(
            Finding(
                "error",
                f"{ranks_text(gone)} of {world_size} never arrived",
                given=f"{ranks_text(arrived)} within {wait.total_seconds():g} s",
                expected=f"all of ranks 0 to {world_size - 1}",
                hint="check how the missing ranks were started, and their first error",
            )
        )
    rows = [json.loads(store.get(keys[rank])) for rank in arrived]
    for row in rows:
        where = "" if row["rank"] == 0 else f"{row['host']}: "
        of_rank = map(Finding.read, row["findings"])
        findings += [finding._replace(what=where + finding.what) for finding in of_rank]
    return rows, findings


def judge(rows: Sequence[Facts], settings: Config | None = None) -> Iterator[Finding]:
    """Yield findings about the given ranks' addresses, placement and versions. settings: None if some ranks have not
    arrived.
    """
    hosts = _by(rows, "host")
    lost = [row for row in rows if is_loopback(row["address"])]
    if len(hosts) > 1 and lost:
        addresses = {name: " ".join(_by(on, "address")) for name, on in hosts.items()}
        yield Finding(
            "error",
            f"other hosts would connect to {_ranks(lost)} at the loopback address",
            given="\n".join(f"{name}: {_ranks(on)} at {addresses[name]}" for name, on in hosts.items()),
            expected=f"addresses that all {len(hosts)} hosts can reach",
            hint=f"{' or '.join(_by(lost, 'hint'))}, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    if sum(one["host"] != other["host"] for one, other in pairwise(rows)) >= len(hosts):
        yield from _scattered(hosts, settings)
    for name in _AGREED:
        seen = _by(rows, name)
        if len(seen) > 1:
            yield Finding(
                "error",
                f"ranks have different versions of {name}",
                given="; ".join(f"{_ranks(ranks)}: {version}" for version, ranks in seen.items()),
                expected="one version on all ranks",
                hint="the same environment on every host",
            )


def _scattered(hosts: Mapping[str, Sequence[Facts]], settings: Config | None) -> Iterator[Finding]:
    """Yield a finding about hosts whose ranks are not consecutive, unless the mesh accounts for them by rank_order."""
    given = "; ".join(f"{host}: {_ranks(on)}" for host, on in hosts.items())
    nodes = {row["rank"]: node for node, on in enumerate(hosts.values()) for row in on}
    plan = None
    # `examine` reports an invalid mesh as a finding.
    with suppress(MeshcommError):
        plan = None if settings is None else settings.plan(len(nodes))
    if plan is None:
        yield Finding(
            "warn",
            "ranks of one host are not consecutive: the last dims cross the network",
            given=given,
            expected="ranks 0, 1, 2, ... on the first host, the next ranks on the second",
            hint="srun -m block, mpirun --map-by slot, or mesh.rank_order",
        )
    elif finding := scattered(
        plan, discovered(TopologyConfig(), {}, 0, [nodes[rank] for rank in sorted(nodes)])
    ):
        yield Finding("warn", finding.what, given, finding.expected, finding.hint)


def _by(rows: Sequence[Facts], key: str) -> dict[str, list[Facts]]:
    """Return the rows grouped by their value of `key`."""
    values = dict.fromkeys(row[key] for row in rows)
    return {value: [row for row in rows if row[key] == value] for value in values}


def _ranks(rows: Sequence[Facts]) -> str:
    return ranks_text([row["rank"] for row in rows])
