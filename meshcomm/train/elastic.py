"""The training state when ranks are lost or join: copies of it on other ranks, and its way to a new engine.

A rank that has finished the exchange at the end of a step knows that every rank has summed its gradients. If any rank
has reached this point, all ranks therefore apply the step. Otherwise no rank has applied it, and the step is repeated.
A new engine gets its parts of the state, or of a copy of an earlier step, from any ranks that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.shard import Sharded
from meshcomm.train.checkpoint.parts import kind_of
from meshcomm.transfer.boxes import BoxPlan, Key, Spans
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Box
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import Sides, dim_of_all
from meshcomm.transfer.tensors import Region, own_regions

# A rank's parts of each tensor.
Regions: TypeAlias = dict[Key, list[Region]]


class Held(NamedTuple):
    """State of a rank after a step: its own, or a copy of another rank's.

    regions: the rank's parts of each tensor. facts: the rank's own facts about the run, see `Steps.facts`.
    """

    step: int
    regions: Regions
    facts: Any = None

    @classmethod
    def of(cls, engine: Engine, facts: Callable[[], Any] | None, on: torch.device | None = None) -> Held:
        """Return the state of an engine, either its own tensors or copies of them on a device."""
        regions = regions_of(engine.saved_state())
        if on is not None:
            for key, held in regions.items():
                regions[key] = [region._replace(held=region.held.to(on, copy=True)) for region in held]
        return cls(engine.reached.applied, regions, None if facts is None else facts())


def regions_of(state: Mapping[str, Tensor | Kept]) -> Regions:
    return {(name, *kind_of(tensor)): own_regions(tensor) for name, tensor in state.items()}


def _spans(regions: Regions) -> Spans:
    return {key: [region.box[:2] for region in held] for key, held in regions.items()}


def _run(plan: BoxPlan, mesh: Mesh, dim: str, *regions: Regions) -> None:
    """Carry out a plan. regions: this rank's, of the source and of the target. Called by: every rank along the dim."""
    rooms = [
        {number: Room(held[key], key[1]) for number, key in enumerate(plan.keys) if key in held}
        for held in regions
    ]
    Run(Schedule(plan, Sides.along(mesh, dim)), *rooms)()


@final
class Copies:
    """Copies of the state of this rank and of the previous rank along a dim, in host memory.

    A rank may be lost before all ranks have made their copies. The previous copy is therefore kept until the end of the next
    step. No rank finishes that step before all ranks have finished copying.
    """

    def __init__(self) -> None:
        # elastic.copy_every, or 0 if no rank is replaced.
        self.every = 0
        # A copy of the own state and one of the previous rank's, for up to two steps.
        self.held: list[Held] = []
        self._first = True

    def begin_again(self) -> None:
        """Make a copy at the next step, because some ranks are new and have no copies."""
        self._first = True

    def clear(self) -> None:
        """Drop all copies, because a different training run follows."""
        self.held, self._first = [], True

    def after_step(self, engine: Engine, facts: Callable[[], Any] | None = None, due: bool = False) -> None:
        """Make a copy if `elastic.copy_every` requests one after this step, or if `due` is set.

        Called by: every rank, after each step.
        """
        dim = _along(engine) if self.every else None
        if dim is None:
            return
        self.held = self.held[-2:]
        step = engine.reached.applied
        if not (self._first or due or step % self.every == 0):
            return
        mine = Held.of(engine, facts, torch.device("cpu"))
        copy = copy_of_previous(engine.mesh, dim, mine.regions)
        if engine.mesh.is_async and (lost := engine.mesh.elastic.lost()) is not None:
            # The data received may be invalid.
            raise lost
        self.held = [*(held for held in self.held if held.step != step), mine, Held(step, copy)]
        self._first = False


def copy_of_previous(mesh: Mesh, dim: str, mine: Regions) -> Regions:
    """Return a copy, in host memory, of what the previous rank along a dim passes as `mine`. Called by: every rank along it."""
    spans = mesh.objects.all_gather(dim, _spans(mine))
    before = [spans[-1], *spans[:-1]]
    copy = {
        key: [Region(box, torch.empty(box.shape, dtype=key[1])) for box in starmap(Box, boxes)]
        for key, boxes in before[mesh.coord(dim)].items()
    }
    _run(BoxPlan(spans, before), mesh, dim, mine, copy)
    return copy


def _along(engine: Engine) -> str | None:
    """Return the outermost dim along which ranks hold different parts of the model.

    If there is no such dim, return one along which ranks hold the same parts.
    """
    sizes, parallel = engine.mesh.layout.dims, engine.sections.parallel
    dims = [dim for dim, size in sizes.items() if size > 1]
    apart = [dim for dim in dims if dim not in (parallel.data, parallel.context)]
    return next(iter([*apart, *dims]), None)


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
        is_broken = bool(reached and reached.decided > reached.applied)
        steps, known, broken = zip(*of_every_rank(mesh, (self._step, outcome, is_broken)), strict=True)
        latest, outcomes = max(steps), dict(filter(None, known))
        if engine is not None and reached is not None and self._held is None:
            if reached.applied == latest - 1 and reached.summed == latest and latest in outcomes:
                engine.complete(latest, outcomes[latest])
                if engine.scheduler is not None:
                    engine.scheduler.step()
            else:
                engine.undo()
            self._step = reached.applied
            # A new engine that is filled through the same module needs copies.
            self._held = Held.of(engine, self._facts_of, engine.mesh.device if self._shared else None)
            if self._shared:
                for gradient in engine.gradients:
                    if isinstance(gradient, GradientSync):
                        gradient.close()
        # The state is unusable if this rank is behind, or if any rank failed while applying a step.
        if self._step != latest or any(broken):
            self._step, self._held = -1, None

    def restore(self, engine: Engine, copies: Collection[Held]) -> Any:
        """Load the state into the new engine, each part from any rank that has it, on any mesh. Return `facts`.

        The state is the latest of which all parts still exist: the ranks' current state, or `copies` of an earlier step.
        Returns None on every rank if no state is complete.
        Called by: every rank of the mesh.
        """
        mesh = engine.mesh
        states = [*([] if self._held is None else [self._held]), *copies]
        regions: dict[int, Regions] = {}
        for state in states:
            for key, held in state.regions.items():
                regions.setdefault(state.step, {}).setdefault(key, []).extend(held)
        facts = {state.step: state.facts for state in states if state.facts}
        of_ranks = of_every_rank(
            mesh, {step: (step in facts, _spans(held)) for step, held in regions.items()}
        )
        for step in sorted(set().union(*of_ranks), reverse=True):
            of_step = [held.get(step, (False, {})) for held in of_ranks]
            if _filled(engine, step, [spans for _, spans in of_step], regions.get(step, {})):
                # The first rank that was present after the step tells the others.
                present = [rank for rank, (knows, _) in zip(ranks_of(mesh), of_step, strict=True) if knows]
                told = of_every_rank(mesh, facts[step] if present[:1] == [mesh.rank] else None)
                return next(filter(None, told), {})
        return None


class _Lacking(Exception):
    """No rank has some element of the state."""


def _filled(engine: Engine, step: int, sources: Sequence[Spans], mine: Regions) -> bool:
    """Load the state of a step into the engine. Return False on every rank if it is not complete.

    sources: the boxes that each rank has. mine: this rank's.
    """
    mesh = engine.mesh
    dim = dim_of_all(mesh)
    kinds = {name: (dtype, shape) for spans in reversed(sources) for name, dtype, shape in spans}

    def fill(room: Mapping[str, Tensor | Kept]) -> None:
        wanted = regions_of(room)
        plan = BoxPlan(sources, mesh.objects.all_gather(dim, _spans(wanted)))
        if plan.lacking:
            raise _Lacking
        if unused := sorted(kinds.keys() - {name for name, _, _ in plan.keys}):
            raise TrainingError(
                f"the state of a rank does not fit the new engine: {unused[0]}",
                given=f"{len(kinds)} tensors in the state, {len(plan.keys)} in the engine",
                expected="the same model and optimizer as before the rank was lost",
            )
        _run(plan, mesh, dim, mine, wanted)

    try:
        engine.put_back(kinds, fill, step)
    except _Lacking:
        return False
    return True


def refuse_shards(engine: Engine, error: Exception) -> None:
    """Raise UnsupportedOp if FSDP2 has sharded a module of the program, because it cannot shard the module again."""
    if any(isinstance(gradient, Sharded) for gradient in engine.gradients):
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
