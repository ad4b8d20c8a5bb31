"""The properties of each reduction, in one table for all code that checks, sends, schedules, simulates or documents calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

# Code can read the table without importing torch.
Tensor: TypeAlias = Any
# Kinds of dtypes that operations accept or refuse. float8: one-byte floats, which have no arithmetic.
Kind: TypeAlias = Literal["bool", "whole", "float", "float8", "complex"]


@dataclass(frozen=True, slots=True, eq=False)
class WireOp:
    """A backend's operation on prepared values. A hierarchy can apply the operation again at the next level.

    combine:   the name of torch's two-operand function, which message schedules and the simulator apply.
    reduce_op: the name of the attribute in torch's ReduceOp.
    divided:   whether the sum is divided by the number of ranks at the end when `combine` replaces the backend.
    rounds:    whether the order of the operands affects the last bits of floats.
    nan:       whether NaN counts as the least or the greatest value; None if the operation does not order values.
    lacking:   the backends that lack this operation.
    """

    name: str
    combine: str
    reduce_op: str
    divided: bool
    rounds: bool
    nan: Literal["least", "greatest"] | None
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """One operation, under the name that users pass. No field has a default, so every row must set all fields.

    wire:    the operation that backends, and further levels of a hierarchy, apply to the prepared values.
    prepare: changes this rank's values in place before they are sent, given the call's factor; None to send them unchanged.
    factor:  whether the call takes a factor.
    refuses: the kinds of dtypes that the operation rejects, each with the expected dtype and a hint.
    partial: whether a pattern may name the operation.
    """

    name: str
    wire: WireOp
    prepare: Callable[[Tensor, Any], object] | None
    factor: bool
    refuses: Mapping[Kind, tuple[str, str]]
    partial: bool

    @property
    def linear(self) -> bool:
        """Whether the operation is a plain sum or average, whose gradients are implemented."""
        return self.prepare is None and self.wire.combine == "add"


# name, combine, reduce_op, divided, rounds, nan, lacking
_SUM: Final = WireOp("sum", "add", "SUM", False, True, None, ())
_AVG: Final = WireOp("avg", "add", "AVG", True, True, None, ())
_PRODUCT: Final = WireOp("product", "mul", "PRODUCT", False, True, None, ())
_MIN: Final = WireOp("min", "minimum", "MIN", False, False, "least", ())
_MAX: Final = WireOp("max", "maximum", "MAX", False, False, "greatest", ())
_BAND: Final = WireOp("band", "bitwise_and", "BAND", False, False, None, ("nccl",))
_BOR: Final = WireOp("bor", "bitwise_or", "BOR", False, False, None, ("nccl",))
_BXOR: Final = WireOp("bxor", "bitwise_xor", "BXOR", False, False, None, ("nccl",))

# Backends reduce bool with sum and product. Calls of the mesh have to name any or all.
ANY_ALL: Final = "max or bor (any), min or band (all) for bool", 'op="max" for "any", op="min" for "all"'
_FRACTION = "a dtype that can hold a fraction", 'op="sum", then divide, or x.float()'
_ORDER = "a dtype whose values have an order", "torch.view_as_real(x), if that is meant"
_PAIRS = "sum or avg for complex numbers", "multiply after all_gather"
_BITWISE = "integers or bool for a bitwise operation", 'op="max", or x.view(torch.int32)'
_FRACTIONS: Final[Mapping[Kind, tuple[str, str]]] = {
    "bool": _FRACTION,
    "whole": _FRACTION,
    "float8": _FRACTION,
}
_BITS: Final[Mapping[Kind, tuple[str, str]]] = {"float": _BITWISE, "float8": _BITWISE, "complex": _BITWISE}

# In documentation order. The arguments are name, wire, prepare, factor, refuses, partial.
REDUCTIONS: Final[dict[str, Reduction]] = {
    row.name: row
    for row in (
        Reduction("sum", _SUM, None, False, {"bool": ANY_ALL}, True),
        Reduction("avg", _AVG, None, False, _FRACTIONS, True),
        Reduction("product", _PRODUCT, None, False, {"bool": ANY_ALL, "complex": _PAIRS}, True),
        Reduction("min", _MIN, None, False, {"complex": _ORDER}, True),
        Reduction("max", _MAX, None, False, {"complex": _ORDER}, True),
        Reduction("band", _BAND, None, False, _BITS, False),
        Reduction("bor", _BOR, None, False, _BITS, False),
        Reduction("bxor", _BXOR, None, False, _BITS, False),
        Reduction("premul_sum", _SUM, lambda x, factor: x.mul_(factor), True, _FRACTIONS, False),
    )
}

WIRE_OPS: Final = {row.wire.name: row.wire for row in REDUCTIONS.values()}


def with_gradient(name: str = "op") -> str:
    """Return the operations that have a gradient, in the form that errors use.

    >>> with_gradient()
    'op="sum" or op="avg"'
    """
    return " or ".join(f'{name}="{row.name}"' for row in REDUCTIONS.values() if row.linear)
