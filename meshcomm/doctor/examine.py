"""Look at everything that can be looked at from one process, and say what is well and what is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict

import torch

from meshcomm.comm.diagnosis import first_line
from meshcomm.config import Config, NetworkConfig
from meshcomm.doctor import limits as limit
from meshcomm.doctor import network
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.doctor.installation import (
    backend_findings,
    backends,
    device_findings,
    devices,
    matter,
    variable_findings,
    versions,
)
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.layout import Plan
from meshcomm.mesh.devices import choose_backend, choose_device
from meshcomm.mesh.environment import Launch, find_launch, gloo_defaults, network_variables
from meshcomm.transport.support import support_table

_ALONE = Launch("single", 0, 1, 0, 1)


def examine(settings: Config | None = None, world: int | None = None) -> Facts:
    """Everything that `meshcomm doctor` shows, as data that JSON can hold.

    Args:
        settings: the job's. None: only what needs no plan is looked at.
        world: number of processes; default the launcher's, or what the mesh's sizes say.

    Keys: versions, backends, support (what each backend reduces), launch, host (name, addresses,
    interfaces, lookup_s), devices, gloo_group (cost of one), limits, environment (secrets hidden),
    ranks (None: see `examine_together`), findings.

    Alone: nothing is communicated; the port of `[process]` is bound for a moment, and two Gloo
    groups of one process are made and dropped. Takes as long as the name server does.
    """
    findings: list[Finding] = []
    env = dict(os.environ)
    launch, plan, device = _ALONE, None, torch.device("cpu")
    try:
        launch = find_launch(env)
    except LaunchError as error:
        findings.append(Finding.of(error))
    under = launch.kind != "single"
    if settings is not None:
        if not under:
            launch = _imagined(settings, world)
        found = _plan(settings, world, launch if under else None)
        if isinstance(found, Finding):
            findings.append(found)
        else:
            plan, device = found
            findings += backend_findings(plan, device)
            findings += device_findings(settings, device, plan.defaults.backend, launch)
    present = network.interfaces()
    name = socket.gethostname()
    addresses = network.resolve(name)
    asked = settings.network if settings is not None else NetworkConfig()
    variables = with_network(env, asked, launch.one_host)
    broken = [] if settings is None else list(network.interface_findings(settings, present, env))
    findings += broken
    if settings is not None and launch.rank == 0:
        findings += network.process_findings(settings.process, present, launch.one_host)
    told = bool(asked.interfaces or env.get("GLOO_SOCKET_IFNAME"))
    findings.append(network.name_finding(name, addresses, present, launch.one_host, told))
    seconds = network.lookup_s()
    findings.append(network.lookup_finding(seconds))
    cost = None
    if backends()["available"]["gloo"] and not any(each.level == "error" for each in broken):
        try:
            cost = limit.gloo_cost(variables)
        except RuntimeError as error:
            interface = variables.get("GLOO_SOCKET_IFNAME") or "not set"
            findings.append(
                Finding(
                    "error",
                    "Gloo finds no address to listen on",
                    given=f"{first_line(error)}, GLOO_SOCKET_IFNAME {interface}",
                    expected="an interface of this host with an address",
                    hint=network.interface_hint(present),
                )
            )
    need = None if plan is None or cost is None else limit.needs(plan, device, cost)
    found_limits = limit.limits(need, launch.local_size)
    findings += limit.limit_findings(found_limits)
    findings += variable_findings(env)
    return {
        "versions": versions(),
        "backends": backends(),
        "support": support_table(),
        "launch": asdict(launch) if under else None,
        "host": {
            "name": name,
            "addresses": addresses,
            "interfaces": [interface._asdict() for interface in present],
            "lookup_s": seconds,
        },
        "devices": devices(),
        "gloo_group": cost and cost._asdict(),
        "limits": [each._asdict() for each in found_limits],
        "environment": matter(env),
        "ranks": None,
        "findings": [each.facts() for each in findings],
    }


def with_network(env: Mapping[str, str], asked: NetworkConfig, one_host: bool) -> dict[str, str]:
    """The variables that tell Gloo where to listen, as a mesh would set them. `[network]` wins."""
    variables = {**gloo_defaults(one_host), **{k: v for k, v in env.items() if k == "GLOO_SOCKET_IFNAME"}}
    return {**variables, **network_variables(asked)}


def _imagined(settings: Config, world: int | None) -> Launch:
    """The first rank of a job that nobody has started yet; all on this host unless nodes are given."""
    size = world
    if size is None:
        try:
            size = settings.plan(None).layout.world_size
        except MeshcommError:
            size = 1
    per_node = settings.topology.ranks_per_node
    return Launch("single", 0, size, 0, size if per_node is None else min(size, per_node))


def _plan(settings: Config, world: int | None, launch: Launch | None) -> tuple[Plan, torch.device] | Finding:
    """The job's plan, or why there is none."""
    if launch is None and world is None and -1 in settings.mesh.dims.values():
        return Finding(
            "warn",
            "limits and devices were not compared with the mesh: its size is open",
            given=f"{settings.source}, a size of -1, no --world",
            expected="a number of processes",
            hint="meshcomm doctor CONFIG --world N",
        )
    try:
        device = choose_device(settings.mesh.device, launch or _ALONE)
        size = launch.world_size if launch is not None else world
        return settings.resolved(size).plan(size).on(device.type, choose_backend(device)), device
    except MeshcommError as error:
        return Finding.of(error)
