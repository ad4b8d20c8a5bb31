"""Run operators on tensors that have neither values nor memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from logging import getLogger
from typing import Any, Final, NamedTuple, TypeAlias, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.dryrun.ledger import COMPOSED, Ledger, LedgerMode
from meshcomm.dryrun.torch_private import (
    FakeMode,
    ToldWork,
    decomposes,
    fake_tensors_on,
    flatten_tree,
    schema_of,
    tell_hooks,
    unflatten_tree,
    wraps_tensors,
)
from meshcomm.parallel.torch_private import FakeTensor, storage_without_memory
from meshcomm.train.torch_private import flops_of
from meshcomm.transport.torch_private import explicit_kernel, leaves_of, storage_id

_EMPTY: Final[dict[str, Any]] = {}
# isinstance checks against ProcessGroup are slow.
_COMMON: Final = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
_Handler: TypeAlias = Callable[[Any, Any, Any], Any]


class _Result(NamedTuple):
    """One tensor of a result. given: the index of the argument that the tensor is or shares memory with, or -1. memory:
    the index of the tensor's new storage, or -1.

    shape: None if the result is the argument itself. offset: the storage offset.
    """

    given: int
    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    offset: int


class _Known(NamedTuple):
    """The effect of an operator for given argument shapes.

    memories: the size of each new storage in bytes. leaves: tensors as _Result, other values unchanged. structure: the
    pytree structure, or None for a single leaf. resized: the arguments that change size. moved: see `_moved`. real: whether
    torch runs the operator itself, because its results are on the meta device.
    """

    memories: tuple[int, ...]
    leaves: tuple[Any, ...]
    structure: Any
    resized: tuple[tuple[int, _Result], ...]
    flops: int
    moved: int = 0
    real: bool = False


_REAL: Final = _Known((), (), None, (), 0, real=True)
# Operators that write an argument without reading it.
_OVERWRITE: Final = ("copy_", "zero_", "fill_", "normal_", "uniform_")
# Operators that read or write only some rows of their largest argument.
_FEW_ROWS: Final = ("embedding", "gather", "index", "index_", "scatter")


@lru_cache(maxsize=1)
def _learned() -> dict[Any, _Known]:
    """Return the cache of operator effects, by operator and arguments. All ranks that this process simulates share it."""
    return {}


@final
class Hollow(LedgerMode):
    """While this mode is active, operators on CPU tensors return results of the right size that occupy no memory.

    Results are plain tensors whose storages have an address and a size. A result's metadata is computed on torch's
    FakeTensors, once for each operator and kind of arguments; torch creates views itself. Calls on groups complete
    immediately and transfer no data. Every value that is read is 0, or 1 in an optimizer step, because optimizers divide
    by numbers computed from the step count. The exceptions are `torch.arange(world_size)` and tensors that are computed
    only from it and are no larger. They have values, because programs search such a grid for their rank.

    Args:
        ledger: records memory and FLOPs. calls: a `Passes` that records the calls on groups.

    Raises: torch's DataDependentOutputException or DynamicOutputShapeException if a result's shape or value depends on
        tensor values.
    """

    def __init__(self, ledger: Ledger, calls: Any) -> None:
        super().__init__(ledger)
        self._calls = calls
        self._fake = FakeMode(allow_non_fake_inputs=True)
        self._known = _learned()
        self._handlers: dict[Any, _Handler] = {}
        self._names: dict[Any, str] = {}
        # The functions that report waits for pending functional collectives, by the storage of their results.
        self._flying: dict[int, Callable[[], None]] = {}
        # Tensors with values, by storage. Holding the tensors keeps their storages alive.
        self._valued: dict[int, Tensor] = {}
        # Works that have not been waited for, with the functions that report the waits.
        self._works: dict[ToldWork, Callable[[], object]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this returned True, torch would wrap each operator in two more calls.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if types and wraps_tensors(types):
            # DTensor and similar subclasses call operators on their local tensors, and this mode then handles those calls.
            return NotImplemented
        if fake_tensors_on() or (types and any(issubclass(kind, FakeTensor) for kind in types)):
            # DTensor infers shapes by running operators on fake tensors.
            return func(*args, **(kwargs or _EMPTY))
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        return handler(func, args, kwargs or _EMPTY)

    def _handler(self, func: Any) -> _Handler:
        """Return the handler for an operator."""
        self._names[func] = str(func)
        schema, namespace = schema_of(func), func.namespace
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar
        if func.overloadpacket is torch.ops.aten.arange:
            return self._numbers
        if func is torch.ops.aten.equal.default:
            return lambda func, args, kwargs: args[0].shape == args[1].shape
        if func is torch.ops.aten.bincount.default:
            return self._count
        if namespace in COMPOSED:
            return self._composed
        if namespace == "c10d":
            return self._call
        if "wait_tensor" in schema.name:
            return self._wait
        if namespace.startswith("_c10d_functional"):
            # Wrapping a result in the tensor subclass that waits on first use is not a collective.
            return _as_torch if schema.name.endswith("_wrap_tensor_autograd") else self._functional
        if schema.name == "aten::set_" or namespace == "profiler":
            return _as_torch
        written = any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
        )
        if schema.returns and not written and all(result.alias_info is not None for result in schema.returns):
            # The operator always returns a view, which needs no memory, or it returns a view or a copy, like reshape.
            return self._decomposed if decomposes(func) else _as_torch
        return self._compute

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle an operator that computes new values. Any memory that it allocates has a known size."""
        tensors: list[Tensor] = []
        key: list[Any] = [func]
        _describe(args, key, tensors)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                _describe((value,), key, tensors)
        if self._valued and any(storage_id(x) in self._valued for x in tensors):
            if (
                all(storage_id(x) in self._valued for x in tensors)
                and _spread(tensors) <= dist.get_world_size()
            ):
                return self._with_values(func, args, kwargs)
            if schema_of(func).is_mutable:
                for x in tensors:
                    self._valued.pop(storage_id(x), None)
        hashed_key = tuple(key)
        try:
            known = self._known.get(hashed_key)
        except TypeError:
            # Results for unhashable arguments are not cached.
            known = self._learn(func, args, kwargs, tensors)
        if known is None:
            known = self._known[hashed_key] = self._learn(func, args, kwargs, tensors)
        if known.real:
            return func(*args, **kwargs)
        ledger, name = self._ledger, self._names.get(func, "")
        ledger.flops += known.flops
        ledger.moved += known.moved
        memories = [self._memory(nbytes, name) for nbytes in known.memories]
        for number, result in known.resized:
            _made(memories[result.memory], result, tensors[number])
        results = [
            (_of(tensors[leaf.given], leaf) if leaf.given >= 0 else _made(memories[leaf.memory], leaf))
            if type(leaf) is _Result
            else leaf
            for leaf in known.leaves
        ]
        if func.namespace == "fsdp":
            ledger.copied(tensors)
            self._calls.shards(name)
        return results[0] if known.structure is None else unflatten_tree(results, known.structure)

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        if storage_id(args[0]) in self._valued:
            return func(*args, **kwargs)
        return _value(args[0].dtype, int(self._ledger.stepping))

    def _numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        numbers = self._compute(func, args, kwargs)
        every = numbers.dtype == torch.int64 and numbers.device.type == "cpu" and dist.is_initialized()
        if every and numbers.numel() == dist.get_world_size():
            return self._with_values(func, args, kwargs)
        return numbers

    def _with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        self._valued |= {
            storage_id(tensor): tensor for tensor in leaves_of(results) if isinstance(tensor, Tensor)
        }
        return results

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the minimum number of bins (minlength, at least 1), because all counted values are 0."""
        arguments = dict(zip(("input", "weights", "minlength"), args, strict=False)) | kwargs
        weights = arguments.get("weights")
        dtype = torch.int64 if weights is None else torch.float64
        return self._compute(
            torch.ops.aten.empty.memory_format, ([max(1, arguments.get("minlength", 0))],), {"dtype": dtype}
        )

    def _memory(self, nbytes: int, name: str) -> Any:
        storage = storage_without_memory(nbytes)
        self._ledger.made(storage, nbytes, name)
        return storage

    def _learn(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> _Known:
        """Run an operator on torch's FakeTensors of the same sizes to learn its effect."""
        twins: dict[int, Tensor] = {}

        def twin(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in twins:
                twins[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            return twins[id(x)]

        leaves, structure = flatten_tree((args, dict(kwargs)))
        # If the operator fails, the error is raised. Without the patch, torch would also log it.
        with self._fake, patch.object(getLogger("torch._subclasses.fake_tensor"), "disabled", True):
            theirs, named = unflatten_tree([twin(leaf) for leaf in leaves], structure)
            result = func(*theirs, **named)
            formula = flops_of(func)
            flops = 0 if formula is None else int(formula(*theirs, **named, out_val=result))
        places = {id(twins[id(x)]): number for number, x in reversed(list(enumerate(tensors)))}
        input_of_storage = {
            storage_id(twins[id(x)]): number for number, x in reversed(list(enumerate(tensors)))
        }
        memories: dict[int, tuple[int, int]] = {}

        def one(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            number = places.get(id(x))
            if number is not None:
                return _Result(number, -1, x.dtype, None, (), 0)
            shape = (x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))
            if storage_id(x) in input_of_storage:
                return _Result(input_of_storage[storage_id(x)], -1, *shape)
            size = x.untyped_storage().nbytes()
            place, _ = memories.setdefault(storage_id(x), (len(memories), size))
            return _Result(-1, place, *shape)

        resized = []
        for number, x in enumerate(tensors):
            after = twins[id(x)]
            if after.shape != x.shape or after.stride() != x.stride():
                # The operator resized its argument, for example an out= tensor of a different size.
                place, _ = memories.setdefault(-1 - number, (len(memories), after.untyped_storage().nbytes()))
                resized.append((number, _Result(-1, place, x.dtype, tuple(after.shape), after.stride(), 0)))
        flat, structure = flatten_tree(result)
        results = [x for x in flat if isinstance(x, Tensor)] or list(twins.values())
        if results and all(x.device.type == "meta" for x in results):
            return _REAL
        outcome = tuple(one(x) for x in flat)
        sizes = tuple(size for _, size in memories.values())
        alone = len(flat) == 1 and flat[0] is result
        moved = 0 if flops else _moved(func, theirs, named, sum(sizes))
        return _Known(sizes, outcome, None if alone else structure, tuple(resized), flops, moved)

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.inside(func.decompose, *args, **kwargs)

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Run the inner operators. Otherwise torch would only compute a shape for tensors without values.
        return self.inside(explicit_kernel, func, *args, **kwargs)

    # -- calls on groups ------------------------------------------------------------------------------

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a call and its wait through the group's hooks. The mesh's own calls are already recorded."""
        work = ToldWork(args, self._waited)
        known = tell_hooks(func, args, (), work)
        if not known:
            self._calls.unseen += 1
        self._works[work] = self._calls.waiting() if known else int
        returned = len(schema_of(func).returns)
        return None if not returned else work.boxed() if returned == 1 else (args[0], work.boxed())

    def _waited(self, work: ToldWork) -> None:
        self._works.pop(work)()

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        results = self._compute(func, args, kwargs)
        outputs = [leaf for leaf in leaves_of(results) if isinstance(leaf, Tensor)]
        before = len(self._calls.calls)
        if not tell_hooks(func, args, outputs, None):
            self._calls.unseen += 1
        if len(self._calls.calls) > before:
            ended = self._calls.waiting()
            self._flying.update({storage_id(output): ended for output in outputs})
        return results

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        for leaf in leaves_of(args):
            ended = self._flying.pop(storage_id(leaf), None)
            if ended is not None:
                ended()
        return args[0]


def _as_torch(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _moved(func: Any, args: Any, kwargs: Any, new: int) -> int:
    """Return the bytes that an operator's kernel reads and writes: each argument once, and once more if it is written in
    place, and each result once. new: the bytes of new results.
    """
    name = schema_of(func).name.partition("::")[2]
    if func.namespace.startswith("_c10d") or name.startswith(("empty", "new_empty")):
        return 0
    given = {
        argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)
    } | kwargs
    read, written = (
        [
            min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            for argument in schema_of(func).arguments
            if not writes or (argument.alias_info is not None and argument.alias_info.is_write)
            for x in leaves_of(given.get(argument.name))
            if isinstance(x, Tensor)
        ]
        for writes in (False, True)
    )
    if name.startswith(_FEW_ROWS):
        return 2 * (sum(read) - max(read, default=0) + new)
    overwrites = name in _OVERWRITE or "out" in given
    return sum(read) + new + (0 if overwrites else sum(written))


def _spread(tensors: Sequence[Tensor]) -> int:
    """Return the largest number of elements that an operator can produce from these tensors by broadcasting."""
    try:
        return int(torch.broadcast_shapes(*(x.shape for x in tensors)).numel())
    except RuntimeError:
        return max(x.numel() for x in tensors)


def _value(dtype: torch.dtype, number: int) -> Any:
    if dtype == torch.bool:
        return bool(number)
    return complex(number) if dtype.is_complex else float(number) if dtype.is_floating_point else number


def _describe(values: Any, key: list[Any], tensors: list[Tensor]) -> None:
    """Append everything that a result may depend on to `key`, and the tensors to `tensors`."""
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.is_meta)
        elif isinstance(x, list | tuple):
            key.append(len(x))
            _describe(x, key, tensors)
        elif type(x) not in _COMMON and isinstance(x, torch.Generator | dist.ProcessGroup):
            # The size of a result does not depend on the identity of a generator or group.
            key.append(type(x))
        else:
            # The type is needed because 1, 1.0 and True are equal.
            key += (type(x), x)


def _made(storage: Any, result: _Result, onto: Tensor | None = None) -> Tensor:
    """Return a tensor with a new storage. onto: an existing tensor whose storage is replaced."""
    x = torch.empty(0, dtype=result.dtype) if onto is None else onto
    return x.set_(storage, result.offset, result.shape or (), result.stride)


def _of(x: Tensor, result: _Result) -> Tensor:
    """Return the argument itself, or a tensor that shares its memory."""
    if result.shape is None:
        return x
    offset = x.storage_offset() + result.offset
    if result.dtype == x.dtype:
        return torch.as_strided(x, result.shape, result.stride, offset)
    return torch.empty(0, dtype=result.dtype).set_(x.untyped_storage(), offset, result.shape, result.stride)
