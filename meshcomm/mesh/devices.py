"""The device and the backends of this process, and checks that this host has both."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

import torch
import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.layout.names import nearest_name
from meshcomm.mesh.source import Settings
from meshcomm.rendezvous.launcher import Launch
from meshcomm.transport.support import STREAM_ORDERED, backend_on, by_device
from meshcomm.transport.torch_private import bound_device


def choose_device(wanted: str, launch: Launch) -> torch.device:
    """Return this process's device: cuda if available, otherwise cpu.

    The device index is that of the device to which torch's default group is bound. If the group is not bound, the
    index is that of the program's current device or, if none is set, the local rank modulo the number of visible devices.
    """
    kind = wanted
    if wanted == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    present = _devices(kind)
    if present == 0:
        raise LaunchError(
            f"this host has no {kind} device",
            given=f'device = "{wanted}"',
            expected=f"a {kind} device, and a torch build that supports it",
            hint='mesh.device = "cpu", or "auto"',
        )
    bound = bound_device() if dist.is_initialized() else None
    if bound is not None and bound.type == kind and bound.index is not None:
        return bound
    module = torch.get_device_module(kind)
    if module.is_initialized() and (chosen := module.current_device()):
        return torch.device(kind, chosen)
    if present > 1 and not launch.placed:
        raise LaunchError(
            f"which of {present} {kind} devices is for this process?",
            given=f"rank {launch.rank} of {launch.world_size}, {present} devices, no local rank",
            expected="LOCAL_RANK, SLURM_LOCALID or MPI's own, one visible device, or a current device",
            hint="torchrun, which sets LOCAL_RANK, or torch.cuda.set_device(n) before meshcomm.init",
        )
    return torch.device(kind, launch.local_rank % present)


def refuse_shared(store: dist.Store, rank: int, plan: Plan, device: torch.device) -> None:
    """Raise LaunchError if another rank has the same device. NCCL refuses that unless NCCL_HOSTID or
    NCCL_MULTI_RANK_GPU_ENABLE is set. Takes one store operation."""
    allowed = "NCCL_HOSTID" in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"
    if device.type != "cuda" or allowed:
        return
    backends = {backend_on(family.options.backend, device) for family in plan.families if family.creates}
    if not backends & STREAM_ORDERED:
        return
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return  # this device has no identity to compare
    identity = f"{socket.gethostname()}/{uuid}"
    first = store.compare_set(f"devices/device/{identity}", "", str(rank)).decode()
    if first != str(rank):
        raise LaunchError(
            f"ranks {first} and {rank} share one {device.type} device",
            given=f"{identity}, which rank {rank} calls {device}",
            expected="one device for each rank: NCCL refuses two ranks on one device",
            hint='a launcher that sets LOCAL_RANK, CUDA_VISIBLE_DEVICES per rank, or mesh.device = "cpu"',
        )


def choose_backend(device: torch.device) -> str:
    """Return the backend for "auto": the default group's backend if there is one, otherwise torch's default backend for
    the device.
    """
    if dist.is_initialized():
        backend = str(dist.get_backend_config()) if dist.get_backend() == "undefined" else dist.get_backend()
        if ":" in backend or dist.is_backend_available(backend):
            return backend
    return str(dist.get_default_backend_for_device(device.type))


def check_host(settings: Settings, world_size: int) -> None:
    """Raise LaunchError for a device or a backend that no rank of a job on this host could use, before ranks are started.

    A script may add devices and backends that torch does not know, so only those are checked that torch knows.
    """
    launch = Launch("given", world_size - 1, world_size, world_size - 1, world_size, placed=True)
    with suppress(RuntimeError):
        torch.get_device_module(None if settings.mesh.device == "auto" else settings.mesh.device)
        device = choose_device(settings.mesh.device, launch)
        plan = settings.plan(world_size).on(device.type, choose_backend(device))
        check_devices(settings, device, plan.defaults.backend, launch)
        check_backends(plan, registered=dist.Backend.backend_list)


def check_backends(plan: Plan, registered: Collection[str] | None = None) -> None:
    """Raise LaunchError for a backend that this build of torch lacks, even one for an unused device or a dim of one rank.

    registered: if given, only these backends are checked.
    """
    chosen = {plan.defaults.backend: ("the default group", "mesh.backend")}
    for family in plan.families:
        key = f"mesh.options.{family.name}.backend"
        chosen.setdefault(family.options.backend, (family.name, key))
    for backend, (name, key) in chosen.items():
        parts = by_device(backend)
        if registered is not None:
            parts = {kind: part for kind, part in parts.items() if part in registered}
        for kind, part in parts.items():
            if not dist.is_backend_available(part):
                backends = [
                    backend for backend in dist.Backend.backend_list if backend != dist.Backend.UNDEFINED
                ]
                of_device = dist.Backend.backend_capability
                usable = [
                    backend
                    for backend in backends
                    if dist.is_backend_available(backend)
                    and (kind or plan.device) in of_device.get(backend, ())
                ]
                near = None if part in backends else nearest_name(part, usable)
                raise LaunchError(
                    f"this installation of torch has no backend {part}",
                    given=f"{backend} for {name}, torch {torch.__version__}",
                    expected=f"one of {', '.join(usable)}"
                    + (f", or a torch that was built with {part}" if part in backends else ""),
                    hint=f'{key} = "{backend.replace(part, near) if near else "auto"}"',
                )
        for kind, part in parts.items():
            if kind not in ("", "cpu") and not _devices(kind):
                raise LaunchError(
                    f"this host has no {kind} device for the backend {part}",
                    given=f"{backend} for {name}",
                    expected=f"a {kind} device, or a backend for the devices of this host",
                    hint=f'{key} = "{by_device(backend).get("cpu", "auto")}"',
                )
    if dist.is_initialized() and dist.get_backend() == "fake" != plan.defaults.backend:
        raise LaunchError(
            "torch's default group uses the fake backend: the other ranks do not exist",
            given=f"backend {plan.defaults.backend} for the groups of the mesh",
            expected="the fake backend for them too",
            hint='leave backend out, or init_process_group("gloo")',
        )


def check_devices(settings: Settings, device: torch.device, backend: str, launch: Launch) -> None:
    """Raise LaunchError for settings that the chosen device does not support, and for two NCCL ranks on one device."""
    if device.type == "cpu":
        useless = {
            "process.device_id = true": settings.process.device_id is True,
            **{f"network.{key}": "nccl" not in backend for key in settings.network.nccl_settings()},
        }
        for setting, is_given in useless.items():
            if is_given:
                raise LaunchError(
                    f"{setting} has no effect: this host has no accelerator",
                    given=f"{setting}, device auto = cpu, backend {backend}",
                    expected="a cuda device, or the setting left out",
                    hint=f"remove {setting}",
                )
    if "nccl" not in backend or device.type != "cuda":
        return
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        raise LaunchError(
            "TORCH_NCCL_BLOCKING_WAIT makes a wait abort its communicator at the timeout, before any rank is asked",
            given=f"TORCH_NCCL_BLOCKING_WAIT={os.environ['TORCH_NCCL_BLOCKING_WAIT']}",
            expected="the variable unset: meshcomm names the missing ranks at the timeout",
            hint="unset TORCH_NCCL_BLOCKING_WAIT",
        )
    present = torch.cuda.device_count()
    # A process that sees a single device may be the only one that uses it; `refuse_shared` checks that.
    if present > 1 and (launch.local_rank >= present or launch.local_size > present):
        raise LaunchError(
            f"{max(launch.local_size, launch.local_rank + 1)} ranks on a host with {present} cuda device(s)",
            given=f"local rank {launch.local_rank} of {launch.local_size}, backend {backend}",
            expected="one device for each rank: NCCL refuses two ranks on one device",
            hint=f'--nproc-per-node {present}, or mesh.device = "cpu"',
        )


def _devices(kind: str) -> int:
    """Return the number of devices of this kind that the process sees."""
    try:
        return int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # torch does not know this kind
        return 0
