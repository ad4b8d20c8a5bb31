"""Microbatches that repeat: some are run, and the others are replayed from what these did.

What a stage does in its passes over a microbatch is recorded: its memory, its calls and its FLOPs, in order. The first
microbatches and the last one run. Two of the recorded ones have to be equal; the passes of the others then do what these did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from meshcomm.dryrun.ledger import Ledger, Maker, MemoryPart
from meshcomm.dryrun.torch_private import at_end_of_backward
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.torch_private import storage_without_memory
from meshcomm.parallel.tree import tensors_of
from meshcomm.predict.passes import schedule_properties
from meshcomm.transport.torch_private import storage_id, without_modes
from meshcomm.watching.callsite import without_collection
from meshcomm.watching.spans import Span

if TYPE_CHECKING:
    from meshcomm.dryrun.rank import Passes

# The first microbatch finds no gradients to add to. The next two are recorded, and later ones are replayed.
_RECORDED: Final = (1, 2)
# Numbers that no storage has.
_KEYS: Final = count(-1, -1)
_Event: TypeAlias = tuple[Any, ...]
Traffic: TypeAlias = tuple[str, str, int, int]


class Irregular(MeshcommError):
    """A microbatch cannot be replayed, although its forward pass was. No program sees it."""


_IRREGULAR: Final = Irregular("microbatches differ", given="a replayed pass", expected="equal microbatches")


class _Kind(NamedTuple):
    """A tensor. number: its storage, by the order in which the passes over a microbatch create storages."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@final
class _Recording:
    """What one pass does. keys: the storages of the microbatch that are held, with their numbers. Its forward pass has begun them.

    events: what happened, in order. is_closed: whether all memory that was freed was the microbatch's own. results: the outputs,
    or the gradients of the inputs. traffic: the dim, the call, the calls and the bytes of each row of the mesh's statistics.
    """

    def __init__(
        self, mesh: Mesh, ledger: Ledger, passes: Passes, keys: dict[int, int], numbers: count[int]
    ) -> None:
        self._mesh, self._before = mesh, mesh.stats()
        self._ledger, self._passes, self.keys, self.numbers = ledger, passes, keys, numbers
        self._done, self._first_call = (ledger.flops, ledger.moved), len(passes.calls)
        # The number of the gradient that a backward pass is given.
        self.given = -1
        # The forward pass's outputs, which the program frees between the passes or later. Others may then have their keys.
        self._outputs: set[int] = set()
        self.events: list[_Event] = []
        self.is_closed = True
        # Whether passes over other microbatches do the same. Of the first recording, once there is a second.
        self.repeats: bool | None = None
        self.results: list[_Kind] = []
        self._active = ExitStack()
        # Garbage that is freed in between belongs to other passes.
        self._active.enter_context(without_collection())
        ledger.tape = passes.tape = self

    def following(self, gradient: Tensor) -> _Recording:
        """Begin to record the backward pass, which may be the last one that uses the output's gradient."""
        recording = _Recording(self._mesh, self._ledger, self._passes, self.keys, self.numbers)
        numbers = {kind.number for kind in self.results}
        recording._outputs = {key for key, number in self.keys.items() if number in numbers}
        for key in recording._outputs:
            del self.keys[key]
        recording.given = self.keys[storage_id(gradient)] = next(self.numbers)
        return recording

    def end(self, results: Sequence[Tensor]) -> None:
        """Stop recording. results: the tensors that the pass leaves to the program."""
        self._event("done")
        self.stop()
        rows = self._mesh.stats().since(self._before).rows
        self.traffic: list[Traffic] = [
            (row.dim, row.call, row.calls, row.nbytes) for row in rows if row.calls
        ]
        self.results = [
            _Kind(
                self.keys.get(storage_id(x), -1),
                x.dtype,
                tuple(x.shape),
                x.stride(),
                int(x.storage_offset()),
            )
            for x in results
        ]

    def stop(self) -> None:
        """Record no more, after an error, too."""
        self._ledger.tape = self._passes.tape = None
        self._active.close()

    def equals(self, other: _Recording) -> bool:
        """Return whether two passes do the same."""
        return self.results == other.results and [*map(_same, self.events)] == [*map(_same, other.events)]

    def _event(self, *event: Any) -> None:
        done, before = (self._ledger.flops, self._ledger.moved), self._done
        if done != before:
            self.events.append(("done", done[0] - before[0], done[1] - before[1]))
            self._done = done
        if event != ("done",):
            self.events.append(event)

    def made(self, key: int, nbytes: int, forward: bool, by: Maker) -> None:
        self._outputs.discard(key)
        self.keys[key] = number = next(self.numbers)
        self._event("made", number, nbytes, forward, by)

    def resized(self, key: int, before: int, after: int, by: Maker) -> None:
        number = self.keys.get(key)
        # The weights that FSDP gathers keep their storages.
        place = (False, key) if number is None else (True, number)
        self._event("resized", *place, before, after, by)

    def named(self, key: int, part: MemoryPart) -> None:
        number = self.keys.get(key)
        if number is not None and number != self.given:
            self._event("named", number, part)

    def freed(self, key: int) -> None:
        if key in self._outputs:
            self._outputs.remove(key)
            return
        number = self.keys.pop(key, None)
        self.is_closed &= number is not None
        self._event("freed", number)

    def called(self, span: Span) -> None:
        self._event("called", span)

    def waited(self, call: int) -> None:
        self.is_closed &= call >= self._first_call
        self._event("waited", call - self._first_call)


def _same(event: _Event) -> _Event:
    """Return what is equal in the same events of two microbatches."""
    if event[0] != "called":
        return event
    span: Span = event[1]
    messages = tuple(part[:3] for part in span.parts)
    whole = (span.group, span.call, span.site, span.nbytes, span.shape, span.listed, span.dtype, span.op)
    return "called", *whole, span.root, messages


@final
class Repeats:
    """Runs or replays the passes of a step of an engine, which is run in this context.

    Raises Irregular in the step, which then has to be run without it.

    Attributes:
        traffic: what the replayed passes add to the mesh's statistics.
    """

    def __init__(self, engine: Engine, ledger: Ledger, passes: Passes) -> None:
        self._engine, self._ledger, self._passes = engine, ledger, passes
        self.traffic: list[Traffic] = []
        self._begun: dict[nn.Module, int] = defaultdict(int)
        self._forward: dict[nn.Module, list[_Recording]] = defaultdict(list)
        self._backward: dict[nn.Module, list[_Recording]] = defaultdict(list)
        with without_modes():
            # Lets the outputs of a replayed pass need gradients.
            self._leaf = torch.zeros((), requires_grad=True)
        schedule = engine.sections.parallel.options.schedule
        pipelined = engine.splits.pipeline is not None
        if not (pipelined and schedule_properties(schedule).splits_backward):
            engine.around_forward(self._run)

    def __enter__(self) -> Repeats:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(recording := self._ledger.tape, _Recording):
            recording.stop()

    def _run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        """Run a module's forward pass over its next microbatch, or replay it."""
        number = self._begun[module]
        self._begun[module] += 1
        recordings = self._forward[module]
        if number in _RECORDED:
            return self._recorded(module, forward, args, more)
        if number <= max(_RECORDED) or number == self._engine.microbatches - 1:
            return forward(*args, **more)
        if not _repeat(recordings) or len(recordings[0].results) != 1:
            return forward(*args, **more)
        inputs = [x for x in tensors_of((args, more)) if x.requires_grad]
        held: dict[int, int] = {}
        play_forward = partial(self._play, recordings[0], held)
        play_backward = partial(self._play_backward, module, held, inputs)
        return _Replayed.apply(self._leaf, play_forward, play_backward)

    def _recorded(self, module: nn.Module, forward: Callable[..., Any], args: Any, more: Any) -> Any:
        """Run a forward pass, and record it and its backward pass."""
        inputs = [x for x in tensors_of((args, more)) if x.requires_grad]
        recording = _Recording(self._engine.mesh, self._ledger, self._passes, {}, count())
        outputs = forward(*args, **more)
        recording.end([outputs] if isinstance(outputs, Tensor) else [])
        self._forward[module].append(recording)
        backward: list[_Recording] = []

        def begin(gradient: Tensor) -> None:
            if not backward:
                backward.append(recording.following(gradient))
                at_end_of_backward(end)

        def end() -> None:
            gradients = [x.grad for x in inputs if x.grad is not None]
            backward[0].end(gradients)
            remaining = {backward[0].given, *(kind.number for kind in backward[0].results)}
            backward[0].is_closed &= remaining.issuperset(recording.keys.values())
            backward[0].is_closed &= len(gradients) == len(inputs)
            self._backward[module].append(backward[0])

        for output in tensors_of(outputs):
            if output.requires_grad:
                output.register_hook(begin)
        return outputs

    def _play_backward(
        self, module: nn.Module, held: dict[int, int], inputs: Sequence[Tensor], gradient: Tensor
    ) -> None:
        recordings = self._backward[module]
        if not _repeat(recordings):
            raise _IRREGULAR
        held[recordings[0].given] = storage_id(gradient)
        for x, gradient in zip(inputs, self._play(recordings[0], held), strict=True):
            x.grad = gradient
        for gradients in self._engine.gradients:
            if isinstance(gradients, GradientSync):
                gradients.count(module)

    def _play(self, recording: _Recording, held: dict[int, int]) -> list[Tensor]:
        """Do what a recorded pass did, and return its results. held: the key of each of the microbatch's storages, by number."""
        ledger, passes, first = self._ledger, self._passes, len(self._passes.calls)
        self.traffic += recording.traffic
        storages: dict[int, Any] = {kind.number: None for kind in recording.results}
        for kind, *event in recording.events:
            match kind:
                case "made":
                    number, nbytes, forward, by = event
                    if number in storages:
                        # The program frees it.
                        storages[number] = storage = storage_without_memory(nbytes)
                        held[number] = ledger.made(storage, nbytes, by.operator, by)
                    else:
                        held[number] = key = next(_KEYS)
                        ledger.made_again(key, nbytes, forward, by)
                case "freed":
                    if (key := held[event[0]]) < 0 or event[0] == recording.given:
                        ledger.end(key)
                case "resized":
                    is_own, place, before, after, by = event
                    key = held[place] if is_own else place
                    if ledger.size(key) != before:
                        raise _IRREGULAR
                    ledger.resized_again(key, after, by)
                case "named":
                    ledger.name(held[event[0]], event[1])
                case "done":
                    ledger.flops += event[0]
                    ledger.moved += event[1]
                case "called":
                    passes.called(event[0])
                case "waited":
                    passes.happens("wait", first + event[0])
        with without_modes():
            return [
                torch.empty(0, dtype=kind.dtype).set_(
                    storages[kind.number], kind.offset, kind.shape, kind.stride
                )
                for kind in recording.results
            ]


def _repeat(recordings: Sequence[_Recording]) -> bool:
    """Return whether the passes over further microbatches do what these did."""
    if len(recordings) < len(_RECORDED):
        return False
    first, second = recordings
    if first.repeats is None:
        owned = all(kind.number >= 0 for kind in first.results)
        first.repeats = owned and first.is_closed and second.is_closed and first.equals(second)
    return first.repeats


class _Replayed(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed too."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, forward: Callable[[], list[Tensor]], backward: Callable[[Tensor], None]
    ) -> Any:
        """Return the output. leaf: needs a gradient, and gets none."""
        ctx.replay = backward
        ctx.set_materialize_grads(False)
        return forward()[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Replay the backward pass."""
        ctx.replay(gradients[0])
        return None, None, None
