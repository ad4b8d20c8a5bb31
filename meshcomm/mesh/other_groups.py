"""Calls on groups of torch that no mesh has made: the default group, and those of `dist.new_group`."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from meshcomm.comm.callsite import is_ours
from meshcomm.transport.torch_private import ranks_of_groups, recorded_collectives

# Collectives of a group of which a rank tells the others.
_RECENT: Final = 16

_C10D: Final = inspect.unwrap(dist.barrier).__code__.co_filename


def other_groups(line: str = "") -> list[dict[str, Any]] | None:
    """The groups on which this rank has called, as `FlightRecorder.status` has them; the latest used last.

    line: of the program, where it is inside torch now. None where torch's flight recorder is off.
    """
    recorded = recorded_collectives()
    if recorded is None:
        return None
    ranks = ranks_of_groups()
    found: dict[str, list[tuple[int, str]]] = {}
    for name, number, call in recorded:
        if name in ranks:
            found[name] = [*found.pop(name, [])[1 - _RECENT :], (number, call)]
    latest = recorded[-1][0] if recorded else ""
    return [
        _status(name, ranks[name], calls, line if name == latest else "") for name, calls in found.items()
    ]


def failed_on(trace: TracebackType | None) -> tuple[dict[str, Any], bool] | None:
    """The group on which the call of this traceback failed, as `other_groups` has it, and whether its number is known.

    None where it failed on a group of a mesh, or nothing shows the group.
    """
    line, made = "", ""
    name: str | None = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == _C10D and not made:
            made = code.co_name
            group = trace.tb_frame.f_locals.get("group") or dist.group.WORLD
            name = str(group.group_name) if isinstance(group, dist.ProcessGroup) else None
        elif not is_ours(code.co_filename):
            line, made, name = f"{code.co_filename}:{trace.tb_lineno}", "", None
        trace = trace.tb_next
    groups = other_groups(line) or []
    # A wait shows no group: what failed is then the latest call.
    found = groups[-1] if groups and not made else None
    ranks = ranks_of_groups()
    if name is not None:
        found = next((group for group in groups if group["label"] == _label(name)), None)
        messages = made.endswith(("send", "recv", "send_irecv"))
        if name in ranks and (found is None or messages):
            # The flight recorder knows of no messages.
            return _status(name, ranks[name], [(0, made)], line), False
    if found is not None:
        found["last"]["callsite"] = line
    return None if found is None else (found, True)


def _label(name: str) -> str:
    world = dist.group.WORLD
    default = world is not None and name == str(world.group_name)
    return "torch's default group" if default else f"torch's group {name}"


def _status(name: str, ranks: list[int], calls: list[tuple[int, str]], line: str) -> dict[str, Any]:
    number, call = calls[-1]
    return {
        "label": _label(name),
        "ranks": ranks,
        "started": number,
        "last": {"number": number, "call": call, "dim": None, "callsite": line, "inside": bool(line)},
        "recent": [(number, call, "", None) for number, call in calls],
        "messages": {"begun": [], "waiting": None},
    }
