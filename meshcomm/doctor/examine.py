"""Look at everything that one process can see, and say what is wrong."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict

import torch

from meshcomm.config import Config, NetworkConfig
from meshcomm.doctor import limits, network
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.doctor.installation import device_findings, devices, variable_findings, versions
from meshcomm.errors import ConfigError, LaunchError, MeshcommError
from meshcomm.layout import Plan
from meshcomm.mesh.devices import choose_backend, choose_device
from meshcomm.mesh.environment import Launch, find_launch

_ALONE = Launch("single", 0, 1, 0, 1)


def examine(settings: Config | None = None, world: int | None = None) -> Facts:
    """Everything that `meshcomm doctor` shows, as data that JSON can hold.

    Args:
        settings: the job's. None: only what needs no plan is looked at.
        world: number of processes; default the launcher's, or what the mesh's sizes say.

    Keys: findings, versions, host, interfaces, limits, launch (None without a launcher), ranks (None: see
    `examine_together`).

    Nothing is communicated. Takes as long as the name server does.
    """
    findings: list[Finding] = []
    launch = _ALONE
    try:
        launch = find_launch(os.environ)
    except LaunchError as error:
        findings.append(Finding.of(error))
    under = launch.kind != "single"
    present, name = network.interfaces(), socket.gethostname()
    plan, device = None, torch.device("cpu")
    if settings is not None:
        if not under:
            launch = _imagined(settings, world)
        try:
            plan, device = _plan(settings, launch.world_size if under else world, launch)
            findings += device_findings(settings, plan, device, launch)
        except MeshcommError as error:
            open_size = not under and world is None and -1 in settings.mesh.dims.values()
            findings.append(Finding.of(error, "warn" if open_size else "error"))
    asked = settings.network if settings is not None else NetworkConfig()
    findings += network.interface_findings(asked, present, os.environ)
    if not (launch.one_host or asked.interfaces or "GLOO_SOCKET_IFNAME" in os.environ):
        findings += network.name_findings(name, network.resolve(name), present)
    findings += network.lookup_findings(network.lookup_s())
    need = None if plan is None else limits.needs(plan, device)
    found = limits.limits(need, launch.local_size)
    findings += [*limits.limit_findings(found), *variable_findings(os.environ)]
    return {
        "findings": [each.facts() for each in findings],
        "versions": versions(),
        "host": {"name": name, "addresses": network.resolve(name), **devices()},
        "interfaces": [interface._asdict() for interface in present],
        "limits": [each._asdict() for each in found],
        "launch": asdict(launch) if under else None,
        "ranks": None,
    }


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


def _plan(settings: Config, world: int | None, launch: Launch) -> tuple[Plan, torch.device]:
    """The job's plan and device; raises MeshcommError where there is none."""
    if world is None and -1 in settings.mesh.dims.values():
        raise ConfigError(
            "limits and devices were not compared with the mesh: its size is open",
            given=f"{settings.source}, a size of -1, no --world",
            expected="a number of processes",
            hint="meshcomm doctor CONFIG --world N",
        )
    device = choose_device(settings.mesh.device, launch)
    return settings.resolved(world).plan(world).on(device.type, choose_backend(device)), device
