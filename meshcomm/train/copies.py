"""Keep copies of a rank's state in memory, send the state to other ranks, and load it into an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.state import Kinds
from meshcomm.parallel.tensor import local
from meshcomm.parallel.tensor.parameters import Kept, parts_of
from meshcomm.parallel.torch_private import offsets

_AT_ONCE_BYTES: Final = 32 << 20


@final
@dataclass(frozen=True)
class Held:
    """The state of a rank after a step.

    parts: identifies the parts of the model that the state contains, see `parts_held`.
    tensors: the rank's parts of the tensors in `kinds`.
    facts: the rank's facts about the run, see `Steps.facts`.
    own: whether the state is this rank's own, and not a copy of another rank's state.
    """

    step: int
    parts: str
    kinds: Kinds
    tensors: dict[str, Tensor]
    facts: Any = None
    own: bool = True

    @classmethod
    def of(cls, engine: Engine, facts: Any, on: torch.device | None = None) -> Held:
        """Return the state of an engine, either its own tensors or copies of them on a device."""
        state = engine.saved_state()
        return cls(
            engine.reached.applied,
            parts_held(engine),
            {name: (_held(each).dtype, tuple(each.shape)) for name, each in state.items()},
            {
                name: _part(each) if on is None else _part(each).to(on, copy=True)
                for name, each in state.items()
            },
            facts,
        )

    def put_into(self, engine: Engine) -> None:
        """Load the state into the engine."""

        def fill(room: dict[str, Tensor | Kept]) -> None:
            for name, into in room.items():
                _check(name, self.tensors)
                _part(into).copy_(self.tensors[name])

        engine.put_back(self.kinds, fill, self.step)

    def send(self, mesh: Mesh, dim: str, dst: int) -> None:
        """Send the state to the rank at coord `dst`, which must call `receive`."""
        mesh.objects.send(dim, (self.kinds, self.step), dst)
        for x in self.tensors.values():
            if x.numel():
                mesh.send(dim, x.to(mesh.device).contiguous(), dst)


def receive(engine: Engine, dim: str, src: int) -> None:
    """Load the state that coord `src` sends into the engine."""
    mesh = engine.mesh
    kinds, step = mesh.objects.recv(dim, src=src)

    def fill(room: dict[str, Tensor | Kept]) -> None:
        for name in kinds:
            _check(name, room)
            into = _part(room[name])
            if into.numel():
                came = mesh.recv(dim, torch.empty_like(into, device=mesh.device).contiguous(), src=src)
                into.copy_(came)

    engine.put_back(kinds, fill, step)


def parts_held(engine: Engine) -> str:
    """Return a string that is equal on ranks that hold the same parts of the model."""
    parts = [
        (name, tuple(local(each.detach()).shape), _place(each)) for name, each in engine.named_parameters()
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _place(parameter: Tensor) -> Sequence[object]:
    if isinstance(parameter, DTensor):
        return offsets(parameter)
    return [(part.dim, part.mesh.coord(part.dim)) for part in parts_of(parameter)]


@final
class Copies:
    """Copies of the state of this rank and of the previous rank along a dim, in host memory.

    A rank may be lost before all ranks have made their copies. The previous copy is therefore kept until the end of the next
    step. No rank finishes that step before all ranks have finished copying.
    """

    def __init__(self) -> None:
        # elastic.copy_every, or 0 if no rank is replaced.
        self.every = 0
        # Copies by step, in the order in which they were created.
        self._of: dict[int, list[Held]] = {}
        self._first = True

    @property
    def held(self) -> list[Held]:
        """All copies, starting with the copies of this rank's own state."""
        return sorted((each for held in self._of.values() for each in held), key=lambda each: not each.own)

    def begin_again(self) -> None:
        """Make a copy at the next step, because some ranks are new and have no copies."""
        self._first = True

    def clear(self) -> None:
        """Drop all copies, because a different training run follows."""
        self._of.clear()
        self._first = True

    def after_step(self, engine: Engine, facts: Callable[[], Any] | None = None, due: bool = False) -> None:
        """Make a copy if `elastic.copy_every` requests one after this step, or if `due` is set.

        Called by: every rank, after each step.
        """
        dim = _along(engine) if self.every else None
        if dim is None:
            return
        while len(self._of) > 1:
            del self._of[next(iter(self._of))]
        step = engine.reached.applied
        if not (self._first or due or step % self.every == 0):
            return
        own = Held.of(engine, None if facts is None else facts(), torch.device("cpu"))
        held = [own, _exchanged(engine.mesh, dim, own)]
        if engine.mesh.is_async and (lost := engine.mesh.elastic.lost()) is not None:
            # The data received may be invalid.
            raise lost
        self._of.pop(step, None)
        self._of[step], self._first = held, False


def _along(engine: Engine) -> str | None:
    """Return the outermost dim along which ranks hold different parts of the model.

    If there is no such dim, return one along which ranks hold the same parts.
    """
    sizes, parallel = engine.mesh.layout.dims, engine.sections.parallel
    dims = [dim for dim, size in sizes.items() if size > 1]
    apart = [dim for dim in dims if dim not in (parallel.data, parallel.context)]
    return next(iter([*apart, *dims]), None)


def _exchanged(mesh: Mesh, dim: str, own: Held) -> Held:
    """Send `own` to the next rank along `dim`, and receive the state of the previous rank."""
    at, size = mesh.coord(dim), mesh.size(dim)
    after, before = (at + 1) % size, (at - 1) % size
    head = (own.step, own.parts, own.kinds, {name: tuple(x.shape) for name, x in own.tensors.items()})
    # Both calls block until the other rank is ready, so some rank must receive first.
    if at % 2 == 0:
        mesh.objects.send(dim, head, after)
    step, parts, kinds, shapes = mesh.objects.recv(dim, src=before)
    if at % 2:
        mesh.objects.send(dim, head, after)
    found = {name: torch.empty(shape, dtype=kinds[name][0]) for name, shape in shapes.items()}
    # Both ranks divide the tensors in the same way, so their n-th messages match.
    none: list[Tensor] = []
    pairs = zip_longest(_messages(own.tensors.values()), _messages(found.values()), fillvalue=none)
    for going, coming in pairs:
        sizes = [x.numel() for x in coming]
        sends = [(torch.cat([x.reshape(-1).to(mesh.device) for x in going]), after)] if going else []
        recvs = [(coming[0].new_empty(sum(sizes), device=mesh.device), before)] if coming else []
        for received in mesh.exchange(dim, sends, recvs):
            for into, part in zip(coming, received.split(sizes), strict=True):
                into.copy_(part.view(into.shape))
    return Held(step, parts, kinds, found, own=False)


def _messages(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the tensors into messages of a single dtype and limited size, because they may not all fit on the device."""
    found: list[list[Tensor]] = []
    open_sets: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for x in (x for x in tensors if x.numel()):
        together, room = open_sets.get(x.dtype, ([], 0))
        if room < x.nbytes:
            together, room = [], _AT_ONCE_BYTES
            found.append(together)
        together.append(x)
        open_sets[x.dtype] = together, room - x.nbytes
    return found


def _held(each: Tensor | Kept) -> Tensor:
    return each.tensor if isinstance(each, Kept) else each


def _part(each: Tensor | Kept) -> Tensor:
    """Return this rank's part without copying it."""
    return local(_held(each).detach())


def _check(name: str, state: Mapping[str, Any]) -> None:
    if name not in state:
        raise TrainingError(
            f"the state of a rank does not fit the new engine: {name}",
            given=f"{len(state)} tensors without {name}",
            expected="the same model and optimizer as before the rank was lost",
        )
