"""Launch facts that a watchdog needs: the identity of this process, how it ends, and where its reports go."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch.distributed as dist

from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.mesh.rank_failure import end_rank
from meshcomm.rendezvous.launcher import Launch, find_launch

# Characters that are not allowed in folder names.
_NO_NAME: Final = re.compile(r"[^\w.-]")


def launch_here() -> Launch:
    """Return the launch of this process, from the launcher or from torch's default group, which may not use the launcher's
    variables.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return find_launch(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(LaunchError):
        found = find_launch(os.environ)
        if (found.rank, found.world_size) == (rank, world):
            return found
    # Lightning sets only LOCAL_RANK.
    local = os.environ.get("LOCAL_RANK", "")
    return Launch("torch", rank, world, int(local) if local.isdecimal() else 0, 1, placed=local.isdecimal())


def reports_of(folder: str, moment: str) -> str:
    """Return this run's folder inside `folder`. The folder's name contains the time and, if known, the job."""
    named = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    job = next((name for name in named if name not in ("", "none")), "")
    return os.path.join(folder, _NO_NAME.sub("-", f"{moment}-{job}".rstrip("-"))) if folder else ""


def end_by(launch: Launch, label: str, error: MeshcommError) -> None:
    """End this process with `error`, which describes a call that is blocked in the backend."""
    # If the rank that caused the error has not reported a grace period after the timeout, it never will. But a rank that
    # this rank waits for may be about to report which rank it waits for.
    # Ranks of another job do not report for this job.
    asks = replace(launch, address=None) if isinstance(error, LaunchError) else launch
    end_rank(error, asks, label, patience_s=1.0)
