"""A training after a rank was lost and replaced: the unfinished step is completed or undone, and the new rank gets its state.

A rank that has left the exchange at the end of a step knows that every rank has summed its gradients. So if one of
the others has got so far, all of them apply the step; else none has, and the step is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.tensor import local
from meshcomm.parallel.tensor.parameters import Kept
from meshcomm.parallel.torch_private import offsets

State = dict[str, Tensor | Kept]


@final
class Survivor:
    """What a rank holds of a training, from the loss of a rank until its state is in a new engine.

    engine: its own, or None on a rank that has none, as a new one. shared: keeps its module, which the new engine has too.
    facts: returns what a new rank needs to know of the run, see `Steps.facts`.
    """

    def __init__(
        self, engine: Engine | None = None, *, shared: bool = False, facts: Callable[[], Any] | None = None
    ) -> None:
        self.engine, self._shared, self._facts_of = engine, shared, facts
        self.facts: Any = None
        self.step = -1 if engine is None else engine.reached.applied
        self.state: State | None = None
        # Which parts of the model the state is of.
        self._parts: list[Any] = []

    @torch.no_grad()
    def settle(self, mesh: Mesh) -> None:
        """Have all ranks that hold something hold the state after the same step, the latest that any of them applied.

        Called by: every rank of the reopened mesh, also the new ones. Harmless when repeated.
        """
        engine = self.engine
        reached = None if engine is None else engine.reached
        outcome = None
        if engine is not None and reached is not None and 0 < reached.decided == reached.applied:
            outcome = (reached.decided, engine.outcome())
        mine = {
            "step": self.step,
            "outcome": outcome,
            "broken": bool(reached and reached.decided > reached.applied),
        }
        every = of_every_rank(mesh, mine)
        latest = max(each["step"] for each in every)
        if engine is not None and reached is not None and self.state is None:
            told = next(
                (each["outcome"] for each in every if each["outcome"] and each["outcome"][0] == latest), None
            )
            if reached.applied == latest - 1 and reached.summed == latest and told is not None:
                engine.complete(latest, told[1])
                if engine.scheduler is not None:
                    engine.scheduler.step()
            else:
                engine.undo()
            self.step = reached.applied
            self.facts = None if self._facts_of is None else self._facts_of()
            self.state, self._parts = engine.saved_state(), _signature(engine)
            if self._shared:
                # The new engine is filled through the same module.
                self.state = {name: _copy(each) for name, each in self.state.items()}
                for each in engine.gradients:
                    if isinstance(each, GradientSync):
                        each.close()
        # A rank that is behind, or one that was lost while it applied a step, holds nothing that fits.
        if self.step != latest or any(each["broken"] for each in every):
            self.step, self.state = -1, None

    def restore(self, engine: Engine) -> Any:
        """Give the new engine the state, this rank's own or that of a rank with the same parts; returns `facts`.

        None, on every rank, where some rank's parts are held by nobody any more.
        Called by: every rank of the mesh.
        """
        mesh = engine.mesh
        wanted = _signature(engine)
        every = of_every_rank(mesh, (wanted, None if self.state is None else self._parts))
        known = dict(zip(ranks_of(mesh), every, strict=True))
        pairs = _pairs(mesh, known)
        if pairs is None:
            return None
        held = self.state
        # In a smaller mesh a rank may have other parts than before.
        if held is not None and self._parts == wanted:
            engine.put_back(_kinds(held), lambda room: _fill(room, held), self.step)
        for dim, giver, to in pairs:
            src, dst = mesh.get_coords(giver)[dim], mesh.get_coords(to)[dim]
            if giver == mesh.rank and held is not None:
                _send(mesh, dim, dst, held, self.step)
            elif to == mesh.rank:
                kinds, step = mesh.objects.recv(dim, src=src)
                engine.put_back(kinds, partial(_receive, mesh, dim, src, kinds), step)
        tells = mesh.rank == min(rank for rank, (_, parts) in known.items() if parts is not None)
        return next(filter(None, of_every_rank(mesh, self.facts if tells else None)), {})


def _copy(held: Tensor | Kept) -> Tensor | Kept:
    return Kept(held.tensor.clone(), held.parts) if isinstance(held, Kept) else held.clone()


def _tensor(held: Tensor | Kept) -> Tensor:
    """This rank's part, in memory as it is."""
    return local((held.tensor if isinstance(held, Kept) else held).detach())


def _kinds(state: State) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        name: ((held.tensor if isinstance(held, Kept) else held).dtype, tuple(held.shape))
        for name, held in state.items()
    }


def _signature(engine: Engine) -> list[Any]:
    """Equal on ranks that hold the same parts of the model."""
    return [
        (name, tuple(local(each.detach()).shape), offsets(each) if isinstance(each, DTensor) else ())
        for name, each in engine.named_parameters()
    ]


def _pairs(mesh: Mesh, known: Mapping[int, tuple[Any, Any]]) -> list[tuple[str, int, int]] | None:
    """(dim, giver, receiver) for each rank that does not hold its parts: the giver does. None if some rank has no giver.

    known: by rank, the parts that it wants and those that it holds.
    """
    found = []
    for to in (rank for rank, (wanted, held) in known.items() if held != wanted):
        coords = mesh.get_coords(to)
        beside = (
            (dim, mesh.get_rank(**{**coords, dim: coord}))
            for dim, size in mesh.layout.dims.items()
            for coord in range(size)
        )
        pair = next(((dim, giver) for dim, giver in beside if known[giver][1] == known[to][0]), None)
        if pair is None:
            return None
        found.append((*pair, to))
    return found


def _send(mesh: Mesh, dim: str, dst: int, state: State, step: int) -> None:
    mesh.objects.send(dim, (_kinds(state), step), dst)
    for held in state.values():
        x = _tensor(held)
        if x.numel():
            mesh.send(dim, x.to(mesh.device).contiguous(), dst)


def _receive(mesh: Mesh, dim: str, src: int, kinds: Mapping[str, Any], room: State) -> None:
    for name in kinds:
        into = _tensor(_room(room, name))
        if into.numel():
            came = mesh.recv(dim, torch.empty_like(into, device=mesh.device).contiguous(), src=src)
            into.copy_(came)


def _fill(room: State, state: State) -> None:
    for name in room:
        _tensor(room[name]).copy_(_tensor(_room(state, name)))


def _room(state: State, name: str) -> Tensor | Kept:
    if name not in state:
        raise TrainingError(
            f"the state of a rank does not fit the new engine: {name}",
            given=f"{len(state)} tensors without {name}",
            expected="the same model and optimizer as before the rank was lost",
        )
    return state[name]
