"""What a simulated rank does, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from meshcomm.layout.sizes import fold
from meshcomm.simulator.scheduler import Actor
from meshcomm.simulator.sites import of_thread
from meshcomm.simulator.store import StoreWait
from meshcomm.simulator.work import SimulatedWork

# Lines of one kind that a verdict shows; the rest is counted.
_SHOWN: Final = 16

# Where the mesh itself waits in the store. The prefix names the mesh by its number of opening.
AGREED: Final = re.compile(r"(?P<mesh>meshcomm\d+)/agree/.*")
CREATED: Final = re.compile(r"(?P<mesh>meshcomm\d+)/create/(?P<name>.*)/[^/]+")
MET: Final = re.compile(r"(?P<mesh>meshcomm\d+)/mesh/barrier/(?P<along>[^/]*)/(?P<first>\d+)/\d+/verdict")
_USER: Final = re.compile(r"meshcomm\d+/mesh/user/")


def name_of(actor: Actor) -> str:
    """`rank 5 (dp=1 tp=0)`."""
    inner = " ".join(f"{dim}={coord}" for dim, coord in actor.coords.items())
    return f"rank {actor.rank} ({inner})" if inner else f"rank {actor.rank}"


def doing(actor: Actor) -> str:
    """What it waits in, or that it has ended: a verb and what belongs to it."""
    on = actor.wait
    if on is None:
        return "has returned" if actor.error is None else "has failed"
    site = of_thread(actor.ident)
    if isinstance(on, StoreWait):
        key = on.keys[0]
        if AGREED.fullmatch(key):
            return f"waits in init at {site.line}"
        if match := CREATED.fullmatch(key):
            return f'waits in create of "{match["name"]}" at {site.line}'
        if match := MET.fullmatch(key):
            return f"waits in barrier along {match['along'].replace('.', ', ')} at {site.line}"
        keys = ", ".join(f'"{_USER.sub("", each)}"' for each in on.keys[:4])
        return f"waits in store.{site.call} for key {keys} at {site.line}"
    assert isinstance(on, SimulatedWork)
    return f"waits in {operation(on, site.call)} at {site.line}{_begun(on, site.line)}"


def operation(work: SimulatedWork, call: str) -> str:
    """`all_reduce, call 3 on tp[dp=0]`; `send to rank 1, tag 0, on tp[dp=0]`. call: the user's own."""
    if work.kind == "collective":
        name = work.call if call in (work.call, "?") else f"{call} ({work.call})"
        return f"{name}, call {work.number} on {work.label}"
    end = "send to" if work.kind == "send" else "receive from"
    peer = "any rank" if work.peer is None else f"rank {work.peer}"
    tag = "" if work.tag == 0 else f", tag {work.tag}"
    own = "send" if work.kind == "send" else "recv"
    text = f"{end} {peer}{tag}, on {work.label}"
    return text if call in (own, "?") else f"{call} ({text})"


def _begun(work: SimulatedWork, line: str) -> str:
    return f", begun by {work.site.call} at {work.site.line}" if work.site and work.site.line != line else ""


def listed(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {fold(found)}"


def shortened(lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _SHOWN
    return [*lines] if more <= 1 else [*lines[:_SHOWN], f"and {more} more"]


def text_of(error: BaseException) -> str:
    """`ValueError: what it says`."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
