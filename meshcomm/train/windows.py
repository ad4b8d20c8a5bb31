"""Which steps are looked at closely: traced on all ranks together, or watched by torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, final

import torch
from torch.profiler import ProfilerActivity, profile

from meshcomm.config import TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.run_files import PROFILE, TRACE, told
from meshcomm.transport.torch_private import profiling

_OPERATORS = 20


class _Window(NamedTuple):
    steps: tuple[int, int] | None
    make: Callable[[], contextlib.AbstractContextManager[object]]
    inside: contextlib.ExitStack


@final
class Windows:
    """`train.trace_steps` and `train.profile_steps` of a run whose first `done` steps are over.

    Called by: every rank, `before` and `after` each step. Leaving it ends what is open.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, done: int) -> None:
        out = Path(train.out)
        self._first = done + 1
        self._stack = contextlib.ExitStack()
        watched = not train.profile_ranks or mesh.rank in train.profile_ranks
        self._windows = [
            _Window(train.trace_steps, lambda: mesh.trace(out / TRACE), contextlib.ExitStack()),
            _Window(
                train.profile_steps if watched else None,
                lambda: profiled(out / PROFILE, mesh.rank, mesh.device),
                contextlib.ExitStack(),
            ),
        ]

    def before(self, step: int) -> None:
        """Open what begins with this step; a run that was resumed may begin inside."""
        for steps, make, inside in self._windows:
            first, last = steps or (0, -1)
            if first <= step <= last and step in (first, self._first):
                self._stack.push(inside)
                inside.enter_context(make())

    def after(self, step: int) -> None:
        """Close what ends with this step."""
        for steps, _, inside in self._windows:
            if steps is not None and step == steps[1]:
                inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


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
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        watched.export_chrome_trace(str(folder / f"rank{rank}.json"))
        by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = watched.key_averages().table(sort_by=by, row_limit=_OPERATORS, max_name_column_width=60)
        (folder / f"rank{rank}.txt").write_text(table + "\n", encoding="utf-8")
