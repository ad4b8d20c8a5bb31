"""Some steps of a run as a trace, as `train.trace_steps` says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, final

from meshcomm.mesh import Mesh

FILE: Final = "trace.json"


@final
class TracedSteps:
    """`with TracedSteps(...) as traced:`, then `traced.before(step)` and `traced.after(step)` around each.

    steps: the first and the last; None: none. The file is `folder`/trace.json; see Mesh.trace.
    Called by: every rank of the mesh.
    """

    def __init__(self, mesh: Mesh, steps: tuple[int, int] | None, folder: Path) -> None:
        self._mesh = mesh
        self._steps = range(steps[0], steps[1] + 1) if steps is not None else range(0)
        self._path = folder / FILE
        self._open = False
        self._stack = ExitStack()

    def before(self, step: int) -> None:
        """A step begins; a run that was resumed may begin inside."""
        if step in self._steps and not self._open:
            self._stack.enter_context(self._mesh.trace(self._path))
            self._open = True

    def after(self, step: int) -> None:
        """A step is done."""
        if self._open and step == self._steps[-1]:
            self._open = False
            self._stack.close()

    def __enter__(self) -> TracedSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
