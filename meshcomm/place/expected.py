"""What the model of place expects of one given configuration: calls and bytes of a step, by dims."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshcomm.config import Config
from meshcomm.costs import Operation
from meshcomm.place.sizes import BASE, Sizes
from meshcomm.place.traffic import REPLICA, flows
from meshcomm.place.workload import workload


class Expected(NamedTuple):
    """One kind of call. dims: whose ranks make it together. calls, size_bytes: of the largest rank in a
    step, and of one call; microbatches is in them. what: in words.
    """

    dims: tuple[str, ...]
    operation: Operation
    calls: int
    size_bytes: float
    what: str

    @property
    def step_bytes(self) -> float:
        """Of all calls of a step."""
        return self.calls * self.size_bytes


def expected(settings: Config, world: int) -> list[Expected]:
    """The calls of a step along dims of size 2 or more, for the sizes that `settings` has itself.

    Raises ConfigError where it does not train.
    """
    work = workload(settings)
    mesh, parallel = settings.resolved(world).mesh, settings.parallel
    assert parallel is not None
    view = parallel.expert_view(mesh.views)
    sizes = {**mesh.dims, **(mesh.views[view] if view is not None else {})}
    dims: dict[str, tuple[str, ...]] = {part: (dim,) for part, dim in parallel.parts.items()}
    dims[REPLICA] = parallel.expert_gradient_dims(mesh.views)
    played = {part: np.array([sizes[dims[part][0]] if part in dims else 1]) for part in (*BASE, "expert")}
    number = work.global_batch // (parallel.copies(mesh.dims) * work.microbatch)
    listed = []
    for flow in flows(work, Sizes(**played, microbatches=np.array([number]))):
        along = tuple(dim for part in flow.along for dim in dims[part] if sizes[dim] > 1)
        calls = round(float(flow.calls[0])) * (number if flow.each_microbatch else 1)
        if along and calls:
            listed.append(Expected(along, flow.operation, calls, float(flow.size_bytes[0]), flow.what))
    return listed
