"""The weights of a model, sent as versions: a target has a whole version, or refuses to be read."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, NoReturn, TypeAlias, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from meshcomm.comm.checks import share_memory, span_of
from meshcomm.errors import (
    CommunicationError,
    LayoutError,
    MeshcommError,
    SourceChanged,
    StoreError,
    TransferFailed,
    TransferMismatch,
    UnsupportedOp,
    WeightsTorn,
)
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import whole
from meshcomm.mesh import Mesh
from meshcomm.transfer.agree import Agreement, Choice, Options, Row
from meshcomm.transfer.changes import counts_of, places_of, signed
from meshcomm.transfer.decisions import Decisions
from meshcomm.transfer.naming import stored_parts
from meshcomm.transfer.placement import rest
from meshcomm.transfer.plan import Plan, located
from meshcomm.transfer.readers import Readers
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import Cause, SideName, Sides
from meshcomm.transfer.tensors import (
    Cutout,
    Parted,
    Region,
    base_of,
    checked_memory,
    memory_of,
    own_regions,
    placement_of,
    regions,
)
from meshcomm.transport.torch_private import await_at_exit
from meshcomm.watching.callsite import users_frame

Model: TypeAlias = nn.Module | Mapping[str, Parted]


def faults_of(model: object) -> list[str]:
    """Return why an argument is no model."""
    if isinstance(model, nn.Module):
        return []
    if not isinstance(model, Mapping):
        kind = "None" if model is None else f"a {type(model).__name__}"
        return [
            f"the model is {kind}; expected a module or a dict of tensors, as dict(model.named_parameters())"
        ]
    return [f"{name!r} is not the name of a tensor" for name in model if not isinstance(name, str)]


def entries_of(model: Model) -> dict[str, Any]:
    """Return what a model has by name: its parameters and persistent buffers, see `stored_parts`, or the entries of a dict."""
    return stored_parts(model) if isinstance(model, nn.Module) else dict(model)


def rows_of(tensors: Mapping[str, Any], mesh: Mesh, written: bool = False) -> list[Row]:
    """Return what this rank of a mesh says about its tensors. written: whether they are those of the target."""
    rows: list[Row] = []
    first_of: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        facts, tied, problem, dtype = None, name, "", None
        try:
            # Weights on another device than the link's pass through its buckets.
            memory = checked_memory(tensor, partial(str, "link.weights()"), written=written)
            dtype = memory.dtype
            facts = placement_of(tensor, mesh.layout, mesh.rank).facts()
            # Different tensors without elements have no memory that tells them apart.
            own = (*memory.shape, *memory.stride()) if memory.numel() else id(base_of(tensor))
            cut = tensor.cut if isinstance(tensor, Cutout) else None
            tied = first_of.setdefault((memory.data_ptr(), memory.storage_offset(), own, cut), name)
        except MeshcommError as error:
            problem = f"{error.what}: {error.given}"
        rows.append(Row(name, dtype, facts, tied, problem))
    return rows


def _with_overlaps(rows: Sequence[Row], tensors: Mapping[str, Any]) -> list[Row]:
    """Return rows that say with which earlier tensors each one shares memory, other than by a tie."""
    spans = []
    for number, row in enumerate(rows):
        if not row.problem and row.tied == row.name:
            held = [region.held for region in own_regions(tensors[row.name]) if region.held.numel()]
            spans += [(*span_of(memory), number, memory) for memory in held]
    overlaps: dict[int, list[tuple[str, str]]] = {}
    earlier: list[tuple[int, int, int, Tensor]] = []
    for span in sorted(spans, key=itemgetter(0)):
        earlier = [other for other in earlier if other[1] > span[0]]
        for other in earlier:
            (number, memory), (before, room) = sorted((span[2:], other[2:]), key=itemgetter(0), reverse=True)
            if number != before and share_memory(memory, room):
                offset = (memory.data_ptr() - room.data_ptr()) / room.element_size()
                dtypes = {memory.dtype, room.dtype}
                shapes = [(tuple(held.shape), held.stride()) for held in (memory, room)]
                way = f"{offset} {shapes} {[memory.dtype, room.dtype] if len(dtypes) > 1 else ''}"
                overlaps.setdefault(number, []).append((rows[before].name, way))
        earlier.append(span)
    return [row._replace(overlaps=sorted(overlaps.get(number, ()))) for number, row in enumerate(rows)]


@final
class Push:
    """A version on its way to the target. The source's weights must not change before `wait` returns, unless they were copied.

    A push that nobody waits for is carried out all the same: the next push, the end of the link and Python's exit wait for it.
    """

    def __init__(self, weights: Weights, version: int, problem: str, lazy: bool) -> None:
        self.version, self._problem = version, problem
        self._weights = weights
        self._error: BaseException | None = None
        self._raised = False
        self._done = False
        self._thread: threading.Thread | None = None
        self._stream: torch.Stream | None = None
        if not lazy:
            # The thread's calls are shown at the line of the program that began the push.
            frame = users_frame()
            line: dict[str, Any] = {"co_filename": frame.f_code.co_filename, "co_firstlineno": frame.f_lineno}
            call = FunctionType(
                (lambda carry: carry()).__code__.replace(**line, co_name=frame.f_code.co_name), {}
            )
            run, device = copy_context().run, weights._sides.mesh.device
            # On a GPU, the thread works on this one's stream: what has been queued there comes before the messages.
            self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
            self._thread = threading.Thread(
                target=run, args=(call, self._carry_quietly), name="meshcomm-push", daemon=True
            )
            _PUSHES.add(self)
            self._thread.start()

    def _carry(self) -> int:
        """Carry the push out; return its version, or raise its error."""
        try:
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)
            return self._weights._carry(self)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._done = True

    def _carry_quietly(self) -> None:
        with suppress(BaseException):  # raised by `wait`
            self._carry()

    def _settle(self) -> None:
        """Block until the push no longer uses the link. Raises MeshClosed in a forked process, which cannot know."""
        state = self._weights._sides.mesh._state
        if not self._done and state.parent is not None:
            state.usable()
        if self._thread is not None:
            if self._thread is not threading.current_thread():
                self._thread.join()
        elif not self._done:
            self._weights._check_alone()
            self._carry_quietly()

    def wait(self) -> None:
        """Block until the target has the version, or the transfer has failed.

        Called by: every rank of the source.
        Raises:    SourceChanged, TransferFailed, TransferMismatch. May be called again, and raises the same.
        """
        self._settle()
        self._raise()

    def _end(self) -> None:
        """Block like `wait`, and raise an error only if nobody has seen it yet."""
        self._settle()
        if not self._raised:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            self._raised = True
            raise self._error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done


# The pushes whose threads Python waits for at exit.
_PUSHES: WeakSet[Push] = WeakSet()


@atexit.register
def _settle_at_exit() -> None:
    """Wait for the pushes under way. If one has failed, and nobody has waited for it, print its error and exit with code 1."""
    has_failed = getattr(sys, "last_value", None) is not None
    is_lost = False
    for push in list(_PUSHES):
        if push._weights._sides.mesh._state.parent is not None:
            continue  # this process was forked
        if has_failed and push._thread is not None:
            # The targets may never pull. The push ends with its connections.
            with suppress(MeshcommError, RuntimeError):
                push._weights._sides.mesh._state.close(compare=False)
            await_at_exit(push._thread)
            continue
        push._settle()
        if push._error is not None and not push._raised:
            what = f"nobody waited for the push of version {push.version}, which failed"
            sys.stderr.write(f"meshcomm: {what}: {' '.join(str(push._error).split())}\n")
            is_lost = True
    if is_lost:
        # Python's own exit code would be 0.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@final
class Weights:
    """The weights of a model on both sides of a link. Created by `Link.weights`.

    Attributes:
        version: on the target, the version of the weights; None if they are not of one version. On the source, the last version
                 that every copy of the target has.
        names:   the names of the tensors that are sent.
    """

    def __init__(
        self,
        models: Mapping[SideName, Model],
        options: Options,
        on_commit: Callable[[int], object] | None,
        lazy: bool,
    ) -> None:
        self._models, self._options = models, options
        self._on_commit, self._lazy = on_commit, lazy
        self.version: int | None = None
        self._torn = "no version has arrived"
        self._readers = Readers()
        # Where arriving values wait until all ranks of the copy have theirs, and where those of a snapshot are sent from.
        self._spare: dict[int, Room] = {}
        self._copied: dict[int, Room] = {}
        # Of the last push: torch's counts of changes, unless it is a snapshot, and the hashes of what will be sent.
        self._before: dict[str, Any] = {}
        self._sent: dict[int, int] | None = None

    def _rows_by_side(self, sides: Sides, choice: Choice) -> tuple[dict[SideName, list[Row]], set[str]]:
        """Return what this rank says about the chosen tensors on each side that it is on, and the names of all its tensors."""
        names: set[str] = set()
        self._choice, self._known = choice, names
        tensors: dict[SideName, dict[str, Any]] = {}
        rows: dict[SideName, list[Row]] = {}
        for side, model in self._models.items():
            mesh, entries = sides.own(side), entries_of(model)
            assert mesh is not None
            names.update(entries)
            held = tensors[side] = {name: tensor for name, tensor in entries.items() if choice.has(name)}
            of_side = _with_overlaps(rows_of(held, mesh, written=side == "target"), held)
            again = entries_of(model)
            usable = {row.name: held[row.name] for row in of_side if not row.problem}
            first, second = places_of(usable), places_of({name: again[name] for name in usable})
            computed = "it is computed anew each time that it is read, and has no memory of its own"
            rows[side] = [
                row if row.problem or first[row.name] == second[row.name] else row._replace(problem=computed)
                for row in of_side
            ]
        if self._options.staging == "buckets" and len(rows) == 2:
            rows["target"] = _overlaps_named(rows, tensors)
        return rows, names

    def _connect(self, sides: Sides, plan: Plan, agreement: Agreement, number: int) -> None:
        """Use a link, on which all ranks have agreed on these tensors. number: of the agreement, among those on the link."""
        self._sides, self._plan, self._agreement = sides, plan, agreement
        self._call = f"push() or pull() of link.weights() number {number}"
        self.names = tuple(entry.name for entry in agreement.entries)
        # The tensors that are sent from or written to their own memory, and where this lies.
        self._tensors: dict[SideName, dict[str, Parted]] = {}
        self._places: dict[SideName, dict[str, Any]] = {}
        for side in self._models:
            self._look(side)
            self._places[side] = places_of(self._tensors[side])
        self._sources, self._targets = self._rooms("source"), self._rooms("target")
        self._spare = _spare(self._targets) if self._options.staging == "whole" else {}
        self._copied = {}
        self._schedule = Schedule(plan, sides)
        self._run = Run(self._schedule, self._sources, self._spare or self._targets)
        token = f"{sides.mesh._state.held.prefix}/{number}"
        self._timeout_s = sides.mesh.plan.defaults.timeout_s
        self._decisions = Decisions(sides, token, self._copies(self._options.atomic), self._timeout_s)

    def _look(self, side: SideName) -> str:
        """Read the tensors of this rank's model; return what is wrong if their memory is another than at first, or ""."""
        every, names = entries_of(self._models[side]), {*self.names}
        tensors = self._tensors[side] = {name: tensor for name, tensor in every.items() if name in names}
        if side not in self._places:
            return ""
        places, before = places_of(tensors), self._places[side]
        other = [name for name, place in before.items() if places.get(name) != place]
        other += [name for name in every if self._choice.has(name) and name not in self._known]
        return f"{listed(other)} of the {side}'s model" if other else ""

    def _rooms(self, side: SideName) -> dict[int, Room]:
        position = self._sides.position(side)
        if position is None:
            return {}
        layout, tensors = self._sides.layout(side), self._tensors[side]
        rooms = {}
        for number, (entry, dtype) in enumerate(zip(*self._agreement, strict=True)):
            where = located(entry.source if side == "source" else entry.target, layout)
            if where.holds(position):
                rooms[number] = Room(regions(tensors[entry.name], where, position), dtype)
        return rooms

    def _copies(self, atomic: str) -> Any:
        """Return the number of the copy to which each position on the target belongs: copies have versions by themselves."""
        layout = self._sides.ends.target
        positions = np.arange(layout.world_size)
        used = {dim for entry in self._plan.entries for dim in layout.expand(entry.target.dims or ())}
        if atomic == "all" or not used <= layout.dims.keys():
            return positions * 0
        # Copies that gather stripes from each other have a version together.
        splits = [split for of_level in self._plan.stripes for split in of_level]
        together = [split for split in splits if split.dim in layout.dims and split.dim not in used]
        digits = [*map(layout.digits, used), *(split.digits(layout) for split in together)]
        return rest(digits, layout.world_size).coord(positions)

    # -- the source ---------------------------------------------------------------------------------

    def push(self, version: int, *, snapshot: bool = False) -> Push:
        """Begin to send this rank's weights as a version. Returns at once; `Push.wait` waits until the target has it.

        The next push first waits for this one, and raises its error if nobody has waited for it. Change the weights only after
        `wait`; a change in between raises SourceChanged on all ranks of both sides. On a rank of both sides, `pull` carries the
        push out.

        snapshot:  copy this rank's weights first, into memory of their size that is kept. They may then change at once. Otherwise
                   they are hashed first, and compared with what arrives.
        Called by: every rank of the source, with the same version: an integer of 0 or more, below 2**62. Another one raises
                   TransferMismatch in `wait`, and in `pull` on the target.
        """
        if self._sides.source is None:
            raise UnsupportedOp(
                "push on a rank that is not on the source",
                given=self._sides.label(self._sides.me),
                expected="a rank of the source",
                hint="pull() on ranks of the target",
            )
        try:
            number = whole(version, "version")
        except LayoutError:
            number = -1
        if (last := self._sides.use.push) is not None:
            last._end()
        if self._sides.use.failed is not None:
            with self._sides.calling(""):  # raises
                pass
        problem = self._look("source")
        if not 0 <= number < 1 << 62:
            # Told to all ranks, because the target waits for it.
            number, problem = -1, f"version {version!r}, which is no integer from 0 to 2**62 - 1"
        self._before = {}
        self._sent = None
        if snapshot:
            self._copied = self._copied or _spare(self._sources, wire=True)
            for number_of, room in self._copied.items():
                _copy(self._sources[number_of], room)
        elif not problem:
            self._copied, self._before = {}, counts_of(self._tensors["source"])
            self._sent = self._run.sent()
        push = Push(self, number, problem, self._lazy or self._sides.target is not None)
        self._sides.use.push = push
        return push

    def _check_alone(self) -> None:
        if self._sides.target is not None:
            raise UnsupportedOp(
                "this rank is on both sides: its push is carried out by pull()",
                given="push(...).wait() before pull()",
                expected="pull() between the two",
            )

    # -- the target ---------------------------------------------------------------------------------

    def pull(self) -> int:
        """Wait for the source's next version, write it into this rank's weights, and return it.

        Called by: every rank of the target.
        Raises:    TransferFailed, SourceChanged, TransferMismatch. With `staging="whole"`, the weights are then those of before;
                   with "buckets", they are torn unless the error came before the first byte. An error of `on_commit` raises
                   TransferFailed on every rank of both sides: the version counts, but not on the rank where it was raised.
        """
        if self._sides.target is None:
            raise UnsupportedOp(
                "pull on a rank that is not on the target",
                given=self._sides.label(self._sides.me),
                expected="a rank of the target",
                hint="push(version=...) on ranks of the source",
            )
        self._readers.check()
        last = self._sides.use.push if self._sides.source is not None else None
        push = last if isinstance(last, Push) and last._weights is self and not last.done else None
        if self._sides.source is not None and push is None:
            raise UnsupportedOp(
                "this rank is on both sides, and pull() came before push()",
                given="pull()",
                expected="push(version=...) first",
            )
        return self._carry(None) if push is None else push._carry()

    @contextmanager
    def reading(self) -> Iterator[int]:
        """In this context, the target's weights are those of one version, which is the context's value; a pull waits for its end.

        Waits while a version is being put into use. Raises WeightsTorn if none has arrived, or if the last one was interrupted.
        """
        if self._sides.target is None:
            raise UnsupportedOp(
                "reading on a rank that is not on the target",
                given=self._sides.label(self._sides.me),
                expected="a rank of the target",
                hint="the source's weights are its own: read them without reading()",
            )
        with self._readers.reading():
            if self.version is None:
                raise WeightsTorn(
                    f"the weights on {self._sides.label(self._sides.me)} are not those of one version",
                    given=self._torn,
                    expected="a version that all ranks of this copy have received",
                    hint="pull() until it returns a version",
                )
            yield self.version

    # -- a transfer -----------------------------------------------------------------------------------

    def _carry(self, push: Push | None) -> int:
        """Carry out a transfer on this rank, in whatever roles it has."""
        with self._sides.calling("a version", push):
            # That of a push is known before the ranks agree on it.
            version = None if push is None or push.version < 0 else push.version
            self._decisions.begin()
            try:
                version = self._agreed(push)
                self._decisions.tidy()
                self._unchanged(version, *self._move(version))
            except TransferMismatch:
                self._decisions.undo()
                raise
            except SourceChanged:
                raise
            except BaseException as error:
                self._abort(error, version)
            problem = None if self._sides.target is None else self._commit(version)
            problems = self._outcome(version, problem)
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        if problems:
            # On all ranks, which remain at the same call.
            raise TransferFailed(
                f"version {version} arrived, but on_commit failed",
                given=problems,
                expected="on_commit to return on every rank of the target",
                hint="these ranks refuse to be read until the next version; all others have this one",
                version=version,
            ) from problem
        return version

    def _agreed(self, push: Push | None) -> int:
        """Return the version that all sources push. Raises TransferMismatch, on all ranks."""
        number = -1 if push is None else push.version
        problem = "" if push is None else push._problem
        if self._sides.target is not None:
            problem = problem or self._look("target")
        ours = [number, -number] if self._sides.source is not None else [-1, -(2**62)]
        most, least, is_wrong = self._sides.meet(self._call, *ours, bool(problem))
        if most == -least and not is_wrong:
            return most
        told = self._sides.of_all([number, problem])
        labels = [self._sides.label(at) for at in range(len(told))]
        pushed = {at: told[at][0] for at in self._sides.numbers("source").tolist()}
        hint = "push(version=step) with the same step"
        if not is_wrong:
            texts = [f"version {version} on {labels[at]}" for at, version in pushed.items()]
            raise self._sides.refuse("the ranks of the source push different versions", texts, hint)
        what = "a push has no valid version"
        if min(pushed.values()) >= 0:
            what = "tensors are new, or have other memory than when weights() was called"
            hint = "link.weights(...) again on all ranks, after load_state_dict(assign=True) and what else adds or replaces tensors"
        texts = [f"{text} on {label}" for (_, text), label in zip(told, labels, strict=True) if text]
        raise self._sides.refuse(what, texts, hint)

    def _move(self, version: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return the hashes of the values that were sent, and of those that have arrived, by the number of the entry."""
        if self._sides.target is not None and self._options.staging == "buckets":
            with self._readers.writing(self._timeout_s):
                if (cause := self._decisions.write()) is not None:
                    raise self._failure(cause, version)
                self._tear(f"version {version} was interrupted")
                _finish(self._sides.mesh.device)
        run = self._run
        if self._copied:
            run = Run(self._schedule, self._copied, self._spare or self._targets)
        return run.sent() if self._sent is None else self._sent, run(checks=True)

    def _unchanged(self, version: int, sent: Mapping[int, int], arrived: Mapping[int, int]) -> None:
        """Raise SourceChanged on every rank if a source tensor is another than when it was pushed.

        That is so if torch has counted a change, or if what has arrived is not what was to be sent.
        """
        counts = counts_of(self._tensors["source"]) if self._before else {}
        changed = [name for name, count in self._before.items() if counts[name] != count]
        differ = {number: sent.get(number, 0) - arrived.get(number, 0) for number in {*sent, *arrived}}
        if not any(self._sides.sum(signed(sum(differ.values())), len(changed))):
            return
        told = self._sides.of_all([changed, {str(number): signed(value) for number, value in differ.items()}])
        names = {name for of_rank, _ in told for name in of_rank}
        sums = Counter[str]()
        for _, of_rank in told:
            sums.update(of_rank)
        names |= {self.names[int(number)] for number, value in sums.items() if signed(value)}
        raise SourceChanged(
            f"the weights of version {version} changed while they were sent",
            given=listed(sorted(names)),
            expected="no change before Push.wait() returns",
            hint="handle.wait() before the optimizer's step, or push(version, snapshot=True)",
            names=tuple(sorted(names)),
        )

    def _commit(self, version: int) -> BaseException | None:
        """Use a version if all ranks of this copy have received theirs. Return the error of `on_commit`, if it raised one."""
        try:
            stack = ExitStack()
            stack.enter_context(self._readers.writing(self._timeout_s))
        except BaseException as error:
            self._abort(error, version)
        with stack:
            try:
                cause = self._decisions.vote()
            except BaseException as error:
                self._tear(f"it is unknown whether all ranks of this copy have version {version}")
                self._abort(error, version)
            if cause is not None:
                raise self._failure(cause, version)
            # An exception from here on leaves no mixture that can be read.
            self._tear(f"version {version} was interrupted when it was put into use")
            _finish(self._sides.mesh.device)
            for number, room in self._spare.items():
                _copy(room, self._targets[number])
            _finish(self._sides.mesh.device)
            self.version = version
            if self._on_commit is None:
                return None
            try:
                self._on_commit(version)
            except BaseException as error:
                self._tear(f"on_commit of version {version} raised {_text(error)}")
                return error
        return None

    def _outcome(self, version: int, problem: BaseException | None) -> str:
        """Wait until every copy has the version. Return what failed in `on_commit`, on any rank, or ""."""
        try:
            if self._sides.target is not None:
                where = self._sides.label(self._sides.me)
                self._decisions.report("" if problem is None else f"{_text(problem)} on {where}")
            cause, problems = self._decisions.outcome()
        except MeshcommError as error:
            cause, problems = self._cause(error), ""
        if cause is not None:
            have = self._sides.ranks(self._decisions.confirmed())
            failure = self._sides.failure(
                f"version {version}",
                cause,
                f"confirmed by {have or 'no rank'}; what the others have is unknown",
                version,
                "was not confirmed by every rank of the target",
            )
            if self._sides.source is not None or problem is not None:
                raise failure from problem
            # This copy has the version. The next call says that the link has failed.
            self._sides.use.failed = failure
        elif self._sides.target is None:
            self.version = version
        return problems

    def _tear(self, why: str) -> None:
        self.version, self._torn = None, why

    # -- failures ---------------------------------------------------------------------------------------

    def _abort(self, error: BaseException, version: int | None) -> NoReturn:
        """Let no rank use the version, and raise the error that says why: that of the first rank that failed."""
        cause = self._cause(error)
        first, is_written = self._decisions.abort(cause)
        cause = first if first.missing else cause
        if is_written and self._options.staging == "buckets":
            self._tear(f"{cause.what}, when ranks of this copy may have begun to write the next version")
        if not isinstance(error, MeshcommError | TimeoutError):
            raise error
        raise self._failure(cause, version, str(error)) from error

    def _cause(self, error: BaseException) -> Cause:
        me = self._sides.me
        if isinstance(error, CommunicationError | StoreError):
            return self._sides.cause(error)
        if isinstance(error, TimeoutError):
            return Cause(f"{self._sides.label(me)} could not be written: {error}", (me,))
        return Cause(f"{self._sides.label(me)} left the transfer: {_text(error)}", (me,))

    def _failure(self, cause: Cause, version: int | None, given: str | None = None) -> TransferFailed:
        """Return the error of a transfer that failed."""
        what = "the next version" if version is None else f"version {version}"
        return self._sides.failure(what, cause, given or "this rank's own part did not fail", version)


def _overlaps_named(
    rows: Mapping[SideName, list[Row]], tensors: Mapping[SideName, Mapping[str, Parted]]
) -> list[Row]:
    """Return the rows of the target, with a problem for each tensor that is written in place over another part of the source."""
    sent = {row.name: row for row in rows["source"]}
    held = {name: memory_of(tensors["source"][name]) for name, row in sent.items() if not row.problem}

    def boxes_of(side: SideName, name: str) -> list[Any]:
        return [region.box[:2] for region in own_regions(tensors[side][name])]

    def problem_of(row: Row) -> str:
        room, other = memory_of(tensors["target"][row.name]), sent.get(row.name)
        if row.problem or not room.numel():
            return row.problem
        same = other is not None and not other.problem and room.is_set_to(held[row.name])
        if same and boxes_of("source", row.name) == boxes_of("target", row.name):
            return ""
        over = [name for name, memory in held.items() if memory.numel() and share_memory(room, memory)]
        return f'it shares memory with {over[0]} of the source, which staging="whole" allows' if over else ""

    return [row._replace(problem=problem_of(row)) for row in rows["target"]]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _finish(device: torch.device) -> None:
    """Wait until a GPU has done what readers and writers have queued, which may be on different streams."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _copy(room: Room, into: Room) -> None:
    for region, values in zip(into.regions, room.regions, strict=True):
        box = region.box
        region.write(box.begin, box.end, values.read(box.begin, box.end))


def _spare(rooms: Mapping[int, Room], wire: bool = False) -> dict[int, Room]:
    """Return newly allocated memory for the same boxes. wire: of the dtypes that are sent."""

    def beside(region: Region, dtype: torch.dtype) -> Region:
        held = torch.empty(region.box.shape, dtype=dtype, device=region.held.device)
        return Region(region.box, held)

    return {
        number: Room(
            [beside(region, room.dtype if wire else region.held.dtype) for region in room.regions], room.dtype
        )
        for number, room in rooms.items()
    }
