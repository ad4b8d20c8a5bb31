"""Two jobs meet at an address, and open a link over the ranks of a mesh of each."""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.comm.checks import seconds_of
from meshcomm.errors import (
    LaunchError,
    MeshcommError,
    MeshMismatchError,
    StoreError,
    TransferTimeout,
)
from meshcomm.layout import Layout, Ranks
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.across import across, refuse_simulated
from meshcomm.rendezvous.exposure import ExposedRendezvous, is_loopback
from meshcomm.rendezvous.job_store import find_common_store, is_serving
from meshcomm.rendezvous.processes import is_running, process_name, process_of_rank
from meshcomm.rendezvous.signed import SignedStore
from meshcomm.rendezvous.store import prefixed, store_failed, wait_for, within
from meshcomm.transport.torch_private import await_at_exit

SideName: TypeAlias = Literal["source", "target"]
_OTHER: Final[Mapping[SideName, SideName]] = {"source": "target", "target": "source"}
_ADDRESS: Final = re.compile(r"tcp://(.+):(\d+)")

# How often the rank that announces a side shows that it lives, and how long another job waits for such a sign.
_BEAT_S: Final = 0.5
_SILENT_S: Final = 5.0
_POLL_S: Final = 0.02
# How long a store that may be lost is told that a link has closed.
_LEAVES_S: Final = 2.0
# How much longer than the announcing rank the other ranks of its side wait for its result.
_GRACE_S: Final = 5.0
# The errors that the announcing rank passes on to its side.
_KINDS: Final = {
    kind.__name__: kind for kind in (LaunchError, MeshMismatchError, StoreError, TransferTimeout)
}


class Side(NamedTuple):
    """One of two jobs that have met.

    layout: of its mesh. job: the launcher's name for the job, or else the process that announced it. torch: its version.
    """

    layout: Layout
    job: str
    torch: str

    @property
    def ranks(self) -> list[int]:
        """The ranks of its mesh, in ascending order, in the numbering of its own job."""
        return sorted(self.layout.ranks.tolist())


@final
@dataclass(frozen=True)
class Meeting:
    """A link between two jobs, as this process sees it.

    mesh: a mesh with the single dim "link" over all ranks of both sides: those of the source, in ascending order, then those of
        the target. side: this process's own.
    """

    name: str
    side: SideName
    source: Side
    target: Side
    mesh: Mesh

    def __getitem__(self, side: SideName) -> Side:
        return self.source if side == "source" else self.target

    def link_ranks(self, side: SideName) -> Ranks:
        """Return the rank in the link of each rank of a side, by its position in the side's layout."""
        ranks = self[side].layout.ranks.flatten()
        before = 0 if side == "source" else self.source.layout.world_size
        return before + np.searchsorted(np.sort(ranks), ranks)

    def place(self, link_rank: int) -> tuple[SideName, int]:
        """Return the side of a rank of the link, and its rank in the numbering of the side's own job."""
        return _place(self.source, self.target, link_rank)

    def process_of(self, link_rank: int) -> str:
        """Return the process of a rank of the link: its number, its host and its start. Raises StoreError, MeshClosed."""
        self.mesh._state.usable()
        try:
            return process_of_rank(self.mesh._state.held.store, link_rank)
        except RuntimeError as error:
            raise store_failed(f'the store of the link "{self.name}" is lost', error) from error

    def close(self) -> None:
        """Close the link's mesh, and free the name for other jobs. Closing twice is harmless."""
        self.mesh.close()


def meet(
    side: SideName,
    mesh: Mesh,
    name: str,
    address: str,
    timeout_s: float,
    *,
    backend: str | None = None,
    secret: str = "",
) -> Meeting:
    """Meet the other side of the link `name`, and open the link.

    address:   "tcp://HOST:PORT". If no program listens there, the process of the source's lowest rank serves a TCPStore until it
               exits. Several links may share an address.
    timeout_s: seconds to wait for the other side, then for all ranks of both sides, and the timeout of each call on the link.
    backend:   of the link, the same on both sides. If None, that of `mesh`.
    secret:    a text that both jobs know. If given, the values in the store are signed with it: a TCPStore has no
               authentication. Nothing that is read from it is ever unpickled.
    Called by: every rank of `mesh`, and every rank of the other side's mesh, in any order.
    Raises:    TransferTimeout, with the side or its ranks that did not come, on every rank that has come; LaunchError on a
               newcomer whose side of this name belongs to another job, or if the store cannot be served; MeshMismatchError;
               StoreError; CommunicationError; NotMember.

    How the living are told from the dead. The first rank that comes announces its side under a random number that no other
    call has, and takes the side's key in the store. An announcement alone proves nothing: two sides have met only when each has
    answered the number of the other one, which is possible only after having read it. So what a dead job has left is never
    answered, and a job that meets again, after a loss or a restart, has another number. The numbers of both calls name the
    link's keys and groups, so that nothing of an earlier link is read.

    The key of a side belongs to a job from its call until its link is closed. The process that took it counts up a number
    twice a second. A newcomer takes the key if this process has closed its link, has ended on this host, has called `meet`
    again itself, or has not counted for five seconds. Otherwise the newcomer is refused.
    """
    refuse_simulated(name)
    mesh._state.usable()
    timeout_s = seconds_of(timeout_s, lambda: f"meet on {mesh.label}")
    host, port = _parsed(address)
    deadline = time.monotonic() + timeout_s
    call = _Call(side, mesh, name, address, timeout_s, deadline, _of_call(side, mesh, name))
    presence: _Presence | None = None
    try:
        try:
            store: Any = call.store(host, port)
            if secret:
                store = SignedStore(store, secret)
            if call.leads():
                presence = _Presence(store, name, side)
                call.tell(call.pair(presence))
        except RuntimeError as error:
            raise store_failed(f'the store of the link "{name}" is lost, on {mesh.label}', error) from error
        met = call.result()
        source, target = (_side(met[each]) for each in ("source", "target"))
        link = call.open(store, met["link"], source, target, backend or mesh.plan.defaults.backend)
    except BaseException as error:
        if presence is not None:
            presence.end()
        if isinstance(error, MeshcommError):
            call.tell({"kind": type(error).__name__, **vars(error)})
        raise
    if presence is not None:
        link._state.held.resources.callback(presence.end)
    if is_serving(port) and link._state.launch.one_host and not is_loopback(host):
        warnings.warn(
            f"others can reach the store of the link {name} at {host}:{port}, though both jobs are on this host: "
            "tcp://127.0.0.1:PORT, or a secret",
            ExposedRendezvous,
            stacklevel=2,
        )
    return Meeting(name, side, source, target, link)


@dataclass(frozen=True)
class _Call:
    """The arguments of `meet`. own: the store of the own job, under a prefix that only the ranks of this call use."""

    side: SideName
    mesh: Mesh
    name: str
    address: str
    timeout_s: float
    deadline: float
    own: Any

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def leads(self) -> bool:
        """Return whether this rank is the first of its side, which announces it."""
        rank = str(self.mesh.rank)
        try:
            return bool(self.own.compare_set("leads", "", rank).decode() == rank)
        except RuntimeError as error:
            raise _lost(self.mesh, self.name, error) from error

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Tell the ranks of this side whom it has met, or an error, if no rank has told either."""
        with suppress(RuntimeError):
            self.own.compare_set("met", "", json.dumps(facts, default=str))

    def is_told(self) -> bool:
        """Return whether a rank of this side has told the others something."""
        return bool(self.own.check(["met"]))

    def store(self, host: str, port: int) -> dist.TCPStore:
        """Return a client of the store at the address, which this process may have to serve."""
        lowest = int(self.mesh.layout.ranks.min())
        serves = self.side == "source" and self.mesh.rank == lowest
        job, timeout = self.mesh._state.launch.job, timedelta(seconds=self.timeout_s)
        try:
            return find_common_store(host, port, job, timeout, serves=serves, in_vain=self.is_told)
        except TimeoutError as error:
            if self.is_told():
                self.result()
            which = (
                f"its rank {lowest}, which serves the store," if self.side == "source" else "its lowest rank"
            )
            raise TransferTimeout(
                f'the source of the link "{self.name}" has not come, on {self.mesh.label}',
                given=f"{self.address}: {error}, for {self.timeout_s:g} s",
                expected=f"{which} to serve a store there",
                hint="check whether the source runs, and whether both sides have the same address",
                side="source",
                missing=(lowest,) if self.side == "source" else (),
                of_job=False,
            ) from None

    def pair(self, presence: _Presence) -> dict[str, Any]:
        """Announce this side, and wait for the other one. Return what the ranks of this side have to know."""
        layout, other = self.mesh.layout, _OTHER[self.side]
        order = layout.rank_order
        mine = {
            "meshcomm": __version__,
            "torch": torch.__version__,
            "job": self.mesh._state.launch.job or process_name(),
            "dims": dict(layout.dims),
            "rank_order": None if order is None else list(order),
            "views": {view: dict(sizes) for view, sizes in layout.views.items()},
            "merge": {merged: list(parts) for merged, parts in layout.merge.items()},
        }
        presence.announce(mine)
        while (theirs := presence.answered(other)) is None:
            if time.monotonic() > self.deadline:
                raise self._alone(presence, other)
            if self.is_told():
                return {}
            presence.refuse_loss()
            time.sleep(_POLL_S)
        number, offer = theirs
        numbers = (presence.number, number) if self.side == "source" else (number, presence.number)
        return {"link": f"{self.name}/{'.'.join(numbers)}", self.side: mine, other: offer}

    def _alone(self, presence: _Presence, other: SideName) -> TransferTimeout:
        left = presence.holder(other)
        announced = f"\n{left.process} has announced it, but does not answer" if left else ""
        return TransferTimeout(
            f'the {other} of the link "{self.name}" has not come, on {self.mesh.label}',
            given=f"{self.address}: no answer for {self.timeout_s:g} s{announced}",
            expected=f'the {other} to call meshcomm.link with the name "{self.name}" and this address',
            hint=f"check whether the {other} runs; after a loss, both sides have to link again",
            side=other,
            of_job=False,
        )

    def result(self) -> dict[str, Any]:
        """Return what the announcing rank has learnt. Raises the error that it has got."""
        try:
            if not wait_for(self.own, ["met"], self.left_s + _GRACE_S):
                leads = int(self.own.compare_set("leads", "", ""))
                raise TransferTimeout(
                    f'rank {leads} of the {self.side} of the link "{self.name}" has not come back, on {self.mesh.label}',
                    given=f"it came first, and has not told the others of its job for {self.timeout_s:g} s whom it has met",
                    expected="every rank to stay alive while a link opens",
                    hint=f"look at the first error on rank {leads}",
                    side=self.side,
                    missing=(leads,),
                    of_job=False,
                )
            met: dict[str, Any] = json.loads(self.own.get("met"))
        except RuntimeError as error:
            raise _lost(self.mesh, self.name, error) from error
        if (kind := met.pop("kind", None)) is not None:
            lists: dict[str, Any] = {
                each: tuple(met[each]) for each in ("missing", "mismatched_ranks") if each in met
            }
            met.update(lists)
            raise _KINDS.get(kind, MeshcommError)(**met)
        return met

    def open(self, store: Any, link: str, source: Side, target: Side, backend: str) -> Mesh:
        """Open the link's mesh. Raises TransferTimeout if ranks do not come."""
        ranks, before = (self.mesh.rank, source.ranks), 0
        if self.side == "target":
            ranks, before = (self.mesh.rank, target.ranks), len(source.ranks)
        rank, size = before + ranks[1].index(ranks[0]), len(source.ranks) + len(target.ranks)
        try:
            return across(store, link, rank, size, self.timeout_s, device=self.mesh.device, backend=backend)
        except MeshMismatchError as error:
            error.given = (
                f"{error.given}\nranks 0-{len(source.ranks) - 1} are the source, the others the target"
            )
            if not error.missing:
                raise
            self._incomplete(error, source, target)

    def _incomplete(self, error: MeshMismatchError, source: Side, target: Side) -> NoReturn:
        missing: dict[SideName, list[int]] = {"source": [], "target": []}
        for link_rank in error.missing:
            where, rank = _place(source, target, link_rank)
            missing[where].append(rank)
        whole = {"source": source.ranks, "target": target.ranks}
        texts = [
            f"the {where}" if ranks == whole[where] else f"{ranks_text(ranks)} of the {where}"
            for where, ranks in missing.items()
            if ranks
        ]
        side = next(where for where, ranks in missing.items() if ranks)
        raise TransferTimeout(
            f'{" and ".join(texts)} did not come to the link "{self.name}", on {self.mesh.label}',
            given=error.given,
            expected=f"every rank of both meshes within {self.timeout_s:g} s",
            hint="look at the first error on these ranks",
            side=side,
            missing=() if missing[side] == whole[side] else tuple(missing[side]),
            of_job=False,
        ) from None


def _of_call(side: SideName, mesh: Mesh, name: str) -> Any:
    """Return the own job's store, under a prefix that the ranks of the mesh have in common in this call of `meet`."""
    store = prefixed(f"links/{side}/{name}", mesh._state.held.store)
    try:
        return prefixed(str(store.add(f"calls/{mesh.rank}", 1)), store)
    except RuntimeError as error:
        raise _lost(mesh, name, error) from error


def _lost(mesh: Mesh, name: str, error: BaseException) -> StoreError:
    return store_failed(f'{mesh.label} lost the job\'s store in the link "{name}"', error)


def _parsed(address: str) -> tuple[str, int]:
    parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise LaunchError(
            f"no address to meet at: {address!r}",
            given=f"{address!r}",
            expected='"tcp://HOST:PORT", the host of the source\'s lowest rank and a port that is free there',
            hint='"tcp://127.0.0.1:29700" for two jobs on one host',
        )
    return parts[1].strip("[]"), int(parts[2])


def _side(offer: Mapping[str, Any]) -> Side:
    layout = Layout(offer["dims"], offer["rank_order"], offer["views"], offer["merge"])
    return Side(layout, offer["job"], offer["torch"])


def _place(source: Side, target: Side, link_rank: int) -> tuple[SideName, int]:
    of_source = source.ranks
    if link_rank < len(of_source):
        return "source", of_source[link_rank]
    return "target", target.ranks[link_rank - len(of_source)]


class _Holder(NamedTuple):
    """Who has taken the key of a side: the number of a call of `meet`, and a process."""

    number: str
    process: str


@final
class _Presence:
    """What one call of `meet` announces, and the thread that shows that it lives.

    Keys, below the link's name: `side/SIDE` is the side's holder, `offer/NUMBER` its announcement, `beat/NUMBER` counts,
    `left/NUMBER` is set at its end, and `answer/A/B` is set by the call B, which has read the number A.
    """

    def __init__(self, store: Any, name: str, side: SideName) -> None:
        self._store, self._name, self._side = prefixed(f"meshcomm/link/{name}", store), name, side
        self.number = secrets.token_hex(8)
        self._held = f"{self.number} {process_name()}"
        self._answered = ""
        self._stop = threading.Event()
        beats = partial(prefixed(f"meshcomm/link/{name}", store.clone()).add, f"beat/{self.number}", 1)
        thread = threading.Thread(
            target=_beat, args=(beats, self._stop), name="meshcomm-presence", daemon=True
        )
        thread.start()
        await_at_exit(thread)
        self._process = os.getpid()
        atexit.register(self.end)

    def end(self) -> None:
        """Free the side's key. Calling it twice is harmless."""
        atexit.unregister(self.end)
        if not self._stop.is_set() and os.getpid() == self._process:
            self._stop.set()
            # The store may be stopped.
            with suppress(RuntimeError, TimeoutError):
                within(_LEAVES_S, partial(self._store.set, f"left/{self.number}", ""))

    def holder(self, side: SideName) -> _Holder | None:
        """Return the holder of a side's key, which may be dead; None if it has left or nobody has taken the key."""
        key = f"side/{side}"
        if not self._store.check([key]):
            return None
        number, _, process = self._store.get(key).decode().partition(" ")
        return None if self._store.check([f"left/{number}"]) else _Holder(number, process)

    def announce(self, offer: Mapping[str, Any]) -> None:
        """Take the key of this side. Raises LaunchError if another job has it."""
        self._store.set(f"offer/{self.number}", json.dumps(offer))
        key, first, since = f"side/{self._side}", ("", 0), 0.0
        while (held := self._store.compare_set(key, "", self._held).decode()) != self._held:
            number, _, process = held.partition(" ")
            beat, now = self._store.add(f"beat/{number}", 0), time.monotonic()
            if number != first[0]:
                first, since = (number, beat), now
            if (
                process == process_name()
                or is_running(process) is False
                or self._store.check([f"left/{number}"])
                or now - since > _SILENT_S
            ):
                self._store.compare_set(key, held, self._held)
            elif beat != first[1]:
                raise self._taken(process)
            time.sleep(_POLL_S)

    def refuse_loss(self) -> None:
        """Raise LaunchError if another job has taken the key of this side meanwhile."""
        held = self._store.get(f"side/{self._side}").decode()
        if held != self._held:
            raise self._taken(held.partition(" ")[2])

    def answered(self, other: SideName) -> tuple[str, dict[str, Any]] | None:
        """Answer the other side, if it has announced itself. Return its number and its announcement once it has answered."""
        holder = self.holder(other)
        if holder is None:
            return None
        number = holder.number
        if number != self._answered:
            self._store.set(f"answer/{number}/{self.number}", "")
            self._answered = number
        if not self._store.check([f"answer/{self.number}/{number}"]):
            return None
        offer: dict[str, Any] = json.loads(self._store.get(f"offer/{number}"))
        if offer["meshcomm"] != __version__:
            raise MeshMismatchError(
                f'the two sides of the link "{self._name}" have different versions of meshcomm',
                given=f"{self._side}: {__version__}; {other}: {offer['meshcomm']}",
                expected="the same version on both sides",
                hint="install the same version in both jobs",
                of_job=False,
            )
        return number, offer

    def _taken(self, process: str) -> LaunchError:
        return LaunchError(
            f'the link "{self._name}" has another {self._side} already',
            given=f"{process}; this is {process_name()}",
            expected="one source and one target for each name; a side is free once its link is closed, or its process ended",
            hint=f'another name, such as "{self._name}2"',
        )


def _beat(beats: Callable[[], object], stop: threading.Event) -> None:
    with suppress(RuntimeError):
        while not stop.is_set():
            beats()
            stop.wait(_BEAT_S)
