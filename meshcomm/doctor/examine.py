"""Examine this process, its host and its installation, and list problems."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.config import Config, NetworkConfig
from meshcomm.doctor import limits, network
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import ConfigError, LaunchError, MeshcommError
from meshcomm.layout import Plan
from meshcomm.mesh.devices import check_backends, check_devices, choose_backend, choose_device
from meshcomm.mesh.environment import Launch, find_launch

_ALONE: Final = Launch("single", 0, 1, 0, 1)
_PACKAGES: Final = ("einops", "numpy", "pydantic", "rich", "typer")


def examine(settings: Config | None = None, world: int | None = None) -> Facts:
    """Everything that `meshcomm doctor` shows, as data that JSON can hold.

    Args:
        settings: the job's. If omitted, checks that need a plan are skipped.
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
            given=f"{settings.source}, a size of -1, no --world-size",
            expected="a number of processes",
            hint="meshcomm doctor CONFIG --world-size N",
        )
    device = choose_device(settings.mesh.device, launch)
    return settings.resolved(world).plan(world).on(device.type, choose_backend(device)), device


def versions() -> dict[str, str | None]:
    """Name -> version; None for what this torch was built without. `backends`: those that torch has."""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return {
        "meshcomm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "backends": " ".join(filter(dist.is_backend_available, known)),
        **{name: version(name) for name in _PACKAGES},
    }


def devices() -> Facts:
    """Keys: cuda (names of the devices), cores (that this process may use)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cuda": [torch.cuda.get_device_name(index) for index in range(count)], "cores": cores}


def device_findings(settings: Config, plan: Plan, device: torch.device, launch: Launch) -> Iterator[Finding]:
    """What `init` would refuse about backends and devices, and more busy ranks than devices or cores."""
    try:
        check_backends(plan)
    except LaunchError as error:
        yield Finding.of(error)
    try:
        check_devices(settings, device, plan.defaults.backend, launch)
    except LaunchError as error:
        yield Finding.of(error)
        return
    here = devices()
    what, count = ("GPU", len(here["cuda"])) if device.type == "cuda" else ("core", here["cores"])
    if launch.local_size > count:
        plural = "" if count == 1 else "s"
        yield Finding(
            "warn",
            f"ranks share {what}s",
            given=f"{launch.local_size} ranks on {count} {what}{plural}",
            expected=f"a {what} for each rank, where speed counts",
            hint=f"at most {count} rank{plural} on this host",
        )


def variable_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that people forget in their shell."""
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding(
            "warn",
            "TORCH_DISTRIBUTED_DEBUG makes torch check every collective by a second one",
            given=f"TORCH_DISTRIBUTED_DEBUG={env['TORCH_DISTRIBUTED_DEBUG']}",
            expected="it unset, OFF or INFO where speed counts",
            hint="unset TORCH_DISTRIBUTED_DEBUG",
        )
