"""Which versions and backends does this installation have?"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.layout import Plan
from meshcomm.layout.names import did_you_mean
from meshcomm.mesh.devices import usable_backends, wanted_backends

_PACKAGES: Final = ("einops", "numpy", "pydantic", "rich", "typer")
_AVAILABLE: Final = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}


def versions() -> dict[str, str | None]:
    """Name -> version; None for what is not there."""
    found: dict[str, str | None] = {
        "meshcomm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if _AVAILABLE["nccl"]() else None,
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def backends() -> Facts:
    """Keys: distributed (whether torch has it), available (by name), registered, auto (by device)."""
    return {
        "distributed": dist.is_available(),
        "available": {name: bool(asked()) for name, asked in _AVAILABLE.items()},
        "registered": [name for name in dist.Backend.backend_list if name != "undefined"],
        "auto": dict(dist.Backend.default_device_backend_map),
    }


def backend_findings(plan: Plan, device: torch.device) -> Iterator[Finding]:
    """Whether this torch has every backend that the plan's groups want."""
    for backend, names in wanted_backends(plan, device).items():
        along = ", ".join(names)
        if dist.is_backend_available(backend):
            yield Finding("ok", f"{backend} serves {along} on {device.type}")
            continue
        usable = usable_backends()
        yield Finding(
            "error",
            f"this torch has no backend {backend}",
            given=f"{backend} for {along}, torch {torch.__version__}",
            expected="one of " + ", ".join(usable),
            hint=did_you_mean(backend, usable) or 'mesh.backend = "auto"',
        )
