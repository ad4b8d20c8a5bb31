"""Which backends do a plan's groups want, and does this torch have them?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.layout.names import did_you_mean
from meshcomm.mesh.groups import backend_on


def wanted_backends(plan: Plan, device: torch.device) -> dict[str, list[str]]:
    """The names of the families by the backend that serves them on `device`; only those with groups."""
    wanted: dict[str, list[str]] = {}
    for family in plan.families:
        if family.creates:
            wanted.setdefault(backend_on(family.options.backend, device), []).append(family.name)
    return wanted


def usable_backends() -> list[str]:
    """The names of the backends that this torch has."""
    return [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]


def check_backends(plan: Plan, device: torch.device) -> None:
    """Refuse a backend that this torch does not have. Raises LaunchError."""
    wanted = {
        backend_on(plan.defaults.backend, device): ["the default group"],
        **wanted_backends(plan, device),
    }
    for backend, names in wanted.items():
        if not dist.is_backend_available(backend):
            usable = usable_backends()
            raise LaunchError(
                f"this torch has no backend {backend}",
                given=f"{backend} for {', '.join(names)}, torch {torch.__version__}",
                expected=f"one of {', '.join(usable)}",
                hint=did_you_mean(backend, usable) or 'mesh.backend = "auto"',
            )
