"""Every private name of torch that meshcomm uses, each wrapped once. Tried on torch 2.11, 2.13, 2.14 and 2.15.

Why private names at all: `dist.new_group` names a group by counters that differ between ranks as
soon as two ranks create different groups (two meshes on different ranks are enough), and groups
with different names on their members never meet. Here a group is named by what it is.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import mmap
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar, final
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
import torch._C._distributed_c10d as bindings
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# For a backend in Python: what it returns, what sees every operator, the tensors in nested arguments.
Work: Any = dist._Work
DispatchMode: Any = TorchDispatchMode
leaves_of: Callable[[Any], list[Any]] = tree_leaves
flatten_tree: Callable[[Any], tuple[list[Any], Any]] = tree_flatten
unflatten_tree: Callable[[Sequence[Any], Any], Any] = tree_unflatten
FakeMode: Any = FakeTensorMode
_CPU = torch.device("cpu")
# A block that no mode sees.
without_modes: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes


# The FakeTensorMode that is on, if any, which is asked for at every operator: torch._C._get_dispatch_mode(_FAKE).
fake_tensors_on: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


@final
class _Addresses:
    """Addresses that nothing else in this process gets, and no memory stands behind. Reading them gives zeros.

    After all have been given, which a step of 32 TiB would take, they are given again.
    """

    SPAN = 1 << 45

    def __init__(self) -> None:
        # Python 3.11 has no name for Linux's flag.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._room = mmap.mmap(-1, self.SPAN, flags=flags)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._used = 0

    def take(self, nbytes: int) -> int:
        if self._used + nbytes > self.SPAN:
            self._used = 0
        at = self.first + self._used
        self._used += max(512, -(-nbytes // 512) * 512)
        return at


_addresses = lru_cache(maxsize=1)(_Addresses)
_storage_at: Any = torch._C._construct_storage_from_data_pointer


def storage_without_memory(nbytes: int) -> Any:
    """A storage of the CPU of this size, with an address of its own and no memory. It cannot be resized."""
    return _storage_at(_addresses().take(nbytes), _CPU, nbytes)


def has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has memory, and with it values: neither a FakeTensor, nor on a `storage_without_memory`."""
    if isinstance(x, FakeTensor):
        return False
    known = _addresses() if _addresses.cache_info().currsize else None
    return known is None or not known.first <= x.data_ptr() < known.first + known.SPAN


def wraps_tensors(types: Iterable[type]) -> bool:
    """Whether one of these is a subclass of tensors, as DTensor, that itself calls operators of what it holds."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        each.__torch_dispatch__ != plain and not issubclass(each, FakeTensor)  # type: ignore[attr-defined]
        for each in types
    )


# How many modes see an operator after the one that is asking.
modes_left: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The number of the backward pass that runs in this thread, -1 for none; the pack and unpack hooks of saved tensors, if any.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
_saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def recomputes() -> bool:
    """Whether this is a forward pass within a backward pass, as of torch.utils.checkpoint.

    What backward itself computes is neither recorded for another backward pass, nor does it save tensors.
    """
    return backward_number() != -1 and (torch.is_grad_enabled() or _saved_tensor_hooks(True) is not None)


# The type of a group's name, where torch has one of its own.
_NAME: Any = getattr(c10d, "GroupName", str)

# Backends write to memory without autograd's knowledge. After this, backward of what has saved one of these
# tensors raises, as after any operation in place. torch.autograd.graph.increment_version, without its questions.
written: Callable[[list[torch.Tensor]], None] = torch._C._increment_version

# What the options of a backend are called differs between versions of torch.
_OPTIONS_KEY = next(
    name
    for name in inspect.signature(c10d._new_process_group_helper).parameters
    if name in ("backend_options", "pg_options")
)


def parts_of_dtensor(x: Any) -> tuple[torch.Tensor, Any]:
    """What this rank holds of a DTensor, its own memory, and where that lies. Autograd does not see it."""
    return x._local_tensor, x._spec


def dtensor_of(kind: Any, held: torch.Tensor, where: Any) -> Any:
    """A DTensor of which this rank holds `held`, laid out as another one. DTensor.from_local without its questions.

    kind: DTensor, whose module is half a second's import for each rank of a job that needs none.
    """
    return kind(held, where, requires_grad=False)


def options_type(name: str) -> Any:
    """The class of a collective's options, as in `AllreduceOptions`."""
    return getattr(bindings, name)


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where a part of a tensor lies, as torch's reader of checkpoints expects it in their metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


# What no other hook of a group is called.
_HOOK: Any = 0x6D657368


# The names of the calls that hooks are told of, by number: to ask a member of the enumeration for its name takes 2 us.
_HOOKED_CALLS: Any = getattr(bindings, "HookOpName", None)
_MEMBERS: dict[str, Any] = getattr(_HOOKED_CALLS, "__members__", {})
HOOK_NAMES: dict[int, str] = {int(member): name for name, member in _MEMBERS.items()}
if not HOOK_NAMES:  # torch 2.13 and older has no hooks; a dry run calls ours by itself
    _OLD = "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER GATHER ALLREDUCE_COALESCED"
    _OLD += " ALLGATHER_BASE ALLGATHER_COALESCED ALLGATHER_INTO_TENSOR_COALESCED REDUCE_SCATTER_BASE"
    HOOK_NAMES = dict(enumerate(f"{_OLD} REDUCE_SCATTER_TENSOR_COALESCED ALLTOALL_BASE".split()))
HOOK_NUMBERS: dict[str, int] = {name: number for number, name in HOOK_NAMES.items()}


_HOOKED_GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()


@final
class GroupHooks:
    """Calls `before` and `after` around every call on `group`, whoever makes it (torch 2.14 and newer).

    before: gets name, input_tensors, output_tensors, root, async_op; what it raises reaches the caller, and
    nothing is sent. after: gets name, work. Older torch has no such hooks; then this is of use to dry runs alone.
    group: None where it has no hooks, or has them no more.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: Callable[[Any], None], after: Callable[[Any], None]
    ) -> None:
        hooks: Any = group
        self.before, self.after = before, after
        self.group: Any = hooks if hasattr(hooks, "register_pre_hook") else None
        _HOOKED_GROUPS[str(group.group_name)] = self
        if self.group is not None:
            self.group.register_pre_hook(_HOOK, before)
            self.group.register_post_hook(_HOOK, after)
            # A group outlives Python in torch's registry, and would let go of them when there is no Python any more.
            atexit.register(self.remove)

    def remove(self) -> None:
        """Take the hooks off; harmless when repeated."""
        atexit.unregister(self.remove)
        if self.group is not None:
            self.group.unregister_pre_hook(_HOOK)
            self.group.unregister_post_hook(_HOOK)
        self.group = None


def has_hooks(group: Any) -> bool:
    """Whether somebody sees the calls on a group by GroupHooks already."""
    hooks: GroupHooks | None = _HOOKED_GROUPS.get(str(group.group_name))
    return hooks is not None and hooks.group is group


# Who is told of each group that torch makes; torch's own function stands behind, while there is anybody.
_NEW_GROUPS: list[Callable[[Any], None]] = []
_C10D: Any = c10d
_PLAIN: Any = getattr(c10d, "_register_pg_in_world", None)


def _registered(group: Any, *args: Any, **given: Any) -> None:
    _PLAIN(group, *args, **given)
    for told in list(_NEW_GROUPS):
        told(group)


def on_new_groups(told: Callable[[Any], None]) -> Callable[[], None]:
    """Call `told` with every process group that torch makes from now on; returns what ends that.

    Its ranks are known a moment later. Tried on torch 2.15; older torch tells of none.
    """
    _NEW_GROUPS.append(told)
    if _PLAIN is not None:
        _C10D._register_pg_in_world = _registered

    def end() -> None:
        if told in _NEW_GROUPS:
            _NEW_GROUPS.remove(told)
        if not _NEW_GROUPS and _PLAIN is not None:
            _C10D._register_pg_in_world = _PLAIN

    return end


def groups_by_name() -> dict[str, Any]:
    """The process groups of this process, the default one among them."""
    return {str(name): group for group, name in c10d._world.pg_names.items()}


def group_named(name: str) -> Any:
    """One of them."""
    return c10d._resolve_process_group(_NAME(name))


def ranks_of(group: Any) -> list[int]:
    """The global ranks of a group, in the order of its own."""
    return dist.get_process_group_ranks(group)


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
    given = {each.name: value for each, value in zip(operator._schema.arguments, args, strict=False)}
    kind = operator._schema.name.partition("::")[2].strip("_")
    group: Any
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
        kind = kind.upper().removesuffix("_ANY_SOURCE")
    else:
        # By name, as a ProcessGroup may also be given as itself.
        group = given["group_name"]
        group = c10d._resolve_process_group(_NAME(group)) if isinstance(group, str) else group
        kind = _FUNCTIONAL.get(kind.removesuffix("_out"), "")
    hooks: GroupHooks | None = _HOOKED_GROUPS.get(str(group.group_name))
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


@contextmanager
def plain_device_meshes() -> Iterator[None]:
    """DeviceMeshes that are made in here, FSDP's own too, know their ranks, though a mode keeps tensors from having values."""
    made, known = DeviceMesh.__init__, dict[Any, Any]()

    def init(mesh: Any, *args: Any, **given: Any) -> None:
        with without_modes():
            made(mesh, *args, **given)
        if (ranks := getattr(mesh, "_flatten_rank_map", None)) is not None:
            # DTensor compares them thousands of times: of one tuple that is a fifth of the time of equal ones.
            mesh._flatten_rank_map = known.setdefault(ranks, ranks)

    with patch.object(DeviceMesh, "__init__", init):
        yield


@contextmanager
def objects_decoded_by(decode: Callable[..., object]) -> Iterator[None]:
    """While it is entered, `decode` makes what torch's object collectives, as broadcast_object_list, return of bytes."""
    with patch.object(dist.distributed_c10d, "_tensor_to_object", decode):
        yield


# Whether a transform of torch.func (vmap, grad, jvp) is under way.
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Has `_current_level`, below 0 while no level of forward-mode AD is open.
forward_mode: Any = torch.autograd.forward_ad

# Whether torch.profiler is recording.
profiling = torch.autograd._profiler_enabled


def capturing() -> bool:
    """Whether this thread captures a CUDA graph: to ask a Work whether it is over would end the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def copy_all(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value into its tensor, in one call."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))
        # Told to autograd only where torch copies them one by one, which it does not on CUDA.
        written([x for x in tensors if not x.is_inference()])


def offsets(tensor: Any) -> tuple[int, ...]:
    """Where this rank's part of a DTensor begins in the whole one; zeros where it has none of it."""
    chunks = tensor.__create_chunk_list__()
    return tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device and dtype in place, in one call; factor: a tensor () of theirs."""
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The 2-norm () of each of some tensors of one device and dtype, added up in `dtype`, in one call."""
    found: Sequence[torch.Tensor] = torch._foreach_norm(list(tensors), 2.0, dtype=dtype)
    return found


def explicit_kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operator does on any device, below modes: a mode that calls it sees the operators inside."""
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


# How an operator's rule for autograd goes on to what comes after autograd: another transform, a tracer, the call.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
single_level: Any = enable_single_level_autograd_function
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
after_autograd: Any = torch._C._after_autograd_keyset
# Whether a tensor is one of those that a transform of torch.func hands out.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
# Whether forward-mode AD is switched on, and a tensor's value and tangent (None) at its only level, 0.
is_fwd_grad_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled
unpack_dual: Any = torch._VF._unpack_dual


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of matrices one beside the other, where one of both has three axes, or none; of as many of each, where both have."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Two products of attention, (batch, heads, queries or keys, size) each; k and v may have fewer heads."""
    return int(2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3]))


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
    """Five: the scores again, and the gradients of scores, q, k and v."""
    return int(2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3]))


# What some version of torch from 2.11 to 2.15 has no formula for, by the operator's name.
_MORE_FLOPS: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


def flops_of(operator: Any) -> Callable[..., int] | None:
    """What tells the floating-point operations of an operator from its arguments and `out_val`, its result; None: of none."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(operator, "_overloadpacket", operator)
    return flop_registry.get(packet) or _MORE_FLOPS.get(str(packet))


_DEVICES = tuple(getattr(torch._C.DispatchKey, name) for name in ("CPU", "CUDA", "XPU", "HPU", "PrivateUse1"))


C = TypeVar("C", bound=Callable[..., Any])


def outside_graphs(target: C) -> C:
    """Keep a function, or all methods of a class, out of what torch.compile makes: the graph breaks around a call.

    As torch.compiler.disable, which imports the compiler at once, and whose wrapper costs every call.
    """
    for function in vars(target).values() if isinstance(target, type) else (target,):
        if isinstance(function, FunctionType):
            # Read where a call is traced; the flag of the code, where its frame is to run between two graphs.
            function.__dict__["_torchdynamo_disable"] = True
            function.__dict__["_torchdynamo_disable_msg"] = "it communicates; mesh.functional compiles"
            set_code_exec_strategy(
                function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
            )
    return target


def compiled_files() -> tuple[str, str]:
    """How the names of files begin that torch.compile makes: of graphs, and of what inductor writes."""
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
    return "<eval_with_key>", kept


def once_in_graphs(function: C) -> C:
    """What `function` returns for plain values is the same each time: tracing calls it, and does not look into it."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def only_device(keys: Any) -> bool:
    """Whether nothing comes after autograd but the call itself, on a device's dense tensor."""
    return keys.remove(torch._C.DispatchKey.ADInplaceOrView).highestPriorityTypeId() in _DEVICES


def work_error(work: Any) -> RuntimeError | None:
    """What a Work that is over has failed with. Does not wait: Gloo's messages cannot be waited for twice.

    torch warns that to ask is deprecated, from C++ on stderr; inside of `apply_` it is a warning of Python's.
    """
    found: list[RuntimeError | None] = []

    def ask(value: float) -> float:
        found.append(work.exception())
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, device="cpu").apply_(ask)
    return found[0]


def source_rank(work: Any) -> int:
    """The group rank that a receive from any source got its message from."""
    rank: int = work._source_rank()
    return rank


def default_group() -> dist.ProcessGroup:
    """The default process group."""
    found: dist.ProcessGroup = c10d._get_default_group()
    return found


def bound_device() -> torch.device | None:
    """The device that the default process group is bound to."""
    found: torch.device | None = default_group().bound_device_id
    return found


def default_store() -> dist.Store:
    """The store of the default process group."""
    store: dist.Store = c10d._get_default_store()
    return store


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend string that a group was created with, as in "gloo" or "cpu:gloo,cuda:nccl"."""
    return str(c10d._world.pg_map[group][0])


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds after which a group's backend for `device` ends a call; 0.0 where it does not tell."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
        return timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 0.0


def has_backend(name: str) -> bool:
    """Whether a backend of this name was registered by `Backend.register_backend`."""
    return name.upper() in dist.Backend._plugins


def live_groups() -> int:
    """Number of process groups that exist in this process, the default one included."""
    return len(c10d._world.pg_names)


# The function that waits torch's own 30 minutes where it is given no timeout, and the object that says so.
_MONITORED_BARRIER: Any = inspect.unwrap(dist.monitored_barrier).__code__


def unlimited_barrier(frame: Any) -> str | None:
    """The group's name, where a thread at `frame` is in `dist.monitored_barrier` that got no timeout; else None."""
    while frame is not None and frame.f_code is not _MONITORED_BARRIER:
        frame = frame.f_back
    if frame is None:
        return None
    given = frame.f_locals
    if given.get("timeout") is not c10d.default_pg_timeout:
        return None
    return str((given.get("group") or c10d._get_default_group()).group_name)


AttentionKernel: TypeAlias = Literal["cpu", "flash", "efficient"]


def attention_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> AttentionKernel | None:
    """Which of torch's kernels that give the log-sum-exp trains with these; None: none does.

    "cpu": floating point of any width. "flash", "efficient": what torch says of the CUDA device, the dtype and the
    head, and what torch.nn.attention.sdpa_kernel allows; float64 never. cuDNN's is not among them: the shape of its
    log-sum-exp and the layouts that it takes differ between its versions.
    """
    if not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu":
        there = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        return "cpu" if there and q.dtype in floats else None
    if q.device.type != "cuda":
        return None
    # Some devices run a kernel forward and not backward, which torch only asks for where a gradient is needed.
    with torch.enable_grad():
        leaf = q.detach().requires_grad_()
        if can_use_flash_attention(SDPAParams(leaf, k, v, None, 0.0, causal, True)):
            return "flash"
        keys, values = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        if can_use_efficient_attention(SDPAParams(leaf, keys, values, None, 0.0, causal, False)):
            return "efficient"
    return None


def kernel_alignment(device: torch.device) -> int:
    """Elements of whose multiples heads must be, and begin at, for the kernels of a device."""
    return 8 if device.type == "cuda" else 1


def kernel_attention(
    kernel: AttentionKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of each query's scores, which the public function keeps to itself.

    Heads of q, k and v are as many for "efficient"; so is its log-sum-exp padded at the end, to a multiple of 32.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
    return out, lse[..., : q.shape[2]]


def kernel_attention_backward(
    kernel: AttentionKernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for q, k, v; `out` and `lse` may be those over more keys than are in k.

    CUDA's kernels take the layout of out, dout and lse for granted: tokens outside heads, and dense
    (flash_api.cpp, mem_eff_attention/kernel_backward.h). Nothing is dropped, so no random state is read.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
    if kernel == "flash":
        state, unused = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            state, unused, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    if torch.version.hip is None:
        # As the forward pass leaves it: rows of a multiple of 32, of which the last say "no query".
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,
        out,
        lse.contiguous(),
        seed,
        seed,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


def flattened(of: DeviceMesh, name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """A slice of a DeviceMesh as one dim over a group that there is: DeviceMesh._flatten would create another one."""
    named: Any = staticmethod(lambda *_, **__: [group.group_name])
    with (
        patch.object(DeviceMesh, "_init_process_groups", named),
        patch.object(DeviceMesh, "_setup_world_group_and_device", lambda _: None),
    ):
        found: DeviceMesh = of._flatten(name)
    return found


def root_of(device_mesh: DeviceMesh) -> DeviceMesh:
    """The DeviceMesh that a slice was cut from; of what is no slice itself."""
    root: DeviceMesh = device_mesh._get_root_mesh()
    return root


def side_by_side(slices: Sequence[DeviceMesh]) -> DeviceMesh:
    """Slices of one root as one DeviceMesh, whatever their order, as FSDP joins its own with those of a parameter."""
    found: DeviceMesh = DeviceMesh._concatenate(list(slices)) if len(slices) > 1 else slices[0]
    return found


def fsdp_tensors(module: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an FSDPModule has gathered of its own weights, and gradients that are not summed over ranks yet."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    gathered, gradients = [], []
    for each in [each for group in groups if group is not None for each in group.fsdp_params]:
        whole = getattr(each, "_unsharded_param", None)
        gathered += [*each.all_gather_outputs, *([] if whole is None else [whole])]
        waiting = (each.unsharded_accumulated_grad, None if whole is None else whole.grad)
        gradients += [one for one in waiting if one is not None]
    return gathered, gradients


def forget_device_meshes(meshes: Iterable[DeviceMesh]) -> None:
    """Take their groups from `meshes`, and empty DTensor's caches, which hold on to the DeviceMeshes that they have met.

    They know a DeviceMesh by its ranks and names, so that one that is made later, over other groups
    with the same ranks, would be taken for the one before, and its groups be looked for in vain. A group that some
    other cache, or a tensor of the program, still led to would keep its sockets and threads.
    """
    for mesh in meshes:
        for each in (mesh, mesh._get_root_mesh()):
            getattr(each, "_pg_registry", {}).clear()
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
) -> dist.ProcessGroup:
    """Create the group `ranks` (this process is number `coord` of it), group rank == place in `ranks`.

    Called by: exactly the ranks in `ranks`. Where the default group has a bound device and `split`
    is true, NCCL splits the default group's communicator, and then every rank of the default group
    has to be creating some group at this point.
    """
    default = c10d._get_default_group()
    bound = default.bound_device_id
    if not split:
        default.bound_device_id = None
    group: Any
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            coord,
            list(ranks),
            dist.Backend(backend),
            store,
            group_name=_NAME(name),
            timeout=timeout,
            device_id=bound if split and "nccl" in backend else None,
            group_desc=label,
            **{_OPTIONS_KEY: options},
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    created: dist.ProcessGroup = group
    return created


def give_back(group: Any) -> None:
    """Destroy a group, with the default group all of them, unless the program has done so."""
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def split_color(ranks: Sequence[int]) -> int:
    """The color that torch gives to a group in ncclCommSplit; two groups must not share one."""
    return int(c10d._process_group_color(list(ranks)))


# torch describes ProcessGroup by overloads that no subclass in Python could repeat.
_ProcessGroup: Any = dist.ProcessGroup


class SoloGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of one rank that copies instead of communicating.

    It stands where torch wants a group for a dim of size 1 (DeviceMesh, pipelining). It opens no
    socket, starts no thread, and is exact, where the "fake" backend leaves outputs unwritten.
    """

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(0, 1)
        self._name = name
        self._set_group_name(_NAME(name))
        self._set_group_desc(name)
        # What torch looks groups up in: by handle, by name, by rank, by tag.
        world, tag = c10d._world, f"ptd:{name}"
        world.pg_map[self] = ("solo", dist.HashStore())
        world.pg_names[self] = _NAME(name)
        world.pg_backend_config[self] = "solo"
        world.pg_group_ranks[self] = {rank: 0}
        world.tags_to_pg.setdefault(tag, []).append(self)
        world.pg_to_tag[self] = tag
        c10d._register_process_group(_NAME(name), self)

    def close(self) -> None:
        """Take the group out of torch's registry."""
        give_back(self)

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:
        return "solo"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return _done(tensors)

    allreduce_coalesced = broadcast = reduce = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """What one rank does of every call that moves data; both in torch's own nesting, which differs by call."""
        for out, x in zip(_flat(outputs), _flat(inputs), strict=True):
            out.view(x.shape).copy_(x)
        return _done(outputs)

    gather = allgather = alltoall = reduce_scatter = scatter
    # Each under the name of torch 2.14 and newer, then under that of older ones.
    all_gather_single = reduce_scatter_single = all_to_all_single = scatter
    _allgather_base = _reduce_scatter_base = alltoall_base = scatter
    all_gather_single_coalesced = reduce_scatter_single_coalesced = scatter
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = scatter


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [x for each in tensors for x in _flat(each)]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    # Missing from torch's stubs.
    create: Any = getattr(bindings, "_create_work_from_future")  # noqa: B009
    return create(future)
