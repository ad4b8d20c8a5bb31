"""Examine this process, its host and its installation, and list the problems found."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.config import Config, NetworkConfig
from meshcomm.doctor import host
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.layout import Plan
from meshcomm.mesh.devices import check_backends, check_devices, choose_backend, choose_device
from meshcomm.predict.lint import footprint
from meshcomm.rendezvous.launcher import Launch, find_launch
from meshcomm.show.units import count

_ALONE: Final = Launch("single", 0, 1, 0, 1)
_PACKAGES: Final = ("einops", "numpy", "pydantic", "rich", "typer")
_DEBUGGING: Final = Finding(
    "warn",
    "TORCH_DISTRIBUTED_DEBUG makes torch check every collective with a second collective",
    given="TORCH_DISTRIBUTED_DEBUG=DETAIL",
    expected="unset, OFF or INFO for full speed",
    hint="unset TORCH_DISTRIBUTED_DEBUG",
)


def examine(settings: Config | None = None, world: int | None = None) -> Facts:
    """Return the output of `meshcomm doctor`, as JSON-serializable data.

    settings: the job's settings. If omitted, checks that need a plan are skipped.
    world: the number of processes; defaults to the launcher's number, or to the product of the mesh's sizes.
    In the result, launch is None without a launcher, and ranks is always None: see `examine_together`.
    The function does not communicate. How long it takes depends on the name server.
    """
    findings: list[Finding] = []
    launch = _ALONE
    try:
        launch = find_launch(os.environ)
    except LaunchError as error:
        findings.append(Finding.of(error))
    under = launch.kind != "single"
    present, name = host.interfaces(), socket.gethostname()
    need = None
    if settings is not None:
        if not under:
            launch = _imagined(settings, world)
        if not under and world is None and settings.mesh.count(None) is None:
            findings.append(_open_size(settings))
        else:
            try:
                plan, device = _plan(settings, launch.world_size if under else world, launch)
                findings += _device_findings(settings, plan, device, launch)
                mesh = settings.mesh.model_copy(update={"device": device.type})
                local = settings.model_copy(update={"mesh": mesh})
                need = footprint(local, plan, plan.layout.world_size).descriptors
            except MeshcommError as error:
                findings.append(Finding.of(error))
    network = settings.network if settings is not None else NetworkConfig()
    findings += host.interface_findings(network, present, os.environ)
    if not (launch.one_host or network.interfaces or "GLOO_SOCKET_IFNAME" in os.environ):
        findings += host.name_findings(name, host.resolve(name), present)
    findings += host.lookup_findings(host.lookup_s())
    limit = host.descriptors(need)
    findings += host.limit_findings(limit)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        findings.append(_DEBUGGING)
    return {
        "findings": [finding.facts() for finding in findings],
        "versions": versions(),
        "host": {"name": name, "addresses": host.resolve(name), **_devices()},
        "interfaces": [interface._asdict() for interface in present],
        "limits": [{"name": "file descriptors", **limit._asdict()}],
        "launch": asdict(launch) if under else None,
        "ranks": None,
    }


def _open_size(settings: Config) -> Finding:
    return Finding(
        "warn",
        "limits and devices were not compared with the mesh, because its size is open",
        given=f"{settings.source}, a size of -1, no --world-size",
        expected="a number of processes",
        hint="meshcomm doctor CONFIG --world-size N",
    )


def _imagined(settings: Config, world: int | None) -> Launch:
    """Return the Launch of the first rank of a job that has not started. All of its ranks are assumed to be on this host
    unless ranks_per_node is set.
    """
    size = 1 if world is None else world
    if world is None:
        with suppress(MeshcommError):
            size = settings.plan(None).layout.world_size
    return Launch("single", 0, size, 0, min(size, settings.topology.ranks_per_node or size))


def _plan(settings: Config, world: int | None, launch: Launch) -> tuple[Plan, torch.device]:
    """Return the job's plan and device. Raises MeshcommError if there is no valid plan or device."""
    device = choose_device(settings.mesh.device, launch)
    return settings.resolved(world).plan(world).on(device.type, choose_backend(device)), device


def versions() -> dict[str, str | None]:
    """Return a mapping from name to version; None for libraries that this build of torch lacks.

    `backends`: the backends that this build of torch has.
    """
    backends = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    return {
        "meshcomm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "backends": " ".join(filter(dist.is_backend_available, backends)),
        **{name: version(name) for name in _PACKAGES},
    }


def _devices() -> Facts:
    """Return a mapping with `cuda`, the device names, and `cores`, the number of cores that this process may use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cuda": [torch.cuda.get_device_name(index) for index in range(count)], "cores": cores}


def _device_findings(settings: Config, plan: Plan, device: torch.device, launch: Launch) -> Iterator[Finding]:
    """Yield findings for backends and devices that `init` would reject, and if ranks outnumber devices or cores."""
    try:
        check_backends(plan)
    except LaunchError as error:
        yield Finding.of(error)
    try:
        check_devices(settings, device, plan.defaults.backend, launch)
    except LaunchError as error:
        yield Finding.of(error)
        return
    here = _devices()
    unit, devices = ("GPU", len(here["cuda"])) if device.type == "cuda" else ("core", here["cores"])
    if launch.local_size > devices:
        yield Finding(
            "warn",
            f"ranks share {unit}s",
            given=f"{launch.local_size} ranks on {count(devices, unit)}",
            expected=f"one {unit} per rank for full speed",
            hint=f"at most {count(devices, 'rank')} on this host",
        )
