"""Private torch APIs used by dry runs and emulated backends. Tested on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshcomm.transport.torch_private import (
    HOOK_NUMBERS,
    OPTIONS_KEY,
    Work,
    group_named,
    hooks_of,
    leaves_of,
    without_modes,
)

flatten_tree: Callable[[Any], tuple[list[Any], Any]] = tree_flatten
unflatten_tree: Callable[[Sequence[Any], Any], Any] = tree_unflatten
FakeMode: Any = FakeTensorMode
# Returns the active FakeTensorMode, if any. It calls torch._C directly because it is called for every operator.
fake_tensors_on: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


def schema_of(operator: Any) -> Any:
    """Return the operator's schema: its name, arguments and results."""
    return operator._schema


def decomposes(operator: Any) -> bool:
    """Return whether torch can decompose the operator into other operators."""
    return bool(operator._can_decompose())


def wraps_tensors(types: Iterable[type]) -> bool:
    """Return whether any of these types is a tensor subclass that calls operators on inner tensors, such as DTensor."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        kind.__torch_dispatch__ != plain and not issubclass(kind, FakeTensor)  # type: ignore[attr-defined]
        for kind in types
    )


def at_end_of_backward(call: Callable[[], None], *, own: bool = False) -> None:
    """Call a function when the backward pass under way has ended, after the callbacks that the pass itself queues.

    own: as one of these callbacks.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call if own else lambda: engine.queue_callback(call))


# Returns the number of dispatch modes that still see an operator after the caller.
modes_left: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Maps functional collectives to the names that a group's hooks use for them.
_FUNCTIONAL = {
    "all_reduce": "ALLREDUCE",
    "all_reduce_coalesced": "ALLREDUCE_COALESCED",
    "all_gather_into_tensor": "ALLGATHER_BASE",
    "all_gather_into_tensor_coalesced": "ALLGATHER_INTO_TENSOR_COALESCED",
    "reduce_scatter_tensor": "REDUCE_SCATTER_BASE",
    "reduce_scatter_tensor_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "all_to_all_single": "ALLTOALL_BASE",
    "broadcast": "BROADCAST",
    "isend": "SEND",
    "irecv": "RECV",
}


@final
class ToldWork(Work):  # type: ignore[misc]
    """The Work of a call that is not executed. It is complete from the start, and reports the first wait.

    held: the call's tensors, which it keeps alive as a backend would. The creator must keep a reference to the ToldWork
    until the wait, because torch keeps the C++ Work alive but not its Python part.
    """

    def __init__(self, held: object, waited: Callable[[ToldWork], None]) -> None:
        super().__init__()
        self._held = held
        self._waited: Callable[[ToldWork], object] | None = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Report the first wait. Always returns True."""
        if self._waited is not None:
            waited, self._waited = self._waited, None
            waited(self)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        """Return a future with the call's tensors as a flat list."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result([x for x in leaves_of(self._held) if isinstance(x, torch.Tensor)])
        return future


def _name_of(boxed: Any) -> str:
    """Return the name, such as `sum`, of a ReduceOp that a c10d operator has boxed. torch 2.14 and later have a method to
    unbox it.
    """
    unbox = getattr(dist.ReduceOp, "unbox", None)
    op = dist.ReduceOp.RedOpType(boxed.op()) if unbox is None else unbox(boxed).op
    return str(op.name).lower()


def tell_hooks(operator: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor], work: Any) -> bool:
    """Call a group's hooks for a collective that a mode does not pass to the backend. Return whether hooks were called.

    operator: a `c10d` operator or a functional collective. outputs: the results of a functional collective. work: the Work
    to pass to the hook.
    """
    arguments = {
        argument.name: value for argument, value in zip(schema_of(operator).arguments, args, strict=False)
    }
    kind = schema_of(operator).name.partition("::")[2].strip("_")
    group: Any
    if "process_group" in arguments:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        kind = kind.upper().removesuffix("_ANY_SOURCE")
    else:
        # A group may be given by name or as a ProcessGroup.
        group = arguments["group_name"]
        group = group_named(group) if isinstance(group, str) else group
        kind = _FUNCTIONAL.get(kind.removesuffix("_out"), "")
    hooks = hooks_of(group)
    if hooks is None or kind not in HOOK_NUMBERS:
        return False
    tensors_of: dict[bool, list[torch.Tensor]] = {False: [], True: list(outputs)}
    for name, value in arguments.items():
        if name.startswith(("tensor", "input", "output")):
            into = name.startswith("output")
            tensors_of[into] += [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]
    inputs, results = tensors_of[False], tensors_of[True]
    if kind == "RECV":
        inputs, results = [], inputs
    root = next((arguments[name] for name in ("root_rank", "dst", "src") if name in arguments), -1)
    op = arguments.get("reduce_op")
    call = SimpleNamespace(
        name=HOOK_NUMBERS[kind],
        input_tensors=inputs,
        output_tensors=results,
        root=root,
        async_op=True,
        op=op if isinstance(op, str) or op is None else _name_of(op),
    )
    hooks.before(call)
    hooks.after(SimpleNamespace(name=call.name, work=work))
    return True


# torch's original functions. A library may import a replacement and keep it from one simulated rank to the next.
_INIT: Any = dist.init_process_group
_HELPER: Any = dist.distributed_c10d._new_process_group_helper
_MESH: Any = device_mesh.init_device_mesh
_BROADCAST: Any = dist.broadcast_object_list
# torch's function that creates a DeviceMesh's groups. It must run without modes, because it reads the grid of ranks.
_GROUPS: Any = getattr(DeviceMesh, "_init_process_groups", None)
_PRETENDING: list[None] = []


def _init_process_group(*args: Any, **kwargs: Any) -> None:
    """Do nothing in a simulated world, where the default group already exists. Otherwise call torch's original function."""
    if not _PRETENDING:
        _INIT(*args, **kwargs)


def _init_device_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    """Create a DeviceMesh without modes, so that its grid of ranks has values."""
    with without_modes():
        mesh: DeviceMesh = _MESH(*args, **kwargs)
        return mesh


def _init_process_groups(*args: Any, **kwargs: Any) -> Any:
    with without_modes():
        return _GROUPS(*args, **kwargs)


def _fake_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a group with torch's fake backend and without backend options, whatever the program requests."""
    kwargs = {**kwargs, **({OPTIONS_KEY: None} if OPTIONS_KEY in kwargs else {}), "device_id": None}
    return _HELPER(size, rank, ranks, dist.Backend("fake"), *args, **kwargs)


def _broadcasting(known: list[list[bytes]]) -> Callable[..., None]:
    """Return a replacement for `broadcast_object_list`. Rank 0 records the objects that it broadcasts. The other ranks
    receive these objects, in the order of their calls.
    """
    following = iter(tuple(known))

    def broadcast(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, **kwargs: Any
    ) -> None:
        to_all = group in (None, dist.group.WORLD) and not src and not any(kwargs.values())
        if to_all and dist.get_rank() == 0:
            known.append([pickle.dumps(item) for item in object_list])
        elif to_all and (objects := next(following, None)) is not None:
            for size, dtype in ((len(objects), torch.long), (sum(map(len, objects)), torch.uint8)):
                dist.broadcast(torch.empty(size, dtype=dtype, device=device), 0, group=group)
            object_list[:] = [pickle.loads(item) for item in objects]
            return
        _BROADCAST(object_list, src, group, device, **kwargs)

    return broadcast


_ATTEND: Any = torch.nn.functional.scaled_dot_product_attention


def _attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention with values that are narrower than keys, as in latent attention. GPUs have kernels for it. Those of the CPU
    do not take it, and torch would then hold all scores.
    """
    width, more = value.shape[-1], query.shape[-1] - value.shape[-1]
    if more <= 0:
        return _ATTEND(query, key, value, *args, **kwargs)
    return _ATTEND(query, key, torch.nn.functional.pad(value, [0, more]), *args, **kwargs)[..., :width]


@contextmanager
def one_rank_of_torch(
    decode: Callable[..., object],
    told: Callable[[DeviceMesh], None] = lambda _: None,
    objects: list[list[bytes]] | None = None,
) -> Iterator[None]:
    """While this context is active, new DeviceMeshes, including FSDP's, know their ranks although tensors have no values.

    The program's call of `init_process_group` has no effect, and its other groups use the fake backend too.
    decode: converts bytes to the results of torch's object collectives, such as broadcast_object_list.
    told: called with each new DeviceMesh. objects: a list of the pickled objects that rank 0 has broadcast to all ranks; rank
    0 appends to it.
    """
    original, rank_maps = DeviceMesh.__init__, dict[Any, Any]()

    def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
        with without_modes():
            original(mesh, *args, **kwargs)
        if (ranks := getattr(mesh, "_flatten_rank_map", None)) is not None:
            # DTensor compares these tuples thousands of times. Comparing a tuple with itself takes a fifth of the time that
            # comparing two equal tuples takes.
            mesh._flatten_rank_map = rank_maps.setdefault(ranks, ranks)
        told(mesh)

    c10d: Any = dist.distributed_c10d
    broadcast = _broadcasting([] if objects is None else objects)
    _PRETENDING.append(None)
    try:
        with (
            patch.object(DeviceMesh, "__init__", init),
            patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend),
            patch.object(DeviceMesh, "_init_process_groups", staticmethod(_init_process_groups))
            if isinstance(inspect.getattr_static(DeviceMesh, "_init_process_groups", None), staticmethod)
            else nullcontext(),
            patch.object(c10d, "_tensor_to_object", decode),
            patch.object(c10d, "broadcast_object_list", broadcast),
            patch.object(dist, "broadcast_object_list", broadcast),
            patch.object(c10d, "_new_process_group_helper", _fake_group),
            patch.object(c10d, "init_process_group", _init_process_group),
            patch.object(dist, "init_process_group", _init_process_group),
            patch.object(dist, "init_device_mesh", _init_device_mesh),
            # A hook does not see it.
            patch.object(dist, "monitored_barrier", lambda group=None, *_, **__: dist.barrier(group)),
            # DDP compares shapes by reading data from other ranks, which a dry run does not have. It compares calls instead.
            patch.object(dist, "_verify_params_across_processes", lambda *_: None),
            patch.object(device_mesh, "init_device_mesh", _init_device_mesh),
        ):
            yield
    finally:
        _PRETENDING.pop()
