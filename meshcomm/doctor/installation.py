"""Which versions, backends and devices does a rank find here?"""

from __future__ import annotations

import os
import platform
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
from meshcomm.mesh.devices import check_backends, check_devices
from meshcomm.mesh.environment import Launch

_PACKAGES: Final = ("einops", "numpy", "pydantic", "rich", "typer")


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
