"""The training state when ranks are lost and replaced: copies of it on other ranks, and its way to new ranks.

A rank that has finished the exchange at the end of a step knows that every rank has summed its gradients. If any rank
has reached this point, all ranks therefore apply the step. Otherwise no rank has applied it, and the step is repeated.
A new rank gets the state of a rank with the same parts of the model, or a copy of an earlier step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, final

import torch
from torch import Tensor

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.shard import Sharded
from meshcomm.parallel.state import Kinds
from meshcomm.train.checkpoint.parts import kind_of
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.tensors import memory_of, own_regions

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
        kinds = {name: kind_of(value)[:2] for name, value in state.items()}
        tensors = {name: memory_of(value) for name, value in state.items()}
        if on is not None:
            tensors = {name: tensor.to(on, copy=True) for name, tensor in tensors.items()}
        return cls(engine.reached.applied, parts_held(engine), kinds, tensors, facts)

    def put_into(self, engine: Engine) -> None:
        """Load the state into the engine. Raises TrainingError if the engine has other tensors."""

        def fill(room: dict[str, Tensor | Kept]) -> None:
            if different := sorted(room.keys() ^ self.tensors.keys()):
                raise TrainingError(
                    f"the state of a rank does not fit the new engine: {different[0]}",
                    given=f"{len(self.tensors)} tensors in the state, {len(room)} in the engine",
                    expected="the same model and optimizer as before the rank was lost",
                )
            for name, into in room.items():
                memory_of(into).copy_(self.tensors[name])

        engine.put_back(self.kinds, fill, self.step)


def parts_held(engine: Engine) -> str:
    """Return a string that is equal on ranks that hold the same parts of the model."""
    parts = [
        (name, [region.box for region in own_regions(parameter)])
        for name, parameter in engine.named_parameters()
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def passed(mesh: Mesh, dim: str, sent: Held | None, dst: int | None, src: int | None) -> Held | None:
    """Send a state to coord `dst` along `dim`, and return the state that coord `src` sends, in host memory. Either is optional."""
    head: Any = None
    if sent is not None:
        head = (sent.step, sent.parts, sent.kinds, {name: tuple(x.shape) for name, x in sent.tensors.items()})
    # Both calls block until the other rank is ready, so in a ring some rank must receive first.
    sends_first = mesh.coord(dim) % 2 == 0
    if dst is not None and sends_first:
        mesh.objects.send(dim, head, dst)
    came: Any = (0, "", {}, {}) if src is None else mesh.objects.recv(dim, src=src)
    if dst is not None and not sends_first:
        mesh.objects.send(dim, head, dst)
    step, parts, kinds, shapes = came
    received = {name: torch.empty(shape, dtype=kinds[name][0]) for name, shape in shapes.items()}
    # Both ranks divide the tensors in the same way, so their n-th messages match.
    none: list[Tensor] = []
    mine = () if sent is None else sent.tensors.values()
    for going, coming in zip_longest(_messages(mine), _messages(received.values()), fillvalue=none):
        sizes = [x.numel() for x in coming]
        sends: list[Any] = [(torch.cat([x.reshape(-1).to(mesh.device) for x in going]), dst)] if going else []
        recvs: list[Any] = [(coming[0].new_empty(sum(sizes), device=mesh.device), src)] if coming else []
        for message in mesh.exchange(dim, sends, recvs):
            for into, part in zip(coming, message.split(sizes), strict=True):
                into.copy_(part.view(into.shape))
    return None if src is None else Held(step, parts, kinds, received, own=False)


def _messages(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the tensors into messages of a single dtype and limited size, because they may not all fit on the device."""
    messages: list[list[Tensor]] = []
    open_sets: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for x in (x for x in tensors if x.numel()):
        together, room = open_sets.get(x.dtype, ([], 0))
        if room < x.nbytes:
            together, room = [], _AT_ONCE_BYTES
            messages.append(together)
        together.append(x)
        open_sets[x.dtype] = together, room - x.nbytes
    return messages


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
        return sorted(
            (held for states in self._of.values() for held in states), key=lambda held: not held.own
        )

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
        mine = Held.of(engine, None if facts is None else facts(), torch.device("cpu"))
        coord, size = engine.mesh.coord(dim), engine.mesh.size(dim)
        neighbour = passed(engine.mesh, dim, mine, (coord + 1) % size, (coord - 1) % size)
        assert neighbour is not None
        if engine.mesh.is_async and (lost := engine.mesh.elastic.lost()) is not None:
            # The data received may be invalid.
            raise lost
        self._of.pop(step, None)
        self._of[step], self._first = [mine, neighbour], False


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
        mine = {
            "step": self._step,
            "outcome": outcome,
            "broken": bool(reached and reached.decided > reached.applied),
        }
        every = of_every_rank(mesh, mine)
        latest = max(report["step"] for report in every)
        if engine is not None and reached is not None and self._held is None:
            latest_outcome = next(
                (
                    report["outcome"]
                    for report in every
                    if report["outcome"] and report["outcome"][0] == latest
                ),
                None,
            )
            if reached.applied == latest - 1 and reached.summed == latest and latest_outcome is not None:
                engine.complete(latest, latest_outcome[1])
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
                for gradient in engine.gradients:
                    if isinstance(gradient, GradientSync):
                        gradient.close()
        # The state is unusable if this rank is behind, or if any rank failed while applying a step.
        if self._step != latest or any(report["broken"] for report in every):
            self._step, self._held = -1, None

    def restore(self, engine: Engine, copies: Collection[Held]) -> Any:
        """Load this rank's own state, or the state of a rank with the same parts, into the new engine. Return `facts`.

        The state is the latest for which all parts still exist, either the ranks' current state or `copies` of an earlier
        step. Returns None on every rank if the parts of any rank no longer exist.
        Called by: every rank of the mesh.
        """
        mesh = engine.mesh
        held = [*([] if self._held is None else [self._held]), *copies]
        mine = (parts_held(engine), [(state.step, state.parts, state.own) for state in held])
        of_rank = dict(zip(ranks_of(mesh), of_every_rank(mesh, mine), strict=True))
        wanted = {rank: parts for rank, (parts, _) in of_rank.items()}
        for step in sorted({step for _, has in of_rank.values() for step, _, _ in has}, reverse=True):
            has = {
                rank: {copy[1] for copy in every if copy[0] == step} for rank, (_, every) in of_rank.items()
            }
            pairs = _pairs(mesh, wanted, has)
            if pairs is not None:
                break
        else:
            return None
        by_parts = {state.parts: state for state in reversed(held) if state.step == step}
        if (mine_of_it := by_parts.get(wanted[mesh.rank])) is not None:
            mine_of_it.put_into(engine)
        for dim, giver, to in pairs:
            if giver == mesh.rank:
                passed(mesh, dim, by_parts[wanted[to]], mesh.get_coords(to)[dim], None)
            elif to == mesh.rank and (came := passed(mesh, dim, None, None, mesh.get_coords(giver)[dim])):
                came.put_into(engine)
        # The lowest rank that was present after the step tells the others.
        present = [
            rank
            for rank, (_, has) in of_rank.items()
            if any(own and copied_step == step for copied_step, _, own in has)
        ]
        facts = next((state.facts for state in held if state.own and state.step == step), None)
        facts_of_ranks = of_every_rank(mesh, facts if mesh.rank == min(present, default=None) else None)
        return next(filter(None, facts_of_ranks), {})


def _pairs(
    mesh: Mesh, wanted: Mapping[int, str], held: Mapping[int, Collection[str]]
) -> list[tuple[str, int, int]] | None:
    """Return (dim, giver, receiver) for each rank that lacks its parts, or None if some parts have no giver.

    wanted, held: for each rank, the parts that it needs, and the parts that it has.
    """
    pairs = []
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
        pairs.append((*pair, to))
    return pairs


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
