"""Does each rank on this host have a device?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from meshcomm.config import Config
from meshcomm.doctor.finding import Facts, Finding
from meshcomm.errors import LaunchError
from meshcomm.mesh.devices import check_devices
from meshcomm.mesh.environment import Launch


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
    here = devices()
    count = len(here["cuda"]) if device.type == "cuda" else here["cpus"]
    what = "GPU" if device.type == "cuda" else "core"
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
