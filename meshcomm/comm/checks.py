"""Checks of a call's arguments, before any byte moves. All entry points share these functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from numbers import Complex, Real
from operator import index, itemgetter
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.torch_private import (
    finished,
    forward_level,
    fx_traces,
    is_fwd_grad_enabled,
    is_wrapped,
    jit_traces,
    transforming,
    unobserved,
    unpack_dual,
)
from meshcomm.errors import AutogradError, LayoutError, ShapeError, UnsupportedOp
from meshcomm.reductions import REDUCTIONS

# Returns the beginning of an error about a call: its name, its dim and this rank.
Where: TypeAlias = Callable[[], str]

# Tags from this one up are reserved for the library: for objects, and for algorithms that run over messages.
OWN_TAGS: Final = 1 << 30
_LONGEST_S: Final = 1e8
# Bound at module level because every call looks it up.
_STRIDED: Final = torch.strided


def is_plain(x: Any, device: torch.device) -> bool:
    """Return whether a backend can take `x` unchanged: its memory holds its values, and autograd does not track it.

    This and `unobserved`, which is tested once for each call, are the only tests of the fast paths. In all other relevant
    properties, a tensor that passes equals a tensor that has already been checked.
    """
    return (
        type(x) is Tensor
        and x.device == device
        and x.layout is _STRIDED
        and not x.is_nested
        and not x.requires_grad
        and x.is_contiguous()
        and not x.is_neg()
    )


def all_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether each tensor of a list is plain and not quantized, and nothing observes the call."""
    return unobserved() and not any(not is_plain(x, device) or x.is_quantized for x in tensors)


def value_of(x: Any) -> Any:
    """Return `x` itself, or the value of the result of torch's functional collectives, after waiting for it."""
    return x if type(x) is Tensor or not isinstance(x, Tensor) else finished(x)


def check_tensor(x: object, kinds: tuple[str, ...], where: Where, plain: bool = True) -> None:
    """Raise unless `x` is a dense, local tensor on a device that the group supports, and its memory holds its values.

    torch would accept other tensors and fail late, or send memory that has nothing to do with their values.
    plain: also refuse wrappers of torch.func, of tracers and of pending results: only operators know what to do with them.
    """
    if plain and transforming() and isinstance(x, Tensor) and is_wrapped(x):
        raise UnsupportedOp(
            f"{where()} does not support vmap or the other transforms of torch.func",
            given=f"a tensor of shape {tuple(x.shape)}, wrapped by a torch.func transform",
            expected="the call outside the transform, or a call of mesh.functional",
            hint="mesh.functional.all_reduce, all_gather, reduce_scatter, all_to_all or shift",
        )
    if tracer := "torch.jit.trace" if jit_traces() else "make_fx" if plain and fx_traces() else None:
        raise UnsupportedOp(
            f"{where()} cannot be recorded by {tracer}",
            given=f"a {type(x).__name__}, in a function that {tracer} runs",
            expected="a graph that keeps calls: torch.compile, or mesh.functional in make_fx; this one would lose the call",
            hint="mesh.functional in torch.compile, torch.export or make_fx",
        )
    if type(x) is Tensor and x.layout is torch.strided and x.device.type in kinds and not _packed(x):
        return
    if not isinstance(x, Tensor):
        raise ShapeError(
            f"{where()} was given a {type(x).__name__}",
            given=type(x).__name__,
            expected="a tensor",
            hint="torch.as_tensor(x), or mesh.objects for plain Python objects",
        )
    if is_wrapper(x) and (plain or not _is_a(x, _FOR_OPERATORS)):
        raise ShapeError(
            f"{where()} was given a {type(x).__name__}",
            given=_described(x),
            expected="a tensor whose memory holds its values; this class keeps them elsewhere",
            hint=_made_plain(x),
        )
    if x.layout != torch.strided or x.device.type not in kinds or _packed(x):
        raise ShapeError(
            f"{where()} cannot carry this tensor",
            given=f"{_described(x)}, on {x.device}",
            expected=f"a dense tensor on {' or '.join(kinds)}",
            hint=_made_dense(x),
        )


def check_input(
    x: Any, kinds: tuple[str, ...], where: Where, functional: str | None, written: bool = False
) -> Tensor:
    """Return the tensor that a call outside of `mesh.functional` takes, see `value_of`.

    functional: see `check_in_place`; None if autograd may track x. written: whether the call writes to x.
    Raises the errors of `check_tensor`, `check_in_place` and, if x is written, `check_written`.
    """
    x = value_of(x)
    check_tensor(x, kinds, where)
    if functional is not None:
        check_in_place(x, where, functional, written)
    if written:
        check_written(x, where)
    plain: Tensor = x
    return plain


# Classes with operators of their own, by name, so that a program that uses none of them does not import them.
_FOR_OPERATORS: Final = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")
_PLAIN_FORMS: Final = {
    "UninitializedParameter": "a forward pass of its module, which gives it a shape",
    "DTensor": "x.to_local(), or x.redistribute(...), which is DTensor's own communication",
    "MaskedTensor": "x.to_tensor(0), and x.get_mask() in a call of its own",
    "FakeTensor": "a tensor made outside FakeTensorMode, or mesh.functional; meshcomm dryrun takes plain tensors",
}


def is_wrapper(x: Tensor) -> bool:
    """Return whether the class of `x` has operators of its own, so that its memory need not hold its values, or `x` has no
    values yet.
    """
    return type(x) is not Tensor and (
        type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or torch.nn.parameter.is_lazy(x)
    )


def _is_a(x: Tensor, names: Collection[str]) -> str | None:
    return next((kind.__name__ for kind in type(x).__mro__ if kind.__name__ in names), None)


def _made_plain(x: Tensor) -> str:
    if (form := _is_a(x, _PLAIN_FORMS)) is not None:
        return _PLAIN_FORMS[form]
    if x.is_nested:
        return _made_dense(x)
    flatten = getattr(x, "__tensor_flatten__", None)
    held = (
        " and ".join(f"x.{name}" for name in flatten()[0])
        if flatten is not None
        else "the tensors that it holds"
    )
    return f"{held}, each in a call of its own; for quantized values, x.dequantize()"


def _packed(x: Tensor) -> bool:
    """Return whether dtype and strides do not describe how to read the memory of `x`."""
    return x.is_quantized or x.is_nested


def _described(x: Tensor) -> str:
    if torch.nn.parameter.is_lazy(x):
        return f"a {type(x).__name__}, which has no shape yet"
    if x.is_nested:  # it has no shape
        return f"a nested tensor of {x.size(0)} tensors"
    kind = "quantized tensor" if x.is_quantized else type(x).__name__ if is_wrapper(x) else "tensor"
    placed = f", placements {x.placements}" if hasattr(x, "placements") else ""
    return f"a {kind} of shape {tuple(x.shape)}, {x.layout}{placed}"


def _made_dense(x: Tensor) -> str:
    if x.is_nested:
        return "x.unbind() as a list, or x.to_padded_tensor(0)"
    if x.is_quantized:
        return "x.int_repr() for its integers, x.dequantize() for its values"
    return "x.to_dense()" if x.layout != torch.strided else "x.to(mesh.device)"


def apart(out: Tensor, sent: Tensor, coord: int) -> bool:
    """Return whether `out` can be written while `sent` is read: they share no memory, or one is exactly this rank's
    part of the other.

    coord: selects this rank's part, as in NCCL's in-place calls. `sent` is contiguous.
    """
    if not share_memory(out, sent):
        return True
    if not out.is_contiguous() or out.nbytes == sent.nbytes:
        return False
    part, whole = (out, sent) if out.nbytes < sent.nbytes else (sent, out)
    return part.data_ptr() == whole.data_ptr() + coord * part.nbytes


def check_apart(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    where: Where,
    together: Callable[[Tensor, Tensor], bool] = lambda one, other: False,
) -> None:
    """Raise if concurrent messages share memory, because the values sent and received would be undefined.

    together: whether two tensors belong to one message, which writes the same values to any memory that they share.
    """
    tensors = [(x, True) for x in received] + [(x, False) for x in sent]
    spans = sorted(
        ((*span_of(x), x, comes) for x, comes in tensors if x.numel()),
        key=itemgetter(0),
    )
    open_: list[tuple[int, int, Tensor, bool]] = []
    for span in spans:
        begin, _, x, comes = span
        open_ = [other for other in open_ if other[1] > begin]
        for _, _, other, came in open_:
            if (comes or came) and share_memory(x, other) and not together(x, other):
                raise ShapeError(
                    f"{where()} would receive into memory that another of its messages uses",
                    given=f"tensors of shape {tuple(other.shape)} and {tuple(x.shape)} that overlap",
                    expected="separate memory for each message",
                    hint="torch.empty_like(x) for each receive",
                )
        open_.append(span)


def lie_apart(received: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> bool:
    """Return whether no received tensor shares memory with another one. All tensors are contiguous."""
    spans = [(x.data_ptr(), x.nbytes, True) for x in received]
    spans += [(x.data_ptr(), x.nbytes, False) for x in sent]
    spans.sort()
    all_until = received_until = 0
    for begin, nbytes, comes in spans:
        if begin < received_until or (comes and begin < all_until):
            return False
        all_until = max(all_until, begin + nbytes)
        if comes:
            received_until = max(received_until, begin + nbytes)
    return True


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share any byte of memory. Two columns of a matrix interleave but share no byte."""
    if one.is_contiguous() and other.is_contiguous():
        begin, start = one.data_ptr(), other.data_ptr()
        return begin < start + other.nbytes and start < begin + one.nbytes
    return np.shares_memory(_extent(one), _extent(other))


def _extent(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory that a tensor covers, on any device, as an array that is never read."""
    size = x.element_size()
    facts = {"data": (x.data_ptr(), True), "typestr": f"|V{size}", "shape": tuple(x.shape), "version": 3}
    strides = tuple(stride * size for stride in x.stride())
    return np.asarray(SimpleNamespace(__array_interface__={**facts, "strides": strides}))


def span_of(x: Tensor) -> tuple[int, int]:
    """Return the start address of a tensor's memory and the address just past its end; the tensor must have elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_in_place(x: Tensor, where: Where, functional: str, written: bool = True) -> None:
    """Raise if autograd tracks a tensor that an in-place collective would change, or whose gradient a call would lose.

    functional: the differentiable call; "" if there is none. written: whether the call changes the tensor.
    """
    if x.requires_grad and torch.is_grad_enabled():
        does = "would change a tensor" if written else "would lose the gradient of a tensor"
        raise AutogradError(
            f"{where()} {does} that needs gradients",
            given=f"a tensor of shape {tuple(x.shape)} with requires_grad=True",
            expected="a tensor without gradients, or torch.no_grad()",
            hint=f"mesh.functional.{functional}, which returns a new tensor and has a gradient"
            if functional
            else "the tensor's .detach(), which shares its memory",
        )
    if forward_level() >= 0 and has_tangent(x):
        raise AutogradError(
            f"{where()} would lose the tangent of a tensor under forward-mode AD",
            given=f"a tensor of shape {tuple(x.shape)} with a tangent",
            expected="a tensor without tangents",
            hint=f"mesh.functional.{functional}, which returns a new tensor and propagates tangents"
            if functional
            else "torch.autograd.forward_ad.unpack_dual(x).primal",
        )


def has_tangent(x: Tensor) -> bool:
    """Return whether `x` has a tangent in forward-mode AD. This takes microseconds, so first check whether a level is open."""
    # Not forward_ad.unpack_dual, which does not see the levels that a compiled graph opens.
    return is_fwd_grad_enabled() and unpack_dual(x, level=0)[1] is not None


def followed(x: Tensor) -> bool:
    """Return whether results computed from `x` are differentiated, or a transform of torch.func is active."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_level() >= 0 or transforming()


def check_written(x: Tensor, where: Where) -> None:
    """Raise if two elements of `x` share memory, because then `x` cannot be written."""
    if x.is_contiguous():
        return
    spans = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if x.numel() > 1 + sum((size - 1) * abs(stride) for size, stride in spans):
        raise ShapeError(
            f"{where()} cannot write to this tensor: some of its elements share memory",
            given=f"a tensor of shape {tuple(x.shape)}, strides {x.stride()}",
            expected="a separate place in memory for each element",
            hint="x.clone(memory_format=torch.contiguous_format), as after expand()",
        )


def axis_or_dim(axis: int | None, dim: int | None, where: Where) -> int:
    """Return the axis of a call that also accepts torch's name `dim`; 0 if neither is given.

    Raises ShapeError if both are given.
    """
    if axis is not None and dim is not None:
        raise ShapeError(
            f"{where()}: axis and dim are the same argument",
            given=f"axis={axis}, dim={dim}",
            expected="one of them",
            hint=f"axis={axis}",
        )
    return next((number for number in (axis, dim) if number is not None), 0)


def normal_axis(x: Tensor, axis: int, where: Where) -> int:
    """Return `axis` counted from the front, as a plain int."""
    try:
        axis = index(axis)
    except TypeError:
        raise ShapeError(
            f"{where()}: axis {axis!r} is not an integer",
            given=f"axis {axis!r}, a {type(axis).__name__}",
            expected=f"the index of an axis of x, which has {x.ndim} axes",
            hint="axis=0 or axis=-1",
        ) from None
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(
            f"{where()} has no axis {axis}",
            given=f"x of shape {tuple(x.shape)}, axis {axis}",
            expected=f"{-x.ndim} to {x.ndim - 1}" if x.ndim else "a tensor with an axis; this one is 0-dim",
            hint="x.unsqueeze(0)" if x.ndim == 0 else "axis=0 or axis=-1",
        )
    return axis % x.ndim


def check_answered(backend: str, what: str, where: str, hint: str) -> None:
    """Raise UnsupportedOp on torch's fake backend: only other ranks know `what`, and no other rank exists there."""
    if backend == "fake":
        raise UnsupportedOp(
            f"{where}: only other ranks know {what}, and in a dry run there are none",
            given="a rank of torch's fake backend",
            expected="calls whose results have a shape that this rank knows",
            hint=hint,
        )


def check_divisible(x: Tensor, axis: int, size: int, where: Where, who: str) -> None:
    """Raise unless axis `axis` of `x` splits into `size` equal parts."""
    length = x.shape[axis]
    if length % size:
        raise ShapeError(
            f"{where()} cannot split axis {axis}",
            given=f"x of shape {tuple(x.shape)} on {who}",
            expected=f"a size of axis {axis} divisible by {size}, got {length}",
            hint=f"pad axis {axis} to {-(-length // size) * size}",
        )


def is_int(number: object) -> TypeGuard[int]:
    """Return whether `number` is an int and not a bool."""
    return isinstance(number, int) and not isinstance(number, bool)


def check_coord(coord: object, size: int, what: str, where: Where, hint: str | None = None) -> None:
    """Raise unless a peer or root is a coord of the dim. A global rank is not accepted."""
    if not is_int(coord) or not 0 <= coord < size:
        raise LayoutError(
            f"{where()}: {what}={coord!r} is not a coord",
            given=f"{what}={coord!r}",
            expected=f"a coord from 0 to {size - 1}; peers and roots are coords along the dim",
            hint=hint
            or f"mesh.coord(...) gives this rank's coord; {what} is a coord along the dim, not a global rank",
        )


def check_other(coord: int, own: int, what: str, where: Where) -> None:
    """Raise if the peer of a message is this rank."""
    if coord == own:
        raise UnsupportedOp(
            f"{where()}: a rank cannot send messages to itself",
            given=f"{what}={coord}, which is this rank's own coord",
            expected="the coord of another rank",
            hint="mesh.exchange with both ends in one call, which copies a tensor; or mesh.shift",
        )


def check_tag(tag: object, where: Where) -> None:
    """Raise unless a tag is a small integer. Higher tags are reserved for the library."""
    if not is_int(tag) or not 0 <= tag < OWN_TAGS:
        raise LayoutError(
            f"{where()}: tag={tag!r} is not a valid tag",
            given=f"tag={tag!r}",
            expected=f"an integer from 0 to {OWN_TAGS - 1}",
            hint="leave tag out",
        )


def check_offset(offset: object, where: Where) -> None:
    """Raise unless a shift's offset in coords is an integer, of either sign."""
    if not is_int(offset):
        raise LayoutError(
            f"{where()}: offset={offset!r} is not a number of coords",
            given=f"offset={offset!r}, a {type(offset).__name__}",
            expected="an integer; a negative one shifts towards lower coords",
            hint="offset=1, or int(offset)",
        )


def factor_of(factor: object, op: str, dtype: torch.dtype, where: Where) -> float | complex | None:
    """Return the factor of an operation that takes one, as a plain number by which a tensor of `dtype` can be multiplied.

    Raises if it is missing or no number, or if another operation is given a factor.
    """
    takes = REDUCTIONS[op].factor
    if factor is not None and not takes:
        raise ShapeError(
            f"{where()}: factor has no effect with op={op!r}",
            given=f"op={op!r}, factor={factor}",
            expected=" or ".join(f'op="{row.name}"' for row in REDUCTIONS.values() if row.factor),
            hint='op="premul_sum"',
        )
    if factor is None and takes:
        raise ShapeError(
            f'{where()}: op="{op}" without a factor',
            given=f'op="{op}"',
            expected="the number that each rank multiplies its x by before the sum",
            hint="factor=0.5",
        )
    if factor is None:
        return None
    number = factor.item() if isinstance(factor, Tensor) and factor.numel() == 1 else factor
    try:
        if isinstance(number, Real):
            return float(number)
        if isinstance(number, Complex) and dtype.is_complex:
            return complex(number)
    except OverflowError:
        pass
    raise ShapeError(
        f"{where()}: factor={factor!r} is not a number for {str(dtype).removeprefix('torch.')}",
        given=f"factor={factor!r}, a {type(factor).__name__}",
        expected="a number that this rank's x is multiplied by before the sum",
        hint="factor=0.5",
    )


def check_envelopes(envelopes: object, what: str, where: Where) -> None:
    """Raise unless `envelopes` is a list of messages, each with its peer."""
    kind = type(envelopes).__name__
    if isinstance(envelopes, (list, tuple)):
        wrong = [e for e in envelopes if not isinstance(e, (list, tuple)) or not 2 <= len(e) <= 3]
        if not wrong:
            return
        sized = f" of {len(wrong[0])}" if isinstance(wrong[0], (list, tuple)) else ""
        kind = f"a list with a {type(wrong[0]).__name__}{sized}"
    raise ShapeError(
        f"{where()}: {what} is not a list of messages",
        given=f"{what}: {kind}",
        expected="a list of (tensor, coord) or (tensor, coord, tag)",
        hint=f"{what}=[(x, 1)]",
    )


def seconds_of(timeout_s: object, where: Where) -> float:
    """Return a timeout as a number that a backend accepts: backends count milliseconds, and treat 0 as no limit."""
    seconds = math.nan
    if not isinstance(timeout_s, bool) and isinstance(timeout_s, (int, float, Real)):
        try:
            seconds = float(timeout_s)
        except OverflowError:
            seconds = _LONGEST_S
    if seconds > 0:
        return min(max(seconds, 0.001), _LONGEST_S)
    raise UnsupportedOp(
        f"{where()}: timeout_s={timeout_s!r} is not a valid timeout",
        given=f"timeout_s={timeout_s!r}",
        expected="a number of seconds above 0",
        hint="timeout_s=30, or leave it out",
    )
