"""Which versions, backends, devices and environment variables does a rank find here?"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.config import Config
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.mesh.devices import check_backends, check_devices, wanted_backends
from meshcomm.mesh.environment import Launch

_PACKAGES: Final = ("einops", "numpy", "pydantic", "rich", "typer")
_AVAILABLE: Final = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}
_PREFIXES: Final = (
    "CUDA_", "GLOO_", "LOCAL_", "MASTER_", "MESHCOMM_", "MPI_LOCAL", "MV2_COMM_", "NCCL_", "OMPI_COMM_",
    "PMI_", "PYTORCH_", "SLURM_", "TORCH", "UCC_", "UCX_",
)  # fmt: skip
_NAMES: Final = frozenset((
    "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RES_OPTIONS", "USE_LIBUV",
))  # fmt: skip
_SECRET_NAME: Final = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PRIVATE|COOKIE|CERT|SIGNATURE")
# user:password@ in an address, whatever the variable is called.
_SECRET_VALUE: Final = re.compile(r"://[^/\s@]*:[^/\s@]*@")


def versions() -> dict[str, str | None]:
    """Name -> version; None for what this torch was built without."""
    return {
        "meshcomm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if _AVAILABLE["nccl"]() else None,
        **{name: version(name) for name in _PACKAGES},
    }


def backends() -> Facts:
    """Keys: distributed (whether torch has it), available (by name), registered, auto (by device)."""
    return {
        "distributed": dist.is_available(),
        "available": {name: bool(asked()) for name, asked in _AVAILABLE.items()},
        "registered": [name for name in dist.Backend.backend_list if name != "undefined"],
        "auto": dict(dist.Backend.default_device_backend_map),
    }


def backend_findings(plan: Plan, device: torch.device) -> Iterator[Finding]:
    """Whether this torch has every backend that the plan names, as `init` would refuse it."""
    try:
        check_backends(plan)
    except LaunchError as error:
        yield Finding.of(error)
    for backend, names in wanted_backends(plan, device).items():
        if dist.is_backend_available(backend):
            yield Finding("ok", f"{backend} serves {', '.join(names)} on {device.type}")


def devices() -> Facts:
    """Keys: cuda (names of the devices), cpus (cores that this process may use), threads (torch's)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cuda": [torch.cuda.get_device_name(index) for index in range(count)],
        "cpus": cores,
        "threads": torch.get_num_threads(),
    }


def device_findings(
    settings: Config, device: torch.device, backend: str, launch: Launch
) -> Iterator[Finding]:
    """What `init` would refuse about devices, and more busy ranks than cores."""
    try:
        check_devices(settings, device, backend, launch)
    except LaunchError as error:
        yield Finding.of(error)
        return
    what, count = ("GPU", len(devices()["cuda"])) if device.type == "cuda" else ("core", devices()["cpus"])
    plural = "" if count == 1 else "s"
    given = f"{launch.local_size} rank{'' if launch.local_size == 1 else 's'} on {count} {what}{plural}"
    if launch.local_size > count:
        yield Finding(
            "warn",
            f"ranks share {what}s",
            given=given,
            expected=f"a {what} for each rank, where speed counts",
            hint=f"at most {count} rank{plural} on this host",
        )
    else:
        yield Finding("ok", f"a {what} for each rank", given=given)


def matter(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch, its backends, launchers and meshcomm read; secrets as `(hidden)`.

    >>> matter({"RANK": "0", "HOME": "/", "NCCL_TOKEN": "x", "MASTER_ADDR": "a"})
    {'MASTER_ADDR': 'a', 'NCCL_TOKEN': '(hidden)', 'RANK': '0'}
    """
    return {
        name: "(hidden)" if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(env.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


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
    if env.get("NCCL_SOCKET_IFNAME", "").startswith("lo") and "GLOO_SOCKET_IFNAME" not in env:
        yield Finding(
            "warn",
            "NCCL is told the loopback interface, Gloo is not",
            given=f"NCCL_SOCKET_IFNAME={env['NCCL_SOCKET_IFNAME']}",
            expected="the same interface for both",
            hint="[network] interfaces, and unset NCCL_SOCKET_IFNAME",
        )
