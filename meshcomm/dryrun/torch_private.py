"""Private names of torch that dry runs, and emulated backends, need. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

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
# The FakeTensorMode that is on, if any, which is asked for at every operator: torch._C._get_dispatch_mode(_FAKE).
fake_tensors_on: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


def schema_of(operator: Any) -> Any:
    """Its name, arguments and results."""
    return operator._schema


def decomposes(operator: Any) -> bool:
    """Whether torch can do it by other operators."""
    return bool(operator._can_decompose())


def wraps_tensors(types: Iterable[type]) -> bool:
    """Whether one of these is a subclass of tensors, as DTensor, that itself calls operators of what it holds."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        each.__torch_dispatch__ != plain and not issubclass(each, FakeTensor)  # type: ignore[attr-defined]
        for each in types
    )


# How many modes see an operator after the one that is asking.
modes_left: Callable[[], int] = torch._C._len_torch_dispatch_stack
# What hooks of a group call the functional collectives, by the operator's name.
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
    """The Work of a call that nobody carries: over at once, and says when it is first waited for.

    held: tensors of the call, which it keeps, as those of backends do. Whoever makes one keeps it until it is waited
    for: torch holds on to a Work, and not to the part of it that is Python's.
    """

    def __init__(self, held: object, waited: Callable[[ToldWork], None]) -> None:
        super().__init__()
        self._held = held
        self._waited: Callable[[ToldWork], object] | None = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, as all of them."""
        if self._waited is not None:
            waited, self._waited = self._waited, None
            waited(self)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        """Of the call's tensors, as far as they are flat."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result([x for x in leaves_of(self._held) if isinstance(x, torch.Tensor)])
        return future


def _name_of(boxed: Any) -> str:
    """`sum`, of a ReduceOp as operators of c10d have it. torch 2.14 and newer gives it back as it was."""
    unbox = getattr(dist.ReduceOp, "unbox", None)
    op = dist.ReduceOp.RedOpType(boxed.op()) if unbox is None else unbox(boxed).op
    return str(op.name).lower()


def tell_hooks(operator: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor], work: Any) -> bool:
    """Call the hooks of a group, and say whether it has any, for a collective that a mode keeps from the backend, which would do so.

    operator: of `c10d`, or a functional collective. outputs: what it gave, of a functional one. work: for the hook.
    """
    given = {each.name: value for each, value in zip(schema_of(operator).arguments, args, strict=False)}
    kind = schema_of(operator).name.partition("::")[2].strip("_")
    group: Any
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
        kind = kind.upper().removesuffix("_ANY_SOURCE")
    else:
        # By name, as a ProcessGroup may also be given as itself.
        group = given["group_name"]
        group = group_named(group) if isinstance(group, str) else group
        kind = _FUNCTIONAL.get(kind.removesuffix("_out"), "")
    hooks = hooks_of(group)
    if hooks is None or kind not in HOOK_NUMBERS:
        return False
    found: dict[bool, list[torch.Tensor]] = {False: [], True: list(outputs)}
    for name, value in given.items():
        if name.startswith(("tensor", "input", "output")):
            into = name.startswith("output")
            found[into] += [each for each in leaves_of(value) if isinstance(each, torch.Tensor)]
    inputs, came = found[False], found[True]
    if kind == "RECV":
        inputs, came = [], inputs
    root = next((given[name] for name in ("root_rank", "dst", "src") if name in given), -1)
    op = given.get("reduce_op")
    call = SimpleNamespace(
        name=HOOK_NUMBERS[kind],
        input_tensors=inputs,
        output_tensors=came,
        root=root,
        async_op=True,
        op=op if isinstance(op, str) or op is None else _name_of(op),
    )
    hooks.before(call)
    hooks.after(SimpleNamespace(name=call.name, work=work))
    return True


# torch's own; a library keeps what it has imported from one pretended rank to the next.
_INIT: Any = dist.init_process_group
_HELPER: Any = dist.distributed_c10d._new_process_group_helper
_MESH: Any = device_mesh.init_device_mesh
_BROADCAST: Any = dist.broadcast_object_list
# The grid of ranks has values in what makes a DeviceMesh's groups, of whichever it is made.
_GROUPS: Any = getattr(DeviceMesh, "_init_process_groups", None)
_PRETENDING: list[None] = []


def _init_process_group(*args: Any, **given: Any) -> None:
    """In a pretended world the default group is there already, whatever backend and store the program asks for."""
    if not _PRETENDING:
        _INIT(*args, **given)


def _init_device_mesh(*args: Any, **given: Any) -> DeviceMesh:
    """Its grid of ranks has values, which a mode would not give it."""
    with without_modes():
        made: DeviceMesh = _MESH(*args, **given)
        return made


def _init_process_groups(*args: Any, **given: Any) -> Any:
    with without_modes():
        return _GROUPS(*args, **given)


def _fake_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **given: Any) -> Any:
    """Every other group is of torch's fake backend, too, without a backend's own options."""
    given = {**given, **({OPTIONS_KEY: None} if OPTIONS_KEY in given else {}), "device_id": None}
    return _HELPER(size, rank, ranks, dist.Backend("fake"), *args, **given)


def _broadcasting(known: list[list[bytes]]) -> Callable[..., None]:
    """`broadcast_object_list`: rank 0 adds what it tells all ranks, which the others take in turn, with the same calls."""
    following = iter(tuple(known))

    def made(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, **given: Any
    ) -> None:
        own = group in (None, dist.group.WORLD) and not src and not any(given.values())
        if own and dist.get_rank() == 0:
            known.append([pickle.dumps(each) for each in object_list])
        elif own and (objects := next(following, None)) is not None:
            for size, dtype in ((len(objects), torch.long), (sum(map(len, objects)), torch.uint8)):
                dist.broadcast(torch.empty(size, dtype=dtype, device=device), 0, group=group)
            object_list[:] = [pickle.loads(each) for each in objects]
            return
        _BROADCAST(object_list, src, group, device, **given)

    return made


@contextmanager
def one_rank_of_torch(
    decode: Callable[..., object],
    told: Callable[[DeviceMesh], None] = lambda _: None,
    objects: list[list[bytes]] | None = None,
) -> Iterator[None]:
    """While it is entered, new DeviceMeshes, FSDP's own too, know their ranks, though a mode keeps tensors from having values.

    A program's own `init_process_group` finds the default group, and its other groups are of the same backend.
    decode: makes what torch's object collectives, as broadcast_object_list, return of bytes. told: of each DeviceMesh.
    objects: what rank 0 has broadcast to all, pickled; it adds to them.
    """
    made, known = DeviceMesh.__init__, dict[Any, Any]()

    def init(mesh: Any, *args: Any, **given: Any) -> None:
        with without_modes():
            made(mesh, *args, **given)
        if (ranks := getattr(mesh, "_flatten_rank_map", None)) is not None:
            # DTensor compares them thousands of times: of one tuple that is a fifth of the time of equal ones.
            mesh._flatten_rank_map = known.setdefault(ranks, ranks)
        told(mesh)

    c10d: Any = dist.distributed_c10d
    broadcast = _broadcasting([] if objects is None else objects)
    _PRETENDING.append(None)
    try:
        with (
            patch.object(DeviceMesh, "__init__", init),
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
            # DDP's comparison of shapes reads what other ranks have sent; a dry run compares the calls.
            patch.object(dist, "_verify_params_across_processes", lambda *_: None),
            patch.object(device_mesh, "init_device_mesh", _init_device_mesh),
        ):
            yield
    finally:
        _PRETENDING.pop()
