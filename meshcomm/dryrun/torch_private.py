"""Private names of torch used by dry runs and emulated backends. Tested on torch 2.11, 2.13, 2.14 and 2.15."""

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
# The active FakeTensorMode, if any. Called for every operator: torch._C._get_dispatch_mode(_FAKE).
fake_tensors_on: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


def schema_of(operator: Any) -> Any:
    """Return the operator's name, arguments and results."""
    return operator._schema


def decomposes(operator: Any) -> bool:
    """Return whether torch can decompose the operator into other operators."""
    return bool(operator._can_decompose())


def wraps_tensors(types: Iterable[type]) -> bool:
    """Return whether one of these types is a tensor subclass, such as DTensor, that calls operators on its inner tensors."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        each.__torch_dispatch__ != plain and not issubclass(each, FakeTensor)  # type: ignore[attr-defined]
        for each in types
    )


# The number of modes that see an operator after the caller.
modes_left: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The names of functional collectives in the hooks of a group, by the operator's name.
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
    """The Work of a call that is not carried out. It is complete at once, and reports when it is first waited for.

    held: the call's tensors, kept alive as a backend would keep them. The creator must keep the ToldWork until it is
    waited for: torch keeps the C++ Work alive, but not its Python part.
    """

    def __init__(self, held: object, waited: Callable[[ToldWork], None]) -> None:
        super().__init__()
        self._held = held
        self._waited: Callable[[ToldWork], object] | None = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True, always, as for every Work."""
        if self._waited is not None:
            waited, self._waited = self._waited, None
            waited(self)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        """Return a future of the call's tensors, if these are flat."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result([x for x in leaves_of(self._held) if isinstance(x, torch.Tensor)])
        return future


def _name_of(boxed: Any) -> str:
    """Return the name, such as `sum`, of a ReduceOp boxed by a c10d operator. torch 2.14 and later return it
    unboxed.
    """
    unbox = getattr(dist.ReduceOp, "unbox", None)
    op = dist.ReduceOp.RedOpType(boxed.op()) if unbox is None else unbox(boxed).op
    return str(op.name).lower()


def tell_hooks(operator: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor], work: Any) -> bool:
    """Call the hooks of a group for a collective that a mode does not pass to the backend. Return whether the group has hooks.

    operator: of `c10d`, or a functional collective. outputs: results of a functional collective. work: for the hook.
    """
    given = {each.name: value for each, value in zip(schema_of(operator).arguments, args, strict=False)}
    kind = schema_of(operator).name.partition("::")[2].strip("_")
    group: Any
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
        kind = kind.upper().removesuffix("_ANY_SOURCE")
    else:
        # A group may be given by name or as a ProcessGroup.
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


# torch's original; libraries keep an imported function from one simulated rank to the next.
_INIT: Any = dist.init_process_group
_HELPER: Any = dist.distributed_c10d._new_process_group_helper
_MESH: Any = device_mesh.init_device_mesh
_BROADCAST: Any = dist.broadcast_object_list
# Inside the function that makes a DeviceMesh's groups, the grid of ranks has values.
_GROUPS: Any = getattr(DeviceMesh, "_init_process_groups", None)
_PRETENDING: list[None] = []


def _init_process_group(*args: Any, **given: Any) -> None:
    """In a simulated world the default group already exists, whatever backend and store the program requests."""
    if not _PRETENDING:
        _INIT(*args, **given)


def _init_device_mesh(*args: Any, **given: Any) -> DeviceMesh:
    """Create a DeviceMesh whose grid of ranks has values. The mode alone would leave it without values."""
    with without_modes():
        made: DeviceMesh = _MESH(*args, **given)
        return made


def _init_process_groups(*args: Any, **given: Any) -> Any:
    with without_modes():
        return _GROUPS(*args, **given)


def _fake_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **given: Any) -> Any:
    """Create every other group with torch's fake backend too, without backend options."""
    given = {**given, **({OPTIONS_KEY: None} if OPTIONS_KEY in given else {}), "device_id": None}
    return _HELPER(size, rank, ranks, dist.Backend("fake"), *args, **given)


def _broadcasting(known: list[list[bytes]]) -> Callable[..., None]:
    """Return `broadcast_object_list`. Rank 0 records the objects that it broadcasts. The other ranks take these
    objects, in the order of their own calls.
    """
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
    """While it is entered, new DeviceMeshes, including FSDP's, know their ranks, although a mode removes tensor values.

    The program's `init_process_group` returns the default group, and its other groups use the same backend.
    decode: converts bytes to the results of torch's object collectives, such as broadcast_object_list. told: called with
    each DeviceMesh. objects: pickled objects that rank 0 has broadcast to all ranks; rank 0 appends to it.
    """
    made, known = DeviceMesh.__init__, dict[Any, Any]()

    def init(mesh: Any, *args: Any, **given: Any) -> None:
        with without_modes():
            made(mesh, *args, **given)
        if (ranks := getattr(mesh, "_flatten_rank_map", None)) is not None:
            # DTensor compares them thousands of times. Comparing a tuple with itself takes a fifth of the time of comparing equal tuples.
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
            # DDP compares shapes by reading data from other ranks. A dry run compares the calls instead.
            patch.object(dist, "_verify_params_across_processes", lambda *_: None),
            patch.object(device_mesh, "init_device_mesh", _init_device_mesh),
        ):
            yield
    finally:
        _PRETENDING.pop()
