"""What a watchdog asks of the launch: who this process is, how it ends, and where its reports go."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch.distributed as dist

from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.mesh.environment import Launch, find_launch
from meshcomm.mesh.rank_failure import end_rank

# What a folder's name does not hold.
_NO_NAME: Final = re.compile(r"[^\w.-]")


def launch_here() -> Launch:
    """Who this process is: by the launcher, or by torch's default group, which need not know the launcher's variables."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return find_launch(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(LaunchError):
        found = find_launch(os.environ)
        if (found.rank, found.world_size) == (rank, world):
            return found
    # Lightning sets LOCAL_RANK alone.
    local = os.environ.get("LOCAL_RANK", "")
    return Launch("torch", rank, world, int(local) if local.isdecimal() else 0, 1, placed=local.isdecimal())


def reports_of(folder: str, moment: str) -> str:
    """The run's own folder in `folder`: its time and, where the launcher names it, its job."""
    named = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    job = next((name for name in named if name not in ("", "none")), "")
    return os.path.join(folder, _NO_NAME.sub("-", f"{moment}-{job}".rstrip("-"))) if folder else ""


def end_by(launch: Launch, label: str, error: MeshcommError) -> None:
    """End this process by `error`, which its backend holds it in."""
    # A cause that is still silent, a grace after the timeout, will not speak; but one that this rank waits for
    # may be about to say whom it waits for itself.
    # Ranks of another job are no ranks that speak for this one.
    asks = replace(launch, address=None) if isinstance(error, LaunchError) else launch
    end_rank(error, asks, label, patience_s=1.0)
