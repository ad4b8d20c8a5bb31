"""torch's private names for process groups, their hooks, DeviceMesh, and graphs. Tested with torch 2.11, 2.13, 2.14 and 2.15.

Private names are needed because `dist.new_group` names groups with counters. The counters differ between ranks as soon as
two ranks create different groups, for example two meshes on different ranks. Group members with different names for the
group never meet. In this module, the caller passes a name that is the same on all members.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import inspect
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from inspect import unwrap
from types import FrameType, FunctionType
from typing import Any, TypeVar, final
from unittest.mock import patch
from weakref import WeakSet, WeakValueDictionary

import torch
import torch._C._distributed_c10d as c10d_bindings
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._higher_order_ops.effects import with_effects
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshcomm.transport.support import check_reduce

C = TypeVar("C", bound=Callable[..., Any])

# For a backend written in Python: its Work, its options, the tensors in nested arguments.
Work: Any = dist._Work
bindings: Any = c10d_bindings
leaves_of: Callable[[Any], list[Any]] = tree_leaves
# A context manager that disables all modes.
without_modes: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes
# The type of a group's name, if torch has a separate one.
_NAME: Any = getattr(c10d, "GroupName", str)
# Backends write to memory without autograd's knowledge. After this call, the backward pass of an operation that saved one
# of these tensors raises, as after any in-place operation. It is torch.autograd.graph.increment_version without checks.
written: Callable[[list[torch.Tensor]], None] = torch._C._increment_version
# The name of this parameter for backend options differs between torch versions.
OPTIONS_KEY = next(
    name
    for name in inspect.signature(c10d._new_process_group_helper).parameters
    if name in ("backend_options", "pg_options")
)


def storage_id(x: Any) -> int:
    """Return a number that identifies a storage, or a tensor's storage, as long as the storage exists."""
    address: int = (x.untyped_storage() if isinstance(x, torch.Tensor) else x)._cdata
    return address


# A name that no other hook of a group uses.
_HOOK: Any = 0x6D657368
# The names of the calls that hooks report, by number. Reading the name of an enum member takes 2 us.
_HOOKED_CALLS: Any = getattr(bindings, "HookOpName", None)
_MEMBERS: dict[str, Any] = getattr(_HOOKED_CALLS, "__members__", {})
HOOK_NAMES: dict[int, str] = {int(member): name for name, member in _MEMBERS.items()}
if not HOOK_NAMES:  # torch 2.13 and older has no hooks; a dry run calls meshcomm's hooks itself
    _OLD = "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER GATHER ALLREDUCE_COALESCED"
    _OLD += " ALLGATHER_BASE ALLGATHER_COALESCED ALLGATHER_INTO_TENSOR_COALESCED REDUCE_SCATTER_BASE"
    HOOK_NAMES = dict(enumerate(f"{_OLD} REDUCE_SCATTER_TENSOR_COALESCED ALLTOALL_BASE".split()))
HOOK_NUMBERS: dict[str, int] = {name: number for number, name in HOOK_NAMES.items()}
_HOOKED_GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()


@final
class GroupHooks:
    """Calls `before` and `after` around every call on `group` by any code (torch 2.14 and newer).

    before: receives name, input_tensors, output_tensors, root, async_op. If it raises, nothing is sent.
    after: receives name, work. Older torch has no such hooks, so only dry runs call them.
    Neither is called for a call that is only traced, of fake tensors or on the device "meta".
    group: None if it has no hooks.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: Callable[[Any], None], after: Callable[[Any], None]
    ) -> None:
        hooks: Any = group
        self.before, self.after = before, after
        self.group: Any = hooks if hasattr(hooks, "register_pre_hook") else None
        _HOOKED_GROUPS[str(group.group_name)] = self
        if self.group is not None:
            # Compilers trace the code between two graphs. Calls made there are real, but hooks belong to no graph.
            self.group.register_pre_hook(_HOOK, outside_graphs(before))
            self.group.register_post_hook(_HOOK, outside_graphs(after))
            # A group outlives Python in torch's registry, and would release the hooks after Python has shut down. One that is
            # written in Python holds them itself.
            if not isinstance(type(self.group).register_pre_hook, FunctionType):
                atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the hooks. Further calls have no effect."""
        atexit.unregister(self.remove)
        if self.group is not None:
            self.group.unregister_pre_hook(_HOOK)
            self.group.unregister_post_hook(_HOOK)
        self.group = None


def hooks_of(group: Any) -> GroupHooks | None:
    """Return the last hooks set on a group with this name."""
    return _HOOKED_GROUPS.get(str(group.group_name))


def has_hooks(group: Any) -> bool:
    """Return whether a group's calls are already observed by GroupHooks."""
    hooks = hooks_of(group)
    return hooks is not None and hooks.group is group


_SPLITS = ("input_split_sizes", "output_split_sizes")


def arguments_of(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of a frame's collective that group hooks do not report: `op`, `input_split_sizes` and
    `output_split_sizes`, if it has them. The frame of another function, such as one that C++ has called, gives {}.

    frame: a function of distributed_c10d, or the call of a functional collective's operator.
    """
    locals_of_call = frame.f_locals
    operator = locals_of_call.get("self")
    if frame.f_code.co_filename == c10d.__file__:
        arguments = {name: locals_of_call[name] for name in _SPLITS if name in locals_of_call}
        ops = (
            value.reduceOp
            for name, value in locals_of_call.items()
            if name.endswith("opts") and hasattr(value, "reduceOp")
        )
        op: Any = next(ops, None)
    elif isinstance(operator, torch._ops.OpOverload) and operator.namespace.endswith("_c10d_functional"):
        names = [argument.name for argument in operator._schema.arguments]
        locals_of_call = {
            **dict(zip(names, locals_of_call.get("args", ()), strict=False)),
            **locals_of_call.get("kwargs", {}),
        }
        arguments = {name: locals_of_call[name] for name in _SPLITS if name in locals_of_call}
        op = locals_of_call.get("reduce_op")
    else:
        return {}
    if op is not None:
        arguments["op"] = op if isinstance(op, str) else getattr(op, "op", op).name.lower()
    return arguments


def tag_of(frame: FrameType) -> int | None:
    """Return the tag of the message that this frame of distributed_c10d sends or receives; None for another frame."""
    return frame.f_locals.get("tag") if frame.f_code.co_filename == c10d.__file__ else None


def groups_by_name() -> dict[str, Any]:
    """Return the process groups of this process by name, including the default group."""
    return {str(name): group for group, name in c10d._world.pg_names.items()}


def group_named(name: str) -> Any:
    """Return the process group with this name."""
    return c10d._resolve_process_group(_NAME(name))


# Whether torch.profiler is recording in this thread, and a switch for all profilers.
profiling = torch.autograd._profiler_enabled
record_functions: Callable[[bool], None] = torch.autograd._enable_record_function


def capturing() -> bool:
    """Return whether this thread is capturing a CUDA graph. Checking whether a Work has completed would end the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def unfinished_collectives() -> dict[str, list[tuple[int, str]]]:
    """Return the collectives that NCCL has queued but not completed, in order, by the group's name. The data comes
    from torch's flight recorder. Each entry has the flight recorder's number, which is unique in the process, and its name
    for the collective.

    Since torch 2.8, a blocking call in NCCL returns no Work that could be checked (`asyncOp ? work : nullptr` in
    ProcessGroupNCCL.cpp). Empty if TORCH_FR_BUFFER_SIZE=0 disables the recorder.
    """
    dump = getattr(bindings, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    calls_of: dict[str, list[tuple[int, str]]] = {}
    for entry in json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ()):
        # The messages of an exchange stay "scheduled" forever. All messages together have one additional entry.
        if (
            not entry["is_p2p"]
            and entry["state"] != "completed"
            and "coalesced" not in entry["profiling_name"]
        ):
            calls = calls_of.setdefault(entry["process_group"][0], [])
            calls.append((entry["record_id"], entry["profiling_name"]))
    return calls_of


def copy_all(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value into its tensor, in one call."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))
        # Torch itself reports the write to autograd only if it copies one by one, which it does not on CUDA.
        some = any(map(torch.Tensor.is_inference, tensors))
        written([x for x in tensors if not x.is_inference()] if some else list(tensors))


def explicit_kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator's implementation for all devices, bypassing dispatch modes. A mode that calls this function sees
    the operators inside the implementation.
    """
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


class _DispatchMode(TorchDispatchMode):
    """A mode that sees every operator, those whose order a graph keeps among them: a graph calls these by `with_effects`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        with_effects.py_impl(cls)(_with_effects)


def _with_effects(mode: Any, token: Any, operator: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return token, mode.__torch_dispatch__(operator, (), args, kwargs)


DispatchMode: Any = _DispatchMode


def outside_graphs(target: C) -> C:
    """Exclude a function, or all methods of a class, from torch.compile. The graph breaks around each call.

    This replaces torch.compiler.disable, which imports the compiler immediately and adds a slow wrapper to every call.
    """
    for function in vars(target).values() if isinstance(target, type) else (target,):
        if isinstance(function, FunctionType):
            # The attribute is read when a call is traced, the code flag when a frame would run between two graphs.
            function.__dict__["_torchdynamo_disable"] = True
            function.__dict__["_torchdynamo_disable_msg"] = "it communicates; mesh.functional compiles"
            # The code of a decorated function may be that of all functions with this decorator.
            original: Any = unwrap(function)
            set_code_exec_strategy(
                original.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
            )
    return target


def compiled_files() -> tuple[str, str]:
    """Return the filename prefixes of the files that torch.compile creates, for graphs and for inductor's code."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(
        tempfile.gettempdir(), "torchinductor_"
    )
    return "<eval_with_key>", folder


def once_in_graphs(function: C) -> C:
    """Declare that `function` returns the same result for the same plain values. Tracing does not enter `function`."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def work_error(work: Any) -> RuntimeError | None:
    """Return the error of a completed Work. Does not wait, because Gloo's messages cannot be waited for twice.

    torch warns that the query is deprecated, on stderr from C++ or, inside `apply_`, as a Python warning.
    """
    errors: list[RuntimeError | None] = []

    def ask(value: float) -> float:
        errors.append(work.exception())
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, device="cpu").apply_(ask)
    return errors[0]


# The default process group, and its store.
default_group: Callable[[], dist.ProcessGroup] = c10d._get_default_group
default_store: Callable[[], dist.Store] = c10d._get_default_store
# The global ranks of a group, in the group's order.
ranks_of: Callable[[Any], list[int]] = dist.get_process_group_ranks


def source_rank(work: Any) -> int:
    """Return the group rank that sent the message of a receive from any source."""
    rank: int = work._source_rank()
    return rank


def bound_device() -> torch.device | None:
    """Return the device that the default process group is bound to."""
    device: torch.device | None = default_group().bound_device_id
    return device


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the backend string that a group was created with, as in "gloo" or "cpu:gloo,cuda:nccl".

    torch calls it "undefined" if the program has named none, as in init_process_group() and init_device_mesh.
    """
    name = str(c10d._world.pg_map[group][0])
    return str(dist.get_backend_config(group)) if name == "undefined" else name


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds after which a group's backend for `device` ends a call, or 0.0 if the backend does not report it."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
        return timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 0.0


def has_backend(name: str) -> bool:
    """Return whether a backend with this name was registered through `Backend.register_backend`."""
    return name.upper() in dist.Backend._plugins


# The DeviceMesh that a slice was taken from. For any other mesh, the mesh itself.
root_of: Callable[[DeviceMesh], Any] = DeviceMesh._get_root_mesh


def flattened(of: DeviceMesh, name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Return a slice of a DeviceMesh as one dim over an existing group. DeviceMesh._flatten would create another group.

    The root mesh does not keep the result: DTensor would reduce and gather over it in place of the dims, which gives other
    last digits, and wrong values where a tensor is split into parts of unequal size (torch 2.15).
    """
    named: Any = staticmethod(lambda *_, **__: [group.group_name])
    with (
        patch.object(DeviceMesh, "_init_process_groups", named),
        patch.object(DeviceMesh, "_setup_world_group_and_device", lambda _: None),
        patch.dict(root_of(of)._flatten_mapping, clear=True),
    ):
        mesh: DeviceMesh = of._flatten(name)
    return mesh


def flattened_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Return this rank's groups along the flattened dims of a DeviceMesh, by name."""
    flat: Mapping[str, DeviceMesh] = root_of(mesh)._flatten_mapping
    return {name: mesh.get_group() for name, mesh in flat.items() if mesh.get_coordinate() is not None}


def side_by_side(slices: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return slices of one root as one DeviceMesh, in any order, as FSDP combines its dims with a parameter's dims."""
    mesh: DeviceMesh = DeviceMesh._concatenate(list(slices)) if len(slices) > 1 else slices[0]
    return mesh


def forget_device_meshes(meshes: Iterable[DeviceMesh]) -> None:
    """Remove the groups of `meshes`. Empty DTensor's caches, which keep every DeviceMesh that they have seen.

    The caches identify a DeviceMesh by its ranks and names, and would confuse a later mesh over other groups of the same
    ranks with an earlier one. A group that is still referenced would keep its sockets and threads.
    """
    for mesh in meshes:
        for device_mesh in (mesh, mesh._get_root_mesh()):
            getattr(device_mesh, "_pg_registry", {}).clear()
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    topologies = getattr(_collective_utils, "MeshTopoInfo", None)
    for holder, name in (
        (getattr(topologies, "build_from_mesh", None), "cache_clear"),
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
    ):
        clear = getattr(holder, name, None)
        if clear is not None:
            clear()


def create_group(
    *,
    name: str,
    ranks: Sequence[int],
    coord: int,
    backend: str,
    timeout: timedelta,
    store: dist.Store,
    options: Any = None,
    label: str,
    split: bool,
    of_job: bool = True,
) -> dist.ProcessGroup:
    """Create a group of `ranks`, in which this process has group rank `coord`. A group rank is a position in `ranks`.

    Called by: exactly the ranks in `ranks`. If the default group has a bound device and `split` is true, NCCL splits the
    default group's communicator. In that case, every rank of the default group must be creating a group at this point.
    of_job: whether `ranks` are ranks of the default group. If not, there may be no default group, and torch neither finds the
        group by its ranks nor destroys it with the default group.
    """
    default: Any = c10d._get_default_group() if of_job or dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if bound is not None and not split:
        default.bound_device_id = None
    group: Any
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            coord,
            # Torch looks up ranks in the default group unless there are none.
            list(ranks) if of_job else [],
            dist.Backend(backend),
            store,
            group_name=_NAME(name),
            timeout=timeout,
            device_id=bound if split and "nccl" in backend else None,
            group_desc=label,
            **{OPTIONS_KEY: options},
        )
    finally:
        if bound is not None:
            default.bound_device_id = bound
    world: Any = c10d._world
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if not of_job:
        _OF_LINKS.add(group)
        del world.pg_names[group]
        for tag in ("", world.pg_to_tag.pop(group)):
            world.tags_to_pg[tag].remove(group)
    created: dist.ProcessGroup = group
    return created


_RETURNS_S = 10.0
# Groups whose calls were dropped.
_ABORTED: WeakSet[Any] = WeakSet()
# Groups over the processes of two jobs.
_OF_LINKS: WeakSet[Any] = WeakSet()


def abort(group: Any) -> None:
    """Drop the calls of an NCCL group. May be called from any thread."""
    _ABORTED.add(group)
    group.abort()


def give_back(group: Any) -> None:
    """Destroy a group, or all groups if it is the default group, unless the program has already done so.

    An aborted group is shut down in a separate thread, because the shutdown waits for torch's watchdog. After a rank on
    another host is lost, the watchdog first reads the stack of the failed call, which takes seconds (torch 2.11).
    """
    if group in _OF_LINKS:
        _give_back_link(group)
        return
    if group not in c10d._world.pg_map:
        return
    if group not in _ABORTED:
        dist.destroy_process_group(group)
        return
    every = [group]
    if group is default_group():
        every = [*c10d._world.pg_names]
        # Remove the groups that destroy_process_group would shut down.
        c10d._world.pg_names.clear()
        dist.destroy_process_group(group)
    else:
        with warnings.catch_warnings():
            # This warning is about coalesced calls that were dropped before their launch.
            warnings.filterwarnings("ignore", "Some coalesced collectives")
            c10d._abort_process_group(group)
    for each in every:
        _shut_down(each)


def _give_back_link(group: Any) -> None:
    world: Any = c10d._world
    _OF_LINKS.discard(group)
    for registry in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        registry.pop(group, None)
    # The end of the default group has removed all names.
    with contextlib.suppress(RuntimeError):
        c10d._unregister_process_group(group.group_name)
    if group in _ABORTED:
        _shut_down(group)
    else:
        group.shutdown()


def _shut_down(group: Any) -> None:
    thread = threading.Thread(target=group.shutdown, name="meshcomm-shutdown", daemon=True)
    thread.start()
    await_at_exit(thread)


# Threads that are executing C++ code.
_RETURNING: list[threading.Thread] = []


def await_at_exit(thread: threading.Thread) -> None:
    """Make Python wait for a daemon thread before exiting, up to a time limit.

    A thread that returns from C++ while Python shuts down ends the process with SIGABRT.
    """
    _RETURNING[:] = [each for each in (*_RETURNING, thread) if each.is_alive()]


@atexit.register
def _await_returning() -> None:
    until = time.monotonic() + _RETURNS_S
    for thread in _RETURNING:
        thread.join(max(0.0, until - time.monotonic()))
    # After a wait returns, Gloo's thread may still be about to free the call's tensors, which takes Python's lock. A thread
    # that does so after Python has shut down is ended by SIGABRT. Each look lets these threads run.
    idle = 0
    while idle < 2 and time.monotonic() < until:
        if not (states := _states_of_gloo()):
            break
        time.sleep(0.001)
        idle = 0 if "R" in states else idle + 1


def _states_of_gloo() -> list[str]:
    """Return the state of each of Gloo's threads in this process: "R" if it runs or could run, "?" if that is unknown."""
    if sys.platform != "linux":
        return ["?"] if c10d._world.pg_map else []
    states = []
    for path in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError), open(path) as file:
            _, _, rest = file.read().partition("(")
            name, _, values = rest.rpartition(") ")
            if name.startswith("pt_gloo"):
                states.append(values[0])
    return states


def keep_for_good(groups: Sequence[Any]) -> None:
    """Never destroy `groups`, even at Python's exit, because their destructors wait for calls that the backend still holds."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def split_color(ranks: Sequence[int]) -> int:
    """Return the color that torch assigns to a group in ncclCommSplit. Two groups must not share a color."""
    return int(c10d._process_group_color(list(ranks)))


def register_group(group: Any, name: str, backend: str, store: dist.Store, config: str) -> None:
    """Name a group that torch's own function has not created, and add it to torch's registries: by handle, name and tag.

    config: the backend of each type of device, as torch spells it.
    """
    group._set_group_name(_NAME(name))
    world, tag = c10d._world, f"ptd:{name}"
    world.pg_map[group] = backend, store
    world.pg_names[group] = _NAME(name)
    world.pg_backend_config[group] = config
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(_NAME(name), group)


# torch types ProcessGroup's methods with overloads that a Python subclass cannot reproduce.
_ProcessGroup: Any = dist.ProcessGroup


class SoloGroup(_ProcessGroup):  # type: ignore[misc]
    """A one-rank process group that copies instead of communicating, for torch code that needs a group for a dim of size 1.

    Results are exact, and reductions that no backend has for a dtype are refused. The "fake" backend, in contrast, leaves
    outputs unwritten.
    """

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(0, 1)
        self._name = name
        self._set_group_desc(name)
        register_group(self, name, "solo", dist.HashStore(), "solo")
        c10d._world.pg_group_ranks[self] = {rank: 0}

    def close(self) -> None:
        """Remove the group from torch's registry."""
        give_back(self)

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:
        return "solo"

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return _done(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        _reduce_alone(tensors, opts)
        return _done(tensors)

    allreduce_coalesced = reduce = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Copy inputs to outputs, as every call that moves data does on one rank. The nesting differs between calls."""
        for out, x in zip(_flat(outputs), _flat(inputs), strict=True):
            out.view(x.shape).copy_(x)
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        work = self.scatter(outputs, inputs)
        _reduce_alone(_flat(outputs), *options[-1:])
        return work

    gather = allgather = alltoall = scatter
    # The names in torch 2.14 and newer, then the older names.
    all_gather_single = all_to_all_single = all_gather_single_coalesced = scatter
    reduce_scatter_single = reduce_scatter_single_coalesced = reduce_scatter
    _allgather_base = alltoall_base = allgather_into_tensor_coalesced = scatter
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter


def _reduce_alone(tensors: Sequence[torch.Tensor], opts: Any = None) -> None:
    """Reduce the tensors of one rank in place: a factor is applied, and everything else changes nothing."""
    if opts is None:
        return
    kind, factor = opts.reduceOp.__getstate__()
    for x in tensors:
        # NCCL reduces bool with every operation.
        if x.dtype != torch.bool:
            check_reduce("solo", kind.name.lower(), x.dtype, lambda: "a reduction in a group of one rank")
        if factor is not None:
            x.mul_(factor)


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [x for tensor in tensors for x in _flat(tensor)]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    # This name is missing from torch's stubs.
    create: Any = getattr(bindings, "_create_work_from_future")  # noqa: B009
    return create(future)
