"""The memory and traffic of one training step on one simulated rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshcomm.comm.checks import check_answered
from meshcomm.config import Config
from meshcomm.config.mesh import DimOptions
from meshcomm.config.section import Table
from meshcomm.dryrun.hollow import Hollow
from meshcomm.dryrun.ledger import Ledger, LedgerMode, MemoryPart, Peak
from meshcomm.dryrun.repeats import Irregular, Repeats, Traffic
from meshcomm.dryrun.torch_private import at_end_of_backward, one_rank_of_torch
from meshcomm.errors import LayoutError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.mesh.source import MeshOnly, Settings
from meshcomm.models import model_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.splits import sections
from meshcomm.parallel.tensor import local
from meshcomm.parallel.torch_private import fsdp_tensors
from meshcomm.train.torch_private import backward_number
from meshcomm.watching.spans import PASSES, Span, Spans

BETWEEN: Final = "between passes"


class TrafficRow(NamedTuple):
    """One rank's calls of one kind along one dim in a step. Bytes are counted as in `mesh.stats()`."""

    dim: str
    call: str
    calls: int
    nbytes: int


class Event(NamedTuple):
    """One moment of the program. "start": a call begins. "wait": the program waits for a call, immediately after its start
    if the call blocks. "part": the reported part begins, and everything before it has ended.

    call: the index of the call in `RankStep.calls`; for "part", the index of its first call. flops: this rank's FLOPs
    since the step began, by the formulas of torch.utils.flop_counter. moved: the bytes that its other operators have read and
    written since then.
    """

    kind: Literal["start", "wait", "part"]
    call: int
    flops: int
    moved: int = 0


class RankStep(NamedTuple):
    """One step of one rank.

    parameters: the number of elements in this rank's shards of the weights. before: bytes held at the start of the step.
    peak: the maximum during the step. rows: totals of the calls. calls: every call in order, made through the mesh or
    outside it. A collective's `root` is a coord, its `op` is the reduction, and its `group` identifies the group.
    groups: the global ranks of each `group`, in coord order. events: starts and waits in order; only a simulated rank has
    waits. A call that is never waited for has no "wait" event. flops, moved: totals, see `Event`. reserved: the bytes that
    torch's allocator has reserved, see `Arena`.

    unseen: the number of calls on groups outside the mesh that were not recorded. part: a description of the part that
    `rows` and times cover. begins: the start of that part; None means the first event. `calls` also contains the calls of
    earlier steps, because they must match too.
    """

    rank: int
    coords: dict[str, int]
    parameters: int
    before: dict[MemoryPart, int]
    peak: Peak
    rows: list[TrafficRow]
    calls: list[Span]
    groups: dict[str, list[int]]
    events: list[Event]
    flops: int
    moved: int = 0
    reserved: int = 0
    part: str = "one step"
    begins: Event | None = None
    unseen: int = 0

    @property
    def part_flops(self) -> int:
        """FLOPs of the reported part."""
        return self.flops - (self.begins.flops if self.begins else 0)


class PassTape(Protocol):
    """What is told of the calls of a pass. waited: with a call's index in `Passes.calls`."""

    def called(self, span: Span) -> None: ...
    def waited(self, call: int) -> None: ...


class Passes(Spans):
    """A trace that also records the current pass and the order in which calls start and are waited for.

    FSDP's calls start and end where they do on a GPU, on streams of their own. On the CPU, FSDP waits for each call at once.
    """

    def __init__(self) -> None:
        super().__init__(most=sys.maxsize)
        self._now: Span | None = None
        self.done: Callable[[], tuple[int, int]] = lambda: (0, 0)
        # Told of calls and waits while a pass is recorded.
        self.tape: PassTape | None = None
        self.restart()

    def restart(self) -> None:
        """Discard the calls recorded so far."""
        self.calls: list[Span] = []
        self.events: list[Event] = []
        self.unseen = 0
        # The kind of FSDP's next call, and the waits that follow later: of its gathers, and of its last scatter.
        self._shards = ""
        self._gathers: list[Callable[[], None]] = []
        self._scatters: list[Callable[[], None]] = []
        # Where the next gather of a forward pass starts: after the layer before it was gathered.
        self._early: int | None = None

    def ledger(self, hollow: bool) -> Ledger:
        """Return a ledger that knows the current pass. Events take their FLOPs and bytes from this ledger."""
        ledger = Ledger(self.stretch, hollow=hollow)
        self.done = lambda: (ledger.flops, ledger.moved)
        return ledger

    def step_of(
        self, rank: int, coords: dict[str, int], groups: dict[str, list[int]], ledger: Ledger
    ) -> RankStep:
        """Return a `RankStep` with the calls and the memory recorded so far."""
        return RankStep(
            rank=rank,
            coords=coords,
            parameters=0,
            before=ledger.now(),
            peak=ledger.peak(),
            rows=[],
            calls=self.calls,
            groups=groups,
            events=self.events,
            flops=ledger.flops,
            moved=ledger.moved,
            reserved=ledger.arena.reserved,
            unseen=self.unseen,
        )

    def keep(self, span: Span) -> Span:
        if span.lane == PASSES:
            self._now = span
        if span.group:
            self.called(span)
        return super().keep(span)

    def called(self, span: Span) -> None:
        """Record the start of a call."""
        self.calls.append(span)
        self.happens("start", len(self.calls) - 1)
        if self.tape is not None:
            self.tape.called(span)

    def waiting(self) -> Callable[[], None]:
        """Return a function to call when the program waits for the most recent call."""
        waited = partial(self._waited, len(self.calls) - 1, self.calls)
        kind, self._shards = self._shards, ""
        in_backward = backward_number() >= 0
        if kind == "gather":
            # A program that records no calls has no events.
            if self._early is not None and not in_backward and len(self.events) > self._early:
                before = self.events[self._early - 1]
                start = self.events.pop()._replace(flops=before.flops, moved=before.moved)
                self.events.insert(self._early, start)
            return partial(self._gathers.append, waited)
        # Between replicas, an all_reduce follows the scatter.
        if in_backward and (kind == "scatter" or (self._scatters and self.calls[-1].call == "all_reduce")):
            if kind:
                at_end_of_backward(self._scattered, own=True)
            return partial(self._scatters.append, waited)
        return waited

    def shards(self, operator: str) -> None:
        """Note an operator of FSDP, which tells what its next call is, and when it uses what it gathered.

        In a forward pass, the next layer is gathered while this one computes; in a backward pass, FSDP itself starts the
        gather before it computes. A layer's gradients are scattered while the next layer computes: FSDP waits for them
        before it scatters the next ones, and at the end of the backward pass (torch.distributed.fsdp, FSDPParamGroup).
        """
        if "all_gather_copy_in" in operator:
            self._shards = "gather"
        elif "chunk_cat" in operator:
            self._scattered()
            self._shards, self._early = "scatter", None
        elif "split_with_sizes_copy" in operator and self._gathers:
            self._gathers.pop(0)()
            self._early = len(self.events) if backward_number() < 0 else None

    def _scattered(self) -> None:
        for waited in self._scatters:
            waited()
        self._scatters.clear()

    def _waited(self, call: int, calls: list[Span]) -> None:
        # A call from before `restart` is not part of the step.
        if calls is self.calls and call >= 0:
            self.happens("wait", call)
            if self.tape is not None:
                self.tape.waited(call)

    def happens(self, kind: Literal["start", "wait", "part"], call: int) -> None:
        """Record a moment of the program."""
        if kind == "part":
            self._early = None
        self.events.append(Event(kind, call, *self.done()))

    def stretch(self) -> tuple[str, bool]:
        """Return the name of the current pass, and whether it is a forward pass."""
        current = self._now
        if current is None or current.left is not None:
            return BETWEEN, False
        return current.call, current.call.startswith("forward")


def counted_step(
    mesh: Mesh,
    config: Config,
    mode: Callable[[Ledger, Passes], LedgerMode] = Hollow,
    *,
    repeats: bool = False,
) -> RankStep:
    """Build the model of `config` on `mesh`, train it, and return the second step.

    mode: `Hollow`, in which tensors have neither memory nor values, or a mode in which they have both.
    repeats: whether to replay microbatches that repeat. The result is the same.
    Called by: every rank of the mesh.
    Raises:    the same errors as `Engine`; Irregular if `repeats` is not possible.
    """
    parts = sections(mesh, config)
    if parts.model is None or parts.data is None:
        raise LayoutError(
            "a dry run needs a model and data",
            given=f"{config.source} without [model] and [data]",
            expected="both sections, from whose sizes memory and bytes are computed",
            hint="meshcomm new writes a config that has both",
        )
    hollow, passes = mode is Hollow, Passes()
    ledger = passes.ledger(hollow)
    with mode(ledger, passes) as entered, PartNames(ledger) as names:
        engine = Engine(mesh, config, model_of(parts.model, parts.data, parts.train), filled=not hollow)
        # The first steps also compare values across ranks. Later steps do not, so these comparisons are not counted.
        engine.checked_steps = 0
        samples = (parts.train.micro_batch_size * engine.microbatches, parts.data.seq_len)
        tokens = torch.zeros(samples, dtype=torch.int64, device=mesh.device)
        # Each sample is one document, because the traffic does not depend on the number of documents.
        documents = torch.zeros_like(tokens) if engine.model.packed else None
        mesh.debug.metrics.trace_into(passes)
        try:
            if isinstance(entered, Hollow):
                _begin(engine)
            else:
                engine.step(tokens, tokens, parts.train.lr, 1, documents)
            for module in engine.modules.modules():
                names.module(module)
            names.optimizer(engine.optimizer)
            ledger.call_it("optimizer", [] if engine.average is None else engine.average.values.values())
            replayed: list[Traffic] = []
            earlier, before = mesh.stats(), ledger.now()
            ledger.restart()
            passes.restart()
            with ExitStack() as around:
                if repeats:
                    replayed = around.enter_context(Repeats(engine, ledger, passes)).traffic
                engine.step(tokens, tokens, parts.train.lr, 2, documents)
            traffic = mesh.stats().since(earlier)
        finally:
            mesh.debug.metrics.trace_into(None)
        rows = [TrafficRow(row.dim, row.call, row.calls, row.nbytes) for row in traffic.rows]
        rows = summed([*rows, *(TrafficRow(*row) for row in replayed)])
        step = passes.step_of(mesh.rank, mesh.coords, mesh.debug.metrics.groups, ledger)
        return step._replace(parameters=sum(names.elements.values()), before=before, rows=rows)


@final
class PartNames:
    """A context manager that reports the purpose of each module's and each optimizer's memory to a ledger.

    elements: the number of elements that this rank holds of each parameter, by the parameter's id.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.elements: dict[int, int] = {}
        self._ledger = ledger
        # Maps the id of each module inside an FSDP module to the FSDP module, which gathers its weights.
        self._sharded: dict[int, FSDPModule] = {}

    def __enter__(self) -> PartNames:
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
            register_module_forward_pre_hook(self.module),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._ledger.stepping = True
        self.optimizer(optimizer)

    def _ends(self, optimizer: Optimizer, *_: Any) -> None:
        self._ledger.stepping = False
        self.optimizer(optimizer)

    def optimizer(self, optimizer: Optimizer) -> None:
        """Set the purpose of the optimizer's parameters, gradients and state."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [value for states in optimizer.state.values() for value in states.values()]
        self.elements.update({id(parameter): local(parameter.detach()).numel() for parameter in parameters})
        self._ledger.call_it("weights", parameters)
        self._ledger.call_it(
            "gradients", [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        self._ledger.call_it("optimizer", [value for value in state if isinstance(value, Tensor)])
        for module in set(self._sharded.values()):
            self._gathered(module)

    def module(self, module: nn.Module, *_: Any) -> None:
        """Set the purpose of the module's own parameters and buffers, without those of its children."""
        self._ledger.call_it("weights", module.buffers(recurse=False))
        if isinstance(module, FSDPModule):
            self._sharded |= {id(part): module for part in module.modules()}
        sharded = self._sharded.get(id(module))
        if sharded is not None:
            self._gathered(sharded)
        else:
            self._ledger.call_it("weights", module.parameters(recurse=False))

    def _gathered(self, module: FSDPModule) -> None:
        whole, waiting = fsdp_tensors(module)
        self._ledger.call_it("gathered", whole)
        self._ledger.call_it("gradients", waiting)


def pretended_step(config: Config, rank: int, world: int) -> RankStep:
    """Return the result of `counted_step` as rank `rank` of `world`. No other rank exists, nothing is sent, and no tensor
    has values.

    The process must not have initialized torch.distributed. The process's state is restored for the next rank. Tensors are CPU
    tensors, regardless of the mesh's device.

    Raises: the same errors as `counted_step`; UnsupportedOp if the model reads values.
    """
    settings = alone(config)
    assert isinstance(settings, Config)
    for repeats in (True, False):
        with suppress(Irregular), pretended_world(rank, world), init(settings) as mesh:
            return counted_step(mesh, config, repeats=repeats)
    raise AssertionError


def summed(counts: Iterable[TrafficRow]) -> list[TrafficRow]:
    """Sum `counts` into one row for each dim and call."""
    rows: dict[tuple[str, str], TrafficRow] = {}
    for dim, call, calls, nbytes in counts:
        _, _, before, earlier = rows.get((dim, call), (dim, call, 0, 0))
        rows[dim, call] = TrafficRow(dim, call, before + calls, earlier + nbytes)
    return list(rows.values())


def alone(settings: Settings) -> Settings:
    """Return the settings for a mesh in a world where only one rank exists."""
    mesh = settings.mesh
    options = Table({name: DimOptions(comm_id=each.comm_id) for name, each in mesh.options.items()})
    changed = {"device": "cpu", "backend": "fake", "options": options, "validate_calls": 0, "reports": ""}
    mesh = mesh.model_copy(update={**changed, "warm_up": False})
    if isinstance(settings, MeshOnly):
        return settings._replace(mesh=mesh)
    return settings.model_copy(update={"mesh": mesh})


@contextmanager
def pretended_world(
    rank: int,
    world: int,
    told: Callable[[DeviceMesh], None] = lambda _: None,
    objects: list[list[bytes]] | None = None,
) -> Iterator[None]:
    """While this context is active, this process is the only existing rank of a world. told, objects: see
    `one_rank_of_torch`.

    Raises LayoutError if torch.distributed is already initialized, and UnsupportedOp if a shape depends on values.
    """
    if dist.is_initialized():
        raise LayoutError(
            "a dry run needs a separate process",
            given="torch.distributed, initialized",
            expected="a process without a default group",
            hint="dist.destroy_process_group() before it, or a new process",
        )
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        with one_rank_of_torch(_unknown_object, told, objects):
            yield
    except Exception as error:
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            raise UnsupportedOp(
                "the model's shapes depend on values, which a dry run does not have",
                given=f"{type(error).__name__}: {error}",
                expected="a forward pass whose shapes depend only on the shapes of its inputs",
                hint="replace the selection with a mask, or run a small world for real",
            ) from error
        raise
    finally:
        # The program may already have destroyed the group.
        if dist.is_initialized():
            dist.destroy_process_group()


def _unknown_object(*_: object, **__: object) -> NoReturn:
    hint = "mesh.objects.all_gather and gather, which assume that the other ranks pass the same object; or a file that all ranks read"
    check_answered("fake", "the objects", "a collective of objects of torch.distributed", hint)
    raise AssertionError


def _begin(engine: Engine) -> None:
    """Create the gradients and the optimizer state that a first step leaves behind. A first step leaves nothing else of
    significant size.

    A full first step would have the same result, but would double the time.
    """
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    for gradient in engine.gradients:
        if isinstance(gradient, GradientSync):
            # GradientSync keeps gradients in memory that it has already allocated.
            gradient.start()
