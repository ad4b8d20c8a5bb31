"""A process group written in Python: what torch asks of it, apart from carrying calls, and the hooks around its calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.collectives import BARRIER, ROWS, Collective
from meshcomm.transport.torch_private import HOOK_NUMBERS, bindings

W = TypeVar("W")


class Method(NamedTuple):
    """A method of ProcessGroup. hook: its name in hooks. inputs: the index of its argument with the inputs."""

    row: Collective
    hook: str
    inputs: int


# The methods for each collective but the barrier, including those of older torch.
METHODS: Final = {
    **{
        name: Method(row, row.hooks[0], 0 if row.in_place else 1)
        for row in ROWS.values()
        if row is not BARRIER
        for name in row.methods
    },
    "allreduce_coalesced": Method(ROWS["all_reduce"], "ALLREDUCE_COALESCED", 0),
    "allgather": Method(ROWS["all_gather"], "ALLGATHER", 1),
    "allgather_into_tensor_coalesced": Method(ROWS["all_gather"], "ALLGATHER_INTO_TENSOR_COALESCED", 1),
    "all_gather_single_coalesced": Method(ROWS["all_gather"], "ALLGATHER_INTO_TENSOR_COALESCED", 1),
    "reduce_scatter": Method(ROWS["reduce_scatter"], "REDUCE_SCATTER", 1),
    "reduce_scatter_tensor_coalesced": Method(ROWS["reduce_scatter"], "REDUCE_SCATTER_TENSOR_COALESCED", 1),
    "reduce_scatter_single_coalesced": Method(ROWS["reduce_scatter"], "REDUCE_SCATTER_TENSOR_COALESCED", 1),
    "alltoall": Method(ROWS["all_to_all"], "ALLTOALL", 1),
}

# torch types ProcessGroup's methods with overloads that a Python subclass cannot reproduce.
_ProcessGroup: Any = dist.ProcessGroup


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose `collective` carries every collective but the barrier. backend: the name that torch shows.

    number: how many calls have been started, by a subclass.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, backend: str) -> None:
        super().__init__(rank, size)
        self._backend, self._name = backend, ""
        self.number = 0
        self.options = SimpleNamespace(
            _timeout=timeout, global_ranks_in_group=[], is_high_priority_stream=False
        )
        self._before: dict[int, Callable[[Any], None]] = {}
        self._after: dict[int, Callable[[Any], None]] = {}

    @abstractmethod
    def collective(self, name: str, method: Method, arguments: tuple[Any, ...], options: Any) -> Any:
        """Carry a call of the method `name`. arguments: all arguments but the options. Several tensors are in a list."""

    def hooked(
        self,
        hook: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        root: int,
        blocking: bool,
        start: Callable[[], W],
    ) -> W:
        """Return what `start` returns, and call the hooks before and after it, as torch does."""
        if not self._before:
            return start()
        number, asks = HOOK_NUMBERS.get(hook, -1), not blocking
        told = SimpleNamespace(
            name=number,
            input_tensors=list(inputs),
            output_tensors=list(outputs),
            root=root,
            async_op=asks,
            op_id=self.number + 1,
        )
        for before in list(self._before.values()):
            before(told)
        work = start()
        for after in list(self._after.values()):
            after(SimpleNamespace(name=number, async_op=asks, work=work, op_id=told.op_id))
        return work

    # -- what torch requires of a group -----------------------------------------------------------------

    def name(self) -> str:
        return self._backend

    getBackendName = name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        self._before[hook_id] = hook

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        self._after[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._before.pop(hook_id, None)

    def unregister_post_hook(self, hook_id: int) -> None:
        self._after.pop(hook_id, None)

    def _called(self, name: str, *given: Any, **named: Any) -> Any:
        """Carry a call of any of a method's overloads: with options, or with a root, an operation and a timeout; with lists of
        tensors, or with tensors.
        """
        row = METHODS[name].row
        options, tensors = getattr(bindings, row.options)(), []
        # torch's order: outputs, inputs, and the splits of both.
        order = sorted(named, key=lambda key: ("split" in key, key.startswith("in")))
        for value in (*given, *(named[key] for key in order)):
            if type(value).__name__.endswith("Options"):
                options = value
            elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                options.reduceOp = value
            elif isinstance(value, int):
                options.rootRank = value
            elif isinstance(value, timedelta):
                options.timeout = value
            elif value is not None:
                tensors.append(value)
        if row.in_place:
            tensors = [[x] if isinstance(x, Tensor) else x for x in tensors]
        elif isinstance(tensors[0], Tensor) != isinstance(tensors[1], Tensor):
            # Ranks without inputs, or without results, pass an empty list.
            tensors = [[x] if isinstance(x, Tensor) or x else [] for x in tensors]
        return self.collective(name, METHODS[name], tuple(tensors), options)


if not hasattr(dist.ProcessGroup, "register_pre_hook"):  # torch 2.13 and older: groups have no hooks
    del PythonGroup.register_pre_hook, PythonGroup.register_post_hook
for _name in METHODS:
    if hasattr(dist.ProcessGroup, _name):  # in this version of torch
        setattr(
            PythonGroup,
            _name,
            lambda self, *given, _name=_name, **named: self._called(_name, *given, **named),
        )
