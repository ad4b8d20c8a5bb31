"""torch's private names for FSDP, DTensor, lists of tensors, and storages without memory. Tested on torch 2.11 to 2.15."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_with_path
from torch.utils._pytree import tree_map as tree_map

from meshcomm.errors import UnsupportedOp

_CPU = torch.device("cpu")
# The number of steps without an overflow after which a loss scale is doubled.
GROWTH_INTERVAL = 2000


@final
class _Addresses:
    """Provides addresses that are unique in this process and have no memory. Reading from them returns zeros.

    After 32 TiB of addresses have been used, they are reused.
    """

    SPAN = 1 << 45

    def __init__(self) -> None:
        # Python 3.11 has no name for this Linux flag.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._room = mmap.mmap(-1, self.SPAN, flags=flags)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._used = 0

    def take(self, nbytes: int) -> int:
        if self._used + nbytes > self.SPAN:
            self._used = 0
        address = self.first + self._used
        self._used += max(512, -(-nbytes // 512) * 512)
        return address


_addresses = lru_cache(maxsize=1)(_Addresses)
_storage_at: Any = torch._C._construct_storage_from_data_pointer


def storage_without_memory(nbytes: int) -> Any:
    """Return a CPU storage of this size, with a unique address and no memory. The storage cannot be resized."""
    return _storage_at(_addresses().take(nbytes), _CPU, nbytes)


def map_with_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return a copy of a tree in which `function` replaces each leaf, from its path such as `['a'][0]` and the leaf."""
    return tree_map_with_path(lambda path, leaf: function(keystr(path), leaf), tree)


def entries_of(tree: Any) -> list[tuple[str, Any]]:
    """Return what a container that torch.utils._pytree knows has in it, with its path such as `[0]`; nothing for another value."""
    entries = tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(keystr(path), entry) for path, entry in entries if path]


def has_memory(x: torch.Tensor) -> bool:
    """Return whether a tensor has memory and values: it is not a FakeTensor and does not use a `storage_without_memory`."""
    if isinstance(x, FakeTensor):
        return False
    addresses = _addresses() if _addresses.cache_info().currsize else None
    return addresses is None or not addresses.first <= x.data_ptr() < addresses.first + addresses.SPAN


def update_scale(scale: torch.Tensor, steps: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Update a loss scale, float32 (), and the number of steps since it changed, int32 (), as torch.amp.GradScaler does by
    default. found_inf: float32 (), nonzero if a gradient is not finite. Does not wait for the device.
    """
    torch._amp_update_scale_(scale, steps, found_inf, 2.0, 0.5, GROWTH_INTERVAL)


def parts_of_dtensor(x: Any) -> tuple[torch.Tensor, Any]:
    """Return this rank's part of a DTensor, which shares its memory, and the DTensor's layout, without autograd."""
    return x._local_tensor, x._spec


def dtensor_of(kind: Any, held: torch.Tensor, where: Any) -> Any:
    """Return a DTensor that has the layout `where`, with `held` as its part on this rank. Like DTensor.from_local, but without
    checks.

    kind: the DTensor class. Importing the class here would take half a second, even in a job that does not need it.
    """
    return kind(held, where, requires_grad=False)


def is_view(x: torch.Tensor) -> bool:
    """Return whether autograd treats a tensor as a view of another tensor."""
    return x._is_view()


def unsaved_buffers(module: Any) -> set[str]:
    """Return the names of a module's buffers that are not in its state dict."""
    names: set[str] = module._non_persistent_buffers_set
    return names


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, as while a forward pass is recomputed for it."""
    return bool(torch._C._current_graph_task_id() != -1)


def hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the hooks that are called with the parameter's gradient, by number. A removed hook's number is not used again."""
    later: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {**(parameter._backward_hooks or {}), **(later or {})}


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device and dtype in place, in one call. factor: a tensor () of the same device and dtype."""
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype, order: float) -> Sequence[torch.Tensor]:
    """Return the norm () of each tensor, summed in `dtype`, in one call. All tensors have the same device and dtype."""
    norms_of: Sequence[torch.Tensor] = torch._foreach_norm(list(tensors), order, dtype=dtype)
    return norms_of


def wrapper_of(parameter: torch.Tensor) -> str:
    """Return the wrapper of torch that keeps parts of DTensors or of modules in plain parameters, or "" for other parameters."""
    if hasattr(parameter, "_fsdp_flattened"):
        return "FullyShardedDataParallel"
    return "DistributedDataParallel after parallelize_module" if hasattr(parameter, "_st_info") else ""


def put_shards_back(module: Any) -> None:
    """Put the shards of an FSDPModule back after its pass was interrupted. The module is not used afterwards."""
    for group in _fsdp_groups(module):
        for fsdp_param in group.fsdp_params:
            fsdp_param._setattr_on_modules(fsdp_param.sharded_param)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def fsdp_tensors(module: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights that an FSDPModule has gathered, and the gradients that are not yet summed over ranks."""
    gathered, gradients = [], []
    for fsdp_parameter in [fsdp_param for group in _fsdp_groups(module) for fsdp_param in group.fsdp_params]:
        whole = getattr(fsdp_parameter, "_unsharded_param", None)
        gathered += [*fsdp_parameter.all_gather_outputs, *([] if whole is None else [whole])]
        waiting = (fsdp_parameter.unsharded_accumulated_grad, None if whole is None else whole.grad)
        gradients += [gradient for gradient in waiting if gradient is not None]
    return gathered, gradients


@contextmanager
def shared_casts() -> Iterator[None]:
    """In this context, autocast casts each weight once, instead of once per forward pass, and keeps it during backward.

    torch.autocast does the same when two of its contexts are nested. No autocast context needs to be active.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def hooked(module: torch.nn.Module) -> bool:
    """Return whether a call of the module runs hooks, its own or those for all modules."""
    mine = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return bool(torch.nn.modules.module._has_any_global_hook()) or any(getattr(module, name) for name in mine)


def send_unused(module: Any) -> None:
    """Let FSDP2 reduce zeros for parameters that a rank has not used. Raises UnsupportedOp where torch has no such setting."""
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        raise UnsupportedOp(
            "this torch cannot shard parameters that are not used",
            given=f'train.on_unused = "zero" with parallel.shard, and torch {torch.__version__}',
            expected="FSDPModule.set_reduce_scatter_unused_params, as in torch 2.15",
            hint="parallel.data in place of parallel.shard; or another torch",
        )
    module.set_reduce_scatter_unused_params(True)
