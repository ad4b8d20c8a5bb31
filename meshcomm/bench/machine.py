"""On what was it measured? Facts without which a figure says nothing."""

from __future__ import annotations

import os
import platform
import socket
import zlib
from datetime import UTC, datetime
from typing import Any

import torch

from meshcomm import __version__
from meshcomm.mesh import Mesh


def machine_facts(mesh: Mesh) -> dict[str, Any]:
    """This rank's host and device, and the number of hosts of the mesh.

    Called by: every rank of the mesh; of the host, what rank 0 says is shown.
    load: the system's load average over a minute, before anything is measured.
    """
    on_cpu = mesh.device.type == "cpu"
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hosts": _hosts(mesh),
        "cpus": os.cpu_count() or 1,
        "load": os.getloadavg()[0],
        "processor": platform.machine(),
        "system": platform.system(),
        "device": "cpu" if on_cpu else _device_name(mesh.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "meshcomm": __version__,
    }
    if mesh.device.type == "cuda":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _hosts(mesh: Mesh) -> int:
    """How many host names the ranks have."""
    mine = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64, device=mesh.device)
    for dim in mesh.dims:
        mine = mesh.all_gather(dim, mine)
    return len(set(mine.tolist()))
