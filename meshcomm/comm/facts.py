"""The facts of a call of the mesh that must be equal on all ranks of its group."""

from __future__ import annotations

from math import prod
from typing import Any

from meshcomm.collectives import ALL_TO_ALL, SCATTER
from meshcomm.comm.request import OWN_OPTIONS, Checked
from meshcomm.comm.shapes import rest_of, sent_as
from meshcomm.reductions import REDUCTIONS
from meshcomm.watching.facts import exchanged, facts_of


def facts_of_call(checked: Checked, coord: int) -> dict[str, Any]:
    """Return the facts of a call of the mesh.

    coord: this rank's place in the group.
    """
    request, axis = checked.request, checked.axis
    row, options = request.row, request.options
    x = request.out if row is SCATTER else checked.source
    shape: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    if x is not None:
        sizes = enumerate(x.shape)
        shape["shape"] = [0 if checked.differs and place == axis else size for place, size in sizes]
    if checked.differs:
        facts["elements"] = None
    if row is SCATTER:
        facts["out"] = False if x is None else None
        facts["x_is"] = None if x is None or checked.problem is None else "not to be scattered"
    elif row is ALL_TO_ALL:
        facts |= {"split_axis": axis, "concat_axis": checked.concat}
        facts["input_split_sizes"] = None if checked.sends is None else True
        facts["output_split_sizes"] = None if checked.expects is None else True
    elif row.joins or row.splits:
        facts["axis"] = axis
        if row.joins:
            facts["uneven"] = options.uneven or None
    facts |= {name: value for name, value in options._asdict().items() if name not in OWN_OPTIONS}
    facts |= options.packed or {}
    if row.reduces and x is not None:
        facts["sent as"] = sent_as(x.dtype, REDUCTIONS[request.op].wire.name)
    op = request.op if row.reduces else None
    facts = shape | facts_of(row, [] if x is None else [x], op, request.root) | facts
    if x is not None and checked.sends is not None and checked.expects is not None:
        # A rank without rows to send may still receive some.
        count = prod(rest_of(x, axis))
        facts |= exchanged(coord, [n * count for n in checked.sends], [n * count for n in checked.expects])
    return facts
