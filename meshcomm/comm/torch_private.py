"""Private torch names that differentiable operators need. Tested with torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd import forward_ad

from meshcomm.transport.torch_private import profiling

# Whether a transform of torch.func (vmap, grad, jvp) is active.
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Whether torch.jit.trace is running the program.
jit_traces: Callable[[], bool] = torch._C._is_tracing
_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY
_forward_mode: Any = forward_ad
# The current level of forward-mode AD; below 0 if no level is open.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")


def unobserved() -> bool:
    """Return whether no forward-mode AD, torch.func transform, tracer or profiler is active."""
    return (
        _forward_mode._current_level < 0
        and not transforming()
        and not jit_traces()
        and _mode(_PROXY) is None
        and not profiling()
    )


def fx_traces() -> bool:
    """Return whether make_fx records the program's operators. A backend's calls are none that it can record whole."""
    return _mode(_PROXY) is not None


# Switches forward-mode AD on or off inside a block.
set_forward_mode: Any = _forward_mode._set_fwd_grad_enabled

# Used by an operator's autograd rule to continue below autograd, in another transform, a tracer or the call itself.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
single_level: Any = enable_single_level_autograd_function
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
after_autograd: Any = torch._C._after_autograd_keyset
# Whether a tensor is a wrapper of a torch.func transform.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
# Whether forward-mode AD is enabled, and a tensor's value and tangent (or None) at its only level, 0.
is_fwd_grad_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled
unpack_dual: Any = torch._VF._unpack_dual


_DEVICES = tuple(getattr(torch._C.DispatchKey, name) for name in ("CPU", "CUDA", "XPU", "HPU", "PrivateUse1"))

# The tag of operators that tracing never runs for real, even if all their inputs are constants.
never_constant: Any = (torch.Tag.nondeterministic_seeded,)
# The operators whose bodies are graphs of their own. torch 2.15 cannot compile them if a body has side effects and gradients.
_BODIES = frozenset(("cond", "while_loop", "scan", "associative_scan", "map_impl", "invoke_subgraph"))


def keep_calls(operator: Any) -> None:
    """Make compilers keep every call of an operator, in program order and once. Tested with torch 2.15 only.

    Each call in a graph takes a token of the call before it. Checkpointing in a graph keeps the results of such calls.
    """
    _register_effectful_op(operator, _EffectType.ORDERED)


def control_flow() -> str | None:
    """Return the name of the operator whose body torch.compile is tracing, if its backend will lower that body."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output: Any = InstructionTranslator.current_tx().output
    except AttributeError:
        return None  # torch.export traces without torch.compile
    tracer = output.current_tracer
    # The backend "eager", which torch.cond uses outside graphs too, runs bodies as they are.
    while tracer is not None and getattr(output.compiler_fn, "__name__", "") != "eager":
        name = getattr(tracer.source_target, "_name", None)
        if name in _BODIES:
            return f"torch's {name}"
        tracer = tracer.parent
    return None


def only_device(keys: Any) -> bool:
    """Return whether nothing but a device's dense kernel is left to run below autograd."""
    return keys.remove(torch._C.DispatchKey.ADInplaceOrView).highestPriorityTypeId() in _DEVICES


def finished(x: torch.Tensor) -> torch.Tensor:
    """Return the value of a pending functional collective, after waiting for it; any other tensor itself.

    The module of the class takes long to import, and a program without functional collectives never imports it.
    """
    loaded = sys.modules.get("torch.distributed._functional_collectives")
    pending: Any = x
    return pending.trigger_wait() if isinstance(x, getattr(loaded, "AsyncCollectiveTensor", ())) else x
