"""The facts of a call that must be equal on all ranks of its group: common facts, and the facts of calls outside the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from meshcomm.collectives import ALL_TO_ALL, BARRIER, HOOKED, SCATTER, Collective
from meshcomm.transport.support import name_of

# The facts in which the ranks of an all_to_all differ. `balance` decides whether they fit.
OWN: Final = ("sends", "expects", "balance")
# Bound at module level because every call looks it up.
_STRIDED: Final = torch.strided
# A prime, and a number whose powers weight the pairs of ranks.
PRIME: Final = (1 << 61) - 1
_WEIGHT: Final = 0x9E3779B97F4A7C15 % PRIME


def kind_of(x: Tensor) -> str:
    """Return the dtype of a tensor, and its layout if it is sparse."""
    return f"{x.layout} {x.dtype}".replace("torch.", "").removeprefix("strided ")


def bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor. A sparse one counts as if it were dense: ranks may have other numbers of non-zeros."""
    return x.nbytes if x.layout is _STRIDED else x.numel() * x.dtype.itemsize


def facts_of(row: Collective, tensors: Sequence[Tensor], op: str | None, root: int) -> dict[str, Any]:
    """Return the facts that calls of the mesh and calls made outside it have in common.

    tensors: the tensors that this rank sends or, in a scatter, receives. Facts that are None on most ranks are still facts.
    """
    facts: dict[str, Any] = {}
    if tensors:
        facts["dtype"] = _one([kind_of(x) for x in tensors])
        facts["elements"] = _one([x.numel() if x.layout is torch.strided else list(x.shape) for x in tensors])
    if op is not None:
        facts["op"] = op
    if row.reduces:
        facts["sent as"] = None
    if row.root is not None:
        facts[row.root] = root
    # What a call of the mesh sends first, and a call outside it does not.
    if row is SCATTER:
        facts["out"] = None
    elif row is ALL_TO_ALL:
        facts |= {"input_split_sizes": None, "output_split_sizes": None}
    elif row.joins:
        facts["uneven"] = None
    return facts


def facts_of_list(tensors: Sequence[Tensor], message: Sequence[Tensor]) -> dict[str, Any]:
    """Return the facts of a list of tensors. message: those tensors that are sent together."""
    if not tensors:
        return {"shape": None, "dtype": None, "elements": None, "list": "of no tensors"}
    return {
        "shape": _one([list(x.shape) for x in tensors]),
        "dtype": _one([name_of(x.dtype) for x in tensors]),
        "elements": _one([x.numel() for x in message]),
    }


def facts_of_hook(
    row: Collective, record: Any, coord: int, size: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the facts of a call outside the mesh, as torch's group hooks report it.

    coord, size: this rank's place in the group, and the size of the group. arguments: see `arguments_of`.
    """
    inputs, outputs = record.input_tensors, record.output_tensors
    op = arguments.get("op") if row.reduces else None
    # The parts of a scatter or gather exist on only one rank.
    small, large = (outputs, inputs) if row.splits and row is not ALL_TO_ALL else (inputs, outputs)
    # A barrier may pass a tensor that is never read.
    facts = facts_of(row, [] if row is BARRIER else small, op, record.root)
    if row is BARRIER or not small:
        return facts
    parts, wholes = [x.numel() for x in small], [x.numel() for x in large]
    if row is ALL_TO_ALL:
        del facts["elements"]
        return facts | _exchanged(inputs, outputs, coord, size, arguments)
    if row.reduces and row.splits:
        facts["elements"] = _one([n * size for n in parts])
    # Whether the tensors of this rank fit each other. If not, its backend would refuse the call on this rank only.
    fit = not wholes or row.in_place or wholes in ([n * size for n in parts], parts * size)
    facts["parts"] = None if fit else wholes
    if not fit and parts == wholes[coord : coord + 1]:
        facts["elements"] = None
    return facts


def is_refused(kind: str, record: Any, size: int, gloo: bool, arguments: Mapping[str, Any]) -> bool:
    """Return whether torch refuses a call outside the mesh on this rank before it sends anything, as in torch 2.15.

    Such a call is none: the program may catch torch's error and go on with the call that the other ranks make.
    kind: the call's name in group hooks. For the other arguments, see `facts_of_hook`.
    """
    inputs: list[Tensor] = record.input_tensors
    outputs: list[Tensor] = record.output_tensors
    row = HOOKED.get(kind)
    if row is None:
        # A message from any source has no root.
        return not -1 <= record.root < size
    if row is BARRIER:
        return False
    if row.root is not None and not 0 <= record.root < size:
        return True
    if not gloo:
        return False
    if kind == "ALLTOALL":
        return not len(inputs) == len(outputs) == size
    if len(small := outputs if kind == "SCATTER" or kind.startswith("REDUCE_SCATTER") else inputs) != 1:
        return False
    first, many = small[0], list(inputs if small is outputs else outputs)
    if kind in ("ALLGATHER", "ALLGATHER_BASE", "GATHER", "SCATTER"):
        if kind == "ALLGATHER_BASE" and many[0].ndim:
            many = list(many[0].detach().chunk(size))
        unlike = any((x.shape, x.dtype) != (first.shape, first.dtype) for x in many)
        # Only the root has the list of a gather or scatter.
        return unlike or len(many) not in (size, 0 if row.root else size)
    if kind == "REDUCE_SCATTER":
        # Gloo looks at the part that stays on this rank, whichever that is.
        return len(many) != size or all(x.shape != first.shape for x in many)
    if kind == "REDUCE_SCATTER_BASE" and first.ndim and many[0].ndim:
        return many[0].dtype != first.dtype or many[0].shape[0] != first.shape[0] * size
    if kind == "ALLTOALL_BASE" and first.ndim and many[0].ndim:
        pairs = ((first, "input_split_sizes"), (many[0], "output_split_sizes"))
        return any(_is_split_badly(x.shape[0], arguments[key], size) for x, key in pairs if key in arguments)
    return False


def _is_split_badly(rows: int, sizes: Sequence[int] | None, size: int) -> bool:
    return (len(sizes), sum(sizes)) != (size, rows) if sizes else rows % size > 0


def _exchanged(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], coord: int, size: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a rank sends to each coord and expects from each coord, as far as it is known."""
    if len(inputs) == 1 and "input_split_sizes" not in arguments and size > 1:
        return {}
    sends = _parts(inputs, arguments.get("input_split_sizes"), size)
    expects = _parts(outputs, arguments.get("output_split_sizes"), size)
    whole = [sum(x.numel() for x in tensors) for tensors in (inputs, outputs)]
    return exchanged(coord, sends, expects, fit=[sum(sends), sum(expects)] == whole)


def exchanged(coord: int, sends: list[int], expects: list[int], fit: bool = True) -> dict[str, Any]:
    """Return the facts of an all_to_all whose rank `coord` sends and expects these numbers of elements.

    fit: whether they are those of its tensors.
    """
    if fit and sends == expects and len(set(sends)) == 1:
        return {"elements": sum(sends)}
    return {
        "elements": None,
        "sends": sends,
        "expects": expects,
        "balance": balance(coord, len(sends), sends, expects) if fit else None,
    }


def parts_of(facts: Mapping[str, Any], size: int) -> tuple[list[int], list[int]] | None:
    """Return what a rank sends to each coord and expects from each coord in an all_to_all; None if that is not known."""
    if "balance" in facts:
        return facts["sends"], facts["expects"]
    if "input_split_sizes" not in facts or not isinstance(facts.get("elements"), int):
        return None
    even = [facts["elements"] // size] * size
    return even, even


def _parts(tensors: Sequence[Tensor], sizes: Sequence[int] | None, size: int) -> list[int]:
    """Return the number of elements for each coord. sizes: along axis 0 of the only tensor; empty if they are equal."""
    if len(tensors) != 1 or (size == 1 and not sizes):
        return [x.numel() for x in tensors]
    (x,) = tensors
    if not sizes:
        return [x.numel() // size] * size
    row = x.numel() // x.shape[0] if x.ndim and x.shape[0] else 0
    return [int(rows) * row for rows in sizes]


def balance(coord: int, size: int, sends: Sequence[int], expects: Sequence[int]) -> int:
    """Return a number whose sum over the ranks is 0, modulo a prime, if every rank expects what the others send it.

    Each pair of ranks has its own weight, so that errors of two pairs do not cancel out. Lists for hundreds of ranks would
    not fit into the message.
    """
    leaving = sum(n * pow(_WEIGHT, coord * size + other, PRIME) for other, n in enumerate(sends))
    coming = sum(n * pow(_WEIGHT, other * size + coord, PRIME) for other, n in enumerate(expects))
    return (leaving - coming) % PRIME


def _one(values: list[Any]) -> Any:
    """Return the value of a single tensor, or the values of several. Equal dtypes are one."""
    if len(values) == 1 or (values and isinstance(values[0], str) and len(set(values)) == 1):
        return values[0]
    return values
