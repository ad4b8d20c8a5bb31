"""What do the modules of a user draw from torch's default generators, on each rank of a mesh?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.parallel.tensor.modules import Attention
from meshcomm.transport.torch_private import outside_graphs

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Of the largest element: what ranks may differ by that computed the same thing.
_ROUNDING = 1e-2


@final
class Draws:
    """Sets the default generators, the CPU's and the device's, before each part of a forward pass.

    What is drawn follows from (seed, step, microbatch, block), with microbatches counted over all ranks along data and
    shard and blocks through all stages: the same as in one process with the same train.microbatch. Ranks along context
    have other tokens of the same microbatch, so there their coord is a part of it; along tensor all draw the same,
    but for what `drop_apart` finds. Nothing is remembered: a run that goes on draws what it would have drawn, and a
    block that is computed again what it drew before.

    seed:  of the run.
    apart: dims along which ranks have other tokens of the same samples.
    """

    def __init__(self, mesh: Mesh, seed: int, apart: Iterable[str] = ()) -> None:
        self._mesh, self._seed = mesh, seed
        self._apart = tuple(dim for dim in apart if mesh.size(dim) > 1)
        self._step, self._first = "", 0
        # Of the block that runs: what it was seeded by, and how often something was drawn apart in it since.
        self._key: tuple[int | str, ...] = ()
        self._often = 0
        self._blocks: Counter[int] = Counter()
        # False where a block is computed again: nobody else is there to compare with.
        self.comparing = True

    @contextmanager
    def step(self, name: str, first: int) -> Iterator[None]:
        """Forward passes of one step in here; the generators are put back after it. first: this rank's microbatch."""
        self._step, self._first = name, first
        with self._forked():
            yield

    def microbatch(self, number: int, place: str) -> None:
        """Before a forward pass of a stage. number: of this rank's microbatches; place: which stage, in words."""
        self._blocks.clear()
        self.seed((self._seed, self._step, self._first + number, place))

    def seeded(self, number: int, block: Callable[..., Any]) -> Callable[..., Any]:
        """The number-th block of the model, for one forward pass: called again, it draws the same again."""
        self._blocks[number] += 1
        key = (*self._key[:3], f"block {number}", self._blocks[number])
        again = False

        def run(*args: Any, **named: Any) -> Any:
            nonlocal again
            self.seed(key)
            self.comparing, again = not again, True
            try:
                return block(*args, **named)
            finally:
                self.comparing = True

        return run

    def seed(self, key: tuple[int | str, ...]) -> None:
        """Set the generators to what follows from `key`, and from where this rank is."""
        self._key, self._often = key, 0
        self._set(self._mesh.seed(*key, along=self._apart))

    @contextmanager
    def on_this_rank(self, dim: str) -> Iterator[None]:
        """What is drawn in here differs along `dim`; what is drawn after it does not follow from it."""
        self._often += 1
        with self._forked():
            self._set(self._mesh.seed(*self._key, self._often, along=(*self._apart, dim)))
            yield

    def _forked(self) -> AbstractContextManager[None]:
        device = self._mesh.device
        if device.type == "cpu":
            return torch.random.fork_rng([])
        return torch.random.fork_rng([device], device_type=device.type)

    def _set(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._mesh.device.type != "cpu":
            # Of the current device, which is this rank's; a seed is set without a look at the device.
            torch.get_device_module(self._mesh.device).manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        return self


def drop_apart(module: nn.Module, split: TensorSplit, draws: Draws) -> None:
    """Have the dropouts of a module that is split along the tensor's dim draw alike where all its ranks have the same
    activations, and differently where each has a part of them.

    Which is which is not known of a module that knows nothing of meshes: the first activations that a dropout gets are
    compared along the dim. What is dropped by `torch.nn.functional.dropout` is not seen, and dropped alike.
    """
    if split.size == 1:
        return
    for part in module.modules():
        if (isinstance(part, DROPOUTS) and part.p > 0) or (isinstance(part, Attention) and part.dropout > 0):
            kind = type(part)
            part.__class__ = type(kind.__name__, (_Apart, kind), {"__module__": __name__})
            part.meshcomm_draws, part.meshcomm_along = draws, split  # type: ignore[assignment]
            part.meshcomm_parts = {}  # type: ignore[assignment]


class _Apart:
    """A dropout, or attention with one, of a module that is split."""

    meshcomm_draws: Draws
    meshcomm_along: TensorSplit
    # By the shape of an activation: whether ranks have parts of it.
    meshcomm_parts: dict[torch.Size, bool]
    training: bool

    @outside_graphs
    def forward(self, *args: Any, **named: Any) -> Any:
        """As without a mesh. The first activation of each shape is compared: this waits for the device."""
        run: Any = super().forward  # type: ignore[misc]
        # Attention drops weights of its heads, of which each rank has some.
        apart = isinstance(self, Attention) or self._parts(*args, *named.values())
        if not self.training or not apart:
            return run(*args, **named)
        with self.meshcomm_draws.on_this_rank(self.meshcomm_along.dim):
            return run(*args, **named)

    def _parts(self, x: Tensor) -> bool:
        known = self.meshcomm_parts.get(x.shape)
        if known is None and self.training and self.meshcomm_draws.comparing:
            known = _differs(self.meshcomm_along, x.detach())
            if known is not None:
                self.meshcomm_parts[x.shape] = known
        return bool(known)


def _differs(split: TensorSplit, x: Tensor) -> bool | None:
    """Whether ranks have different activations; None where they have nothing but zeros, of which none can be dropped."""
    ends = split.mesh.all_reduce(split.dim, torch.stack([x, -x]).double(), op="max")
    most, fewest = ends[0], -ends[1]
    largest = ends.max()
    if not largest:
        return None
    return bool((most - fewest).max() > _ROUNDING * largest)
