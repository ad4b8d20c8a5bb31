"""Windows of steps that are traced on all ranks together, or watched by torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch.profiler import ProfilerActivity, profile

from meshcomm.config import TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.run_files import PROFILE, TRACE, naming
from meshcomm.transport.torch_private import profiling

_OPERATORS = 20


@final
class Windows(contextlib.ExitStack):
    """`train.trace_steps` and `train.profile_steps` of a run whose first `done` steps are over.

    Called by: every rank, `before` and `after` each step. Leaving it ends what is open.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, done: int) -> None:
        super().__init__()
        out, self._first = Path(train.out), done + 1
        self._windows: list[tuple[tuple[int, int], partial[Any], contextlib.ExitStack]] = []
        if train.trace_steps:
            trace = partial(mesh.trace, out / TRACE)
            self._windows.append((train.trace_steps, trace, contextlib.ExitStack()))
        if train.profile_steps and (not train.profile_ranks or mesh.rank in train.profile_ranks):
            profiles = partial(profiled, out / PROFILE, mesh.rank, mesh.device)
            self._windows.append((train.profile_steps, profiles, contextlib.ExitStack()))

    def before(self, step: int) -> None:
        """Open what begins with this step; a run that was resumed may begin inside."""
        for (first, last), make, window in self._windows:
            if step == max(first, self._first) <= last:
                self.enter_context(window).enter_context(make())

    def after(self, step: int) -> None:
        """Close what ends with this step."""
        for (_, last), _, window in self._windows:
            if step == last:
                window.close()


@contextlib.contextmanager
def profiled(folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Watch the block with torch.profiler; then write `folder`/rankN.json, a Chrome trace, and rankN.txt.

    rankN.txt has the most expensive operators, by their own time on the device, or else on the CPU.
    Called by: any rank, alone. Ending it waits for the device.
    Raises:    TrainingError where another profiler runs in this process, or a file cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # torch would end the other one without an error.
    if profiling():
        raise TrainingError(
            f"torch.profiler cannot be started on rank {rank}",
            given="a profiler that runs already",
            expected="no other profiler in this process",
            hint="remove train.profile_steps, or the other one",
        )
    watched = profile(activities=activities)
    watched.start()
    try:
        yield
    finally:
        watched.stop()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        watched.export_chrome_trace(str(folder / f"rank{rank}.json"))
        by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = watched.key_averages().table(sort_by=by, row_limit=_OPERATORS, max_name_column_width=60)
        (folder / f"rank{rank}.txt").write_text(table + "\n", encoding="utf-8")
