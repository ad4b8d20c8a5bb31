"""What does one step of a training hold and send on one rank? Measured on a rank that runs, or of one that is pretended."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshcomm.comm.spans import PASSES, Span, Spans
from meshcomm.config import Config
from meshcomm.config.mesh import DimOptions
from meshcomm.config.section import Table
from meshcomm.dryrun.ledger import Ledger, Part, Peak
from meshcomm.errors import LayoutError, MeshcommError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.models import model_of
from meshcomm.parallel.compose import Engine, sections
from meshcomm.parallel.tensor import local
from meshcomm.transport.torch_private import (
    DispatchMode,
    FakeMode,
    fsdp_tensors,
    plain_device_meshes,
    tell_hooks,
    without_modes,
)

_BETWEEN: Final = "between passes"
# What is held between two steps besides weights and what belongs to them is small; the first makes it.
_WARM_UP: Final = 1


class Row(NamedTuple):
    """Calls of one kind along one dim in a step, by this rank; bytes as `mesh.stats()` counts them."""

    dim: str
    call: str
    calls: int
    nbytes: int


class Step(NamedTuple):
    """One step of one rank.

    parameters: elements of this rank's parts of the weights. before: bytes held when the step began. peak: the most
    during the step. rows: what it called. calls: each call by itself, in order.
    """

    rank: int
    coords: dict[str, int]
    parameters: int
    before: dict[Part, int]
    peak: Peak
    rows: list[Row]
    calls: list[Span]


@final
class _Passes(Spans):
    """A trace that also says which pass is under way."""

    def __init__(self) -> None:
        super().__init__()
        self._now: Span | None = None

    def keep(self, span: Span) -> Span:
        if span.lane == PASSES:
            self._now = span
        return super().keep(span)

    def stretch(self) -> tuple[str, bool]:
        """Its name, and whether it is a forward pass."""
        now = self._now
        if now is None or now.left is not None:
            return _BETWEEN, False
        return now.call, now.call.startswith("forward")


def counted_step(mesh: Mesh, config: Config, *, filled: bool = True) -> Step:
    """Build the model of `config` on `mesh`, train it for two steps, and tell of the second one.

    filled: False: weights get memory and no values.
    Called by: every rank of the mesh.
    Raises:    as `Engine`.
    """
    known = sections(mesh, config)
    if known.model is None or known.data is None:
        raise LayoutError(
            "a dry run has to know what is trained",
            given=f"{config.source} without [model] and [data]",
            expected="both: their sizes are what memory and bytes follow from",
            hint="configs/quickstart.toml has both",
        )
    passes = _Passes()
    ledger = Ledger(passes.stretch)
    with ledger:
        engine = Engine(mesh, config, model_of(known.model, known.data, known.train), filled=filled)
        # What the first steps compare is no part of the others.
        engine.checked_steps = 0
        parameters = [parameter for _, parameter in engine.named_parameters()]
        samples = (known.train.microbatch * engine.microbatches, known.data.sequence)
        tokens = torch.zeros(samples, dtype=torch.int64, device=mesh.device)
        mesh.trace_into(passes)

        def name_parts(*_: Any) -> None:
            _name_parts(ledger, engine, parameters)

        for module in engine.modules:
            module.register_forward_pre_hook(name_parts)
        engine.optimizer.register_step_pre_hook(name_parts)
        try:
            for number in range(1, _WARM_UP + 1):
                engine.step(tokens, tokens, known.train.lr, number)
            name_parts()
            earlier, first = mesh.stats(), len(passes.found)
            before = ledger.now()
            ledger.restart()
            engine.step(tokens, tokens, known.train.lr, _WARM_UP + 1)
            name_parts()
            made = mesh.stats().since(earlier)
        finally:
            mesh.trace_into(None)
        rows: dict[tuple[str, str], Row] = {}
        for row in made.rows:
            sums = rows.get((row.dim, row.call), Row(row.dim, row.call, 0, 0))
            rows[row.dim, row.call] = Row(row.dim, row.call, sums.calls + row.calls, sums.nbytes + row.nbytes)
        count = sum(local(each.detach()).numel() for each in parameters)
        calls = [span for span in passes.found[first:] if span.group]
        return Step(mesh.rank, mesh.coords, count, before, ledger.peak(), list(rows.values()), calls)


def pretended_step(config: Config, rank: int, world: int) -> Step:
    """The same as rank `rank` of `world`, which alone exists: nothing is sent, and no tensor has values.

    The process must not have initialised torch.distributed; it is left as it was found, for the next rank.
    Tensors are those of the CPU, whatever the device of the mesh.

    Raises: as `counted_step`; UnsupportedOp where the model looks at values.
    """
    with _pretended(rank, world), init(_alone(config)) as mesh, ExitStack() as modes:
        modes.enter_context(warnings.catch_warnings())
        # Messages that arrive at once are asked for their memory, to see whether they share it.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        modes.enter_context(plain_device_meshes())
        modes.enter_context(FakeMode(allow_non_fake_inputs=True))
        modes.enter_context(_Answers())
        try:
            return counted_step(mesh, _alone(config), filled=False)
        except MeshcommError:
            raise
        except Exception as error:
            if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise UnsupportedOp(
                    "the model's shapes depend on values, which a dry run does not have",
                    given=f"{type(error).__name__}: {error}",
                    expected="a forward pass whose shapes follow from those of its inputs",
                    hint="a mask in place of a selection; or a real run of a small world",
                ) from error
            raise


def _alone(config: Config) -> Config:
    """The configuration for a world of which only one rank exists."""
    mesh = config.mesh
    options = Table({name: DimOptions(lane=each.lane) for name, each in mesh.options.items()})
    changed = {"device": "cpu", "backend": "fake", "options": options, "validate_calls": 0, "reports": ""}
    return config.model_copy(update={"mesh": mesh.model_copy(update={**changed, "warm_up": False})})


@contextmanager
def _pretended(rank: int, world: int) -> Iterator[None]:
    if dist.is_initialized():
        raise LayoutError(
            "a dry run needs a process of its own",
            given="torch.distributed, initialised",
            expected="a process without a default group",
            hint="dist.destroy_process_group() before it, or a new process",
        )
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@final
class _Answers(DispatchMode):  # type: ignore[misc]
    """What a world without values and other ranks answers: every look at a value 0, and every call at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if func is torch.ops.aten._local_scalar_dense.default:
            with without_modes():
                return torch.zeros((), dtype=args[0].dtype).item()
        if func.namespace == "c10d":
            # Tensors without values do not come to the backend, which would tell of the call.
            tell_hooks(func, args)
        return func(*args, **(kwargs or {}))


def _name_parts(ledger: Ledger, engine: Engine, parameters: Sequence[nn.Parameter]) -> None:
    """Tell the ledger what the memory of a trainer is for. parameters: as they are between steps."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    for module in engine.modules.modules():
        if isinstance(module, FSDPModule):
            whole, waiting = fsdp_tensors(module)
            ledger.call_it("gathered", whole)
            gradients += waiting
    state = [each for held in engine.optimizer.state.values() for each in held.values()]
    ledger.call_it("weights", [*parameters, *engine.modules.buffers()])
    ledger.call_it("gradients", gradients)
    ledger.call_it("optimizer", [each for each in state if isinstance(each, Tensor)])
