"""After a rank is lost and replaced, complete or undo the interrupted step, and give the new rank its state.

A rank that has finished the exchange at the end of a step knows that every rank has summed its gradients. If any rank
has reached this point, all ranks therefore apply the step. Otherwise no rank has applied it, and the step is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, final

import torch

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync, Sharded
from meshcomm.train.copies import Held, parts_held, receive


@final
class Survivor:
    """The training state that a rank holds after a loss of ranks, until a new engine receives it.

    engine: the current engine; None on a rank without an engine, such as a new rank.
    shared: whether the new engine uses the same module.
    facts: a function that returns the facts that a new rank needs about the run, see `Steps.facts`.
    """

    def __init__(
        self, engine: Engine | None = None, *, shared: bool = False, facts: Callable[[], Any] | None = None
    ) -> None:
        self._engine, self._shared, self._facts_of = engine, shared, facts
        self._step = -1 if engine is None else engine.reached.applied
        self._held: Held | None = None

    @torch.no_grad()
    def settle(self, mesh: Mesh) -> None:
        """Bring all ranks that hold a state to the same step, the latest step that any of them has applied.

        Called by: every rank of the reopened mesh, including new ranks. May be called again.
        """
        engine = self._engine
        reached = None if engine is None else engine.reached
        outcome = None
        if engine is not None and reached is not None and 0 < reached.decided == reached.applied:
            outcome = (reached.decided, engine.outcome())
        mine = {
            "step": self._step,
            "outcome": outcome,
            "broken": bool(reached and reached.decided > reached.applied),
        }
        every = of_every_rank(mesh, mine)
        latest = max(each["step"] for each in every)
        if engine is not None and reached is not None and self._held is None:
            told = next(
                (each["outcome"] for each in every if each["outcome"] and each["outcome"][0] == latest), None
            )
            if reached.applied == latest - 1 and reached.summed == latest and told is not None:
                engine.complete(latest, told[1])
                if engine.scheduler is not None:
                    engine.scheduler.step()
            else:
                engine.undo()
            self._step = reached.applied
            self._held = Held.of(engine, None if self._facts_of is None else self._facts_of())
            if self._shared:
                # The new engine is filled through the same module.
                tensors = {name: x.clone() for name, x in self._held.tensors.items()}
                self._held = replace(self._held, tensors=tensors)
                for each in engine.gradients:
                    if isinstance(each, GradientSync):
                        each.close()
        # The state is unusable if this rank is behind, or if any rank failed while applying a step.
        if self._step != latest or any(each["broken"] for each in every):
            self._step, self._held = -1, None

    def restore(self, engine: Engine, copies: Collection[Held]) -> Any:
        """Load this rank's own state, or the state of a rank with the same parts, into the new engine. Return `facts`.

        The state is the latest for which all parts still exist, either the ranks' current state or `copies` of an earlier
        step. Returns None on every rank if the parts of any rank no longer exist.
        Called by: every rank of the mesh.
        """
        mesh = engine.mesh
        held = [*([] if self._held is None else [self._held]), *copies]
        mine = (parts_held(engine), [(each.step, each.parts, each.own) for each in held])
        known = dict(zip(ranks_of(mesh), of_every_rank(mesh, mine), strict=True))
        wanted = {rank: parts for rank, (parts, _) in known.items()}
        for step in sorted({step for _, has in known.values() for step, _, _ in has}, reverse=True):
            has = {rank: {at[1] for at in every if at[0] == step} for rank, (_, every) in known.items()}
            pairs = _pairs(mesh, wanted, has)
            if pairs is not None:
                break
        else:
            return None
        by_parts = {each.parts: each for each in reversed(held) if each.step == step}
        if (mine_of_it := by_parts.get(wanted[mesh.rank])) is not None:
            mine_of_it.put_into(engine)
        for dim, giver, to in pairs:
            if giver == mesh.rank:
                by_parts[wanted[to]].send(mesh, dim, mesh.get_coords(to)[dim])
            elif to == mesh.rank:
                receive(engine, dim, mesh.get_coords(giver)[dim])
        facts = next((each.facts for each in held if each.own and each.step == step), None)
        return next(filter(None, of_every_rank(mesh, facts if _tells(mesh, known, step) else None)), {})


def _tells(mesh: Mesh, known: Mapping[int, tuple[Any, Any]], step: int) -> bool:
    """Return whether this is the lowest rank that was present after the step."""
    there = [rank for rank, (_, held) in known.items() if any(own and at == step for at, _, own in held)]
    return mesh.rank == min(there, default=None)


def _pairs(
    mesh: Mesh, wanted: Mapping[int, str], held: Mapping[int, Collection[str]]
) -> list[tuple[str, int, int]] | None:
    """Return (dim, giver, receiver) for each rank that lacks its parts, or None if some parts have no giver.

    wanted, held: for each rank, the parts that it needs, and the parts that it has.
    """
    found = []
    for to in (rank for rank, parts in wanted.items() if parts not in held[rank]):
        coords = mesh.get_coords(to)
        beside = (
            (dim, mesh.get_rank(**{**coords, dim: coord}))
            for dim, size in mesh.layout.dims.items()
            for coord in range(size)
        )
        pair = next(((dim, giver) for dim, giver in beside if wanted[to] in held[giver]), None)
        if pair is None:
            return None
        found.append((*pair, to))
    return found


def refuse_shards(engine: Engine, error: Exception) -> None:
    """Raise UnsupportedOp if FSDP2 has sharded a module of the program, because it cannot shard the module again."""
    if any(isinstance(each, Sharded) for each in engine.gradients):
        raise UnsupportedOp(
            "a module that FSDP2 has sharded cannot continue after the loss of a rank",
            given=f"parallel.shard, and a {type(engine.modules[0]).__name__} as the model of the trainer",
            expected="a model that can be built again",
            hint="use a ModelSpec (see docs/guide/unknown_model.md), or --max-restarts instead of --replace",
        ) from error


def other_parts(mesh: Mesh, tensor: str, before: int) -> UnsupportedOp:
    """Return the error for a module of the program that would have to hold different parts of the model than before."""
    return UnsupportedOp(
        f"a module of the program cannot take over other parts of the model, on {mesh.label}",
        given=f"{tensor}={before} before ranks were lost, {tensor}={mesh.coord(tensor)} now",
        expected="a model that can be built again, or the same parts",
        hint="use a ModelSpec (see docs/guide/unknown_model.md), or remove elastic.min",
    )


def nobody_holds(mesh: Mesh) -> TrainingError:
    """Return the error for parts of the model that no rank holds any more."""
    return TrainingError(
        "no rank holds the parts of the model that a lost rank had",
        given=f"a mesh of {dict(mesh.dims)}, ranks {sorted(mesh.elastic.generation.replaced)} lost",
        expected="a dim along which ranks hold the same parts, such as data",
        hint="call Trainer.load with a checkpoint on every rank; Trainer.run does so automatically",
    )
