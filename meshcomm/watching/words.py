"""Formats errors about calls: the call, the backend's reason, and what another rank does instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from meshcomm.errors import CommunicationError
from meshcomm.layout.sizes import rank_text, ranks_text
from meshcomm.watching.exceptions import first_line

# The status of one rank, as in `RankRecord.data`.
Status: TypeAlias = Mapping[str, Any]

# An error has lines for at most this many ranks.
_LINES: Final = 16
# Why a rank does not answer, by the state of its process; "" if unknown.
SILENT: Final = {
    "": "does not answer: it has ended, is stopped, or a call into C holds Python's GIL",
    "ended": "does not answer: its process has ended",
    "stopped": "does not answer: its process is stopped",
    "runs": "does not answer, but its process runs: a call into C holds Python's GIL, or its host is overloaded",
    "no report": "left no report: no rank asked it, or it could not write one",
}
# The hint for a rank that cannot be reached at the address that it offered.
INTERFACES: Final = "[network] interfaces; meshcomm doctor, under the launcher, shows each rank's address"
# A barrier of torch that is no collective: rank 0 waits for a message of each rank.
BARRIER: Final = "monitored_barrier"
# A call of which there is no record.
UNKNOWN: Final[Mapping[str, Any]] = {"number": 0, "call": "a call", "dim": "?", "callsite": "?"}


def failure(where: str, error: BaseException) -> CommunicationError:
    """Return the backend's error, with the operation, the dim and the coords added."""
    return CommunicationError(
        f"{where} failed",
        given=first_line(error),
        expected="every rank of the group to make the same call and stay alive until it ends",
        hint="look for the first error on the other ranks; this error may be a consequence of it",
    )


# -- of a call -------------------------------------------------------------------------------------------


def call_text(call: Mapping[str, Any]) -> str:
    """Return text for a collective or for messages, given in the form of `FlightRecorder.status`."""
    name = described(call) if "parts" in call else call["call"]
    return f'{name} along "{call["dim"]}"' + (f", call {call['number']}" if call.get("number") else "")


def made_at(call: Mapping[str, Any]) -> str:
    """Return text that says where a call was made. call: its record, or a record that is made from it, as `FailedCall.facts`."""
    return f"at {call['callsite']}"


def described(waiting: Mapping[str, Any]) -> str:
    """Return text such as `recv from rank 0, message 3 with tag 0` for the messages that a call waits for."""
    parts = []
    for part in waiting["parts"]:
        peer, tag = part["peer"], part["tag"]
        to = "to" if part["direction"] == "send" else "from"
        message = f"{to} rank {peer}, message {part['number']} with tag {tag}"
        parts.append(f"from any rank with tag {tag}" if peer is None else message)
    return f"{waiting['call']} {' and '.join(parts)}"


# -- of a rank -------------------------------------------------------------------------------------------


def name_of_rank(rank: int, status: Status | None) -> str:
    """Return the rank as text, with its coords if the rank answered."""
    return rank_text(rank, None if status is None else status["coords"])


def activity(rank: int, status: Status | None, process: str = "") -> str:
    """Return one line of text: the rank, and its call or line. process: the state of its process, see `diagnose`."""
    return f"{name_of_rank(rank, status)} {SILENT[process] if status is None else doing_of(status)}"


def doing_of(status: Status, label: str | None = None) -> str:
    """Return text that names the call that failed on a rank or blocks the rank; otherwise, the line that the rank executes.

    label: the group whose last call is named for a rank that is in no call.
    """
    failed = status.get("failed")
    way_out = "has closed the mesh" if status.get("coords") else "has ended, or left torch's default group"
    if failed is not None:
        # The rank's later activity usually follows from the failure.
        closed = f"{way_out}, and " if status.get("closed") else ""
        ranks = failed.get("waited_for")
        why = f": it waited for {ranks_text(ranks)}" if ranks else ""
        return f"{closed}was in {failed['call']}, {made_at(failed)}, which failed{why}"
    calls = [call for group in status["groups"] if (call := blocked_in(group)) is not None]
    if calls:
        # A collective explains more than a message.
        return is_in(next((call for call in reversed(calls) if "parts" not in call), calls[-1]))
    if status.get("barrier"):
        return f"is in {BARRIER}, at {status['main']}"
    group, raised = group_of(status, label), status.get("raised")
    after = thread = ""
    if group is not None and group["last"] is not None:
        after = f", after {group['last']['call']}, call {group['last']['number']}"
    if status.get("thread"):
        thread = f"; {status['thread']}"
    if status.get("closed"):
        return f"{way_out}{after}" + (f", when it raised {raised}" if raised else thread)
    return f"is at {status['main']}{after}{thread}" + (f"; {raised}, and goes on" if raised else "")


def is_in(call: Mapping[str, Any]) -> str:
    """Return text that says in which call a rank is."""
    return f"is in {call_text(call)}, {made_at(call)}"


def group_of(status: Status | None, label: str | None) -> Any:
    """Return a rank's record of a group; None if it has none."""
    groups = [] if status is None else status["groups"]
    return next((group for group in groups if group["label"] == label), None)


def blocked_in(group: Mapping[str, Any]) -> Any:
    """Return the collective in which a rank is blocked in a group, otherwise the messages that the rank waits for;
    None if there are neither.
    """
    last = group["last"]
    return last if last is not None and last["inside"] else group.get("messages", {}).get("waiting")


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first lines, each about a rank, and a line about the other ranks."""
    if len(lines) <= _LINES:
        return list(lines)
    return [*lines[:_LINES], f"and {len(lines) - _LINES} more ranks"]
