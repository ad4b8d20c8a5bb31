"""Two jobs meet at an address, and open a link over the ranks of a mesh of each."""

from __future__ import annotations

import hmac
import json
import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.comm.checks import seconds_of
from meshcomm.errors import (
    CommunicationError,
    LaunchError,
    MeshcommError,
    MeshMismatchError,
    StoreError,
    TransferFailed,
    TransferTimeout,
)
from meshcomm.layout import Layout
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.across import across, refuse_simulated
from meshcomm.predict.links import nodes_of
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.exposure import ExposedRendezvous, is_loopback
from meshcomm.rendezvous.job_store import NOBODY, find_common_store, is_serving
from meshcomm.rendezvous.processes import process_name, process_of_rank
from meshcomm.rendezvous.signed import SignedStore, unsigned
from meshcomm.rendezvous.store import GRACE_S, Limited, prefixed, store_failed
from meshcomm.transfer.plan import Ends
from meshcomm.transfer.presence import POLL_S, Job, Presence, secrets_differ
from meshcomm.transfer.sides import BOTH, Host, SideName, Sides
from meshcomm.watching.exceptions import first_line

_OTHER: Final[Mapping[SideName, SideName]] = {"source": "target", "target": "source"}
_ADDRESS: Final = re.compile(r"tcp://(.+):(\d+)")

# How much longer than the announcing rank the other ranks of its side wait for its result.
_GRACE_S: Final = 5.0
# How often it looks who waits for other links, and how many of these it names.
_LOOKS_S: Final = 1.0
_MOST: Final = 20
# The errors that the announcing rank passes on to its side.
_KINDS: Final = {
    kind.__name__: kind
    for kind in (LaunchError, MeshMismatchError, StoreError, TransferFailed, TransferTimeout)
}
# Who serves a store for links: the name of the link that it was first needed for, its side and rank, and its process.
_HOST: Final = "meshcomm/link-host"


def meet(
    side: SideName,
    mesh: Mesh,
    name: str,
    address: str,
    timeout_s: float,
    *,
    secret: str | None = None,
) -> Sides:
    """Meet the other side of the link `name`, and open a mesh over the ranks of the source and then those of the target.

    address:   "tcp://HOST:PORT". If no program listens there, the process of the source's lowest rank serves a TCPStore until it
               exits. Several links may share an address.
    timeout_s: seconds to wait for the other side, then for all ranks of both sides, and the timeout of each call on the link.
    secret:    a text that both jobs know; None or "" for none. If given, the values in the store are signed with it: a TCPStore has no
               authentication. Nothing that is read from it is ever unpickled.
    Called by: every rank of `mesh`, and every rank of the other side's mesh, in any order.
    Raises:    TransferTimeout, with the side or its ranks that did not come, on every rank that has come; LaunchError on a
               newcomer whose side of this name belongs to another job, or if the store cannot be served; TransferFailed if a
               process is lost meanwhile, such as the one that serves the store; MeshMismatchError, also for secrets that differ;
               StoreError if the own job's store is lost, and with it the job; NotMember.

    How the living are told from the dead. The first rank that comes announces its side under a random number that no other
    call has, and takes the side's key in the store. An announcement alone proves nothing: two sides have met only when each has
    answered the number of the other one, which is possible only after having read it. So what a dead job has left is never
    answered, and a job that meets again, after a loss or a restart, has another number. The numbers of both calls name the
    link's keys and groups, so that nothing of an earlier link is read.

    The key of a side belongs to a job from its call until its link is closed. The process that took it counts up a number
    twice a second. A newcomer of another job takes the key if this process has closed its link, has ended on this host, or has not
    counted for five seconds. Otherwise the newcomer is refused. A newcomer of the same job takes it at once, as the former link is
    over for this job, even if some of its ranks have not noticed yet.

    The ranks of a side may call at different times, and some more often than others, as their attempts fail. A rank takes part in
    the latest meeting that any rank of its side has begun, or begins the next one if it has taken part in it. What the ranks of a
    meeting learn, an error included, is told to those that come to it later.
    """
    refuse_simulated(name)
    mesh._state.usable()
    timeout_s = seconds_of(timeout_s, lambda: f"meet on {mesh.label}")
    secret = "" if secret is None else secret
    _check_texts(name=name, secret=secret)
    host, port = _parsed(address)
    call = _Call.begun(side, mesh, name, address, timeout_s)
    presence: Presence | None = None
    served: list[Any] | None = None
    try:
        try:
            store: Any = call.store(host, port)
            served = _served(Limited(store, call.limit_s))
            if secret:
                store = SignedStore(store, secret)
            signs = hmac.digest(secret.encode(), name.encode(), "sha256").hex()
            if call.leads():
                presence = Presence(store, name, side, call.job, call.limit_s)
                call.tell({**call.pair(presence), "signs": signs})
        except RuntimeError as error:
            raise call.failed(error, served) from error
        met = call.result()
        if met["signs"] != signs:
            raise secrets_differ(name, f"among the ranks of the {side}")
        layouts = {of: Layout(**met[of]) for of in BOTH}
        places = [(of, rank) for of in BOTH for rank in sorted(layouts[of].ranks.tolist())]
        with suppress(RuntimeError):
            served = _served(Limited(unsigned(store), call.limit_s)) or served
        try:
            link = call.open(store, met["link"], places)
        except (CommunicationError, StoreError) as error:
            if isinstance(error, TransferTimeout):
                raise
            raise call.failed(error, served, places) from error
    except BaseException as error:
        if presence is not None:
            presence.end()
        if isinstance(error, MeshcommError):
            call.tell({"kind": type(error).__name__, **vars(error)})
        raise
    if presence is not None:
        link._state.held.resources.callback(presence.end)
        presence.tidy()
        call.tidy()
    if is_serving(port) and link._state.launch.one_host and not is_loopback(host):
        warnings.warn(
            f"others can reach the store of the link {name} at {host}:{port}, though both jobs are on this host: "
            "tcp://127.0.0.1:PORT, or a secret",
            ExposedRendezvous,
            stacklevel=2,
        )
    numbers = {place: number for number, place in enumerate(places)}
    of_source, of_target = (
        np.array([numbers[of, rank] for rank in layouts[of].ranks.tolist()]) for of in BOTH
    )
    nodes = nodes_of(link.topology, np.arange(link.world_size))
    ends = Ends(layouts["source"], layouts["target"], of_source, of_target, nodes)
    own = {side: mesh}
    return Sides(link, ends, own.get("source"), own.get("target"), host=_host(link, places, name, served))


@dataclass(frozen=True)
class _Call:
    """The arguments of `meet`.

    every: the store of the own job, under a prefix of the link and side. number: of the meeting, among those that ranks of this side
    have begun. job: as in Presence.
    """

    side: SideName
    mesh: Mesh
    name: str
    address: str
    timeout_s: float
    deadline: float
    every: Limited
    number: int
    job: Job

    @classmethod
    def begun(cls, side: SideName, mesh: Mesh, name: str, address: str, timeout_s: float) -> _Call:
        """Return the call of this rank, which takes part in the latest meeting of its side, or begins the next one."""
        deadline, rank, held = time.monotonic() + timeout_s, mesh.rank, mesh._state.held
        limit_s = partial(_limit_s, deadline)
        every = Limited(prefixed(f"links/{side}/{name}", held.store), limit_s)
        of_job = Limited(_of_job(mesh), limit_s)
        try:
            last = every.add(f"joined/{rank}", 0)
            # Of a key that is not set, an empty value is expected.
            number = int(every.compare_set("latest", str(last) if last else "", str(last + 1)))
            every.add(f"joined/{rank}", number - last)
            # Counted before this rank may announce the meeting, so that those that begin a later one have a greater number.
            order = of_job.add(keys.LINKED, 1)
            named = of_job.compare_set(keys.LINKS, "", secrets.token_hex(8)).decode()
        except RuntimeError as error:
            raise _lost(mesh, name, error) from error
        job = Job(f"{named}.{mesh.layout.ranks.min()}", order)
        return cls(side, mesh, name, address, timeout_s, deadline, every, number, job)

    @property
    def own(self) -> Limited:
        """The store of the own job, under a prefix that only the ranks of this meeting use."""
        return self.every.prefixed(str(self.number))

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def limit_s(self) -> float:
        """Return how long a store may take to answer."""
        return _limit_s(self.deadline)

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
        try:
            return bool(self.own.check(["met"]))
        except RuntimeError as error:
            raise _lost(self.mesh, self.name, error) from error

    def tidy(self) -> None:
        """Remove what earlier calls have told. Called by: the rank that announced this side, once all ranks have met."""
        number = self.number - 1
        with suppress(RuntimeError):
            while number and self.every.delete_key(f"{number}/met"):
                self.every.delete_key(f"{number}/leads")
                number -= 1

    def failed(
        self,
        error: BaseException,
        served: Sequence[Any] | None,
        places: Sequence[tuple[SideName, int]] = (),
    ) -> TransferFailed:
        """Return the error if ranks or the store were lost while the link opened. places: as in `open`."""
        missing = [places[at] for at in getattr(error, "missing", ()) if at < len(places)]
        who = ", ".join(f"rank {rank} of the {side}" for side, rank in missing)
        if not missing and isinstance(error, CommunicationError):
            who = "a rank"
        elif not missing:
            who = f"{_who(served)}, which serves its store,"
            missing = [(served[1], served[2])] if served and served[0] == self.name else []
        return TransferFailed(
            f'the link "{self.name}" was not opened: {who} was lost',
            given=f"{self.address}: {first_line(error)}",
            expected="every rank, and the process that serves the store, to stay alive while a link opens",
            hint="link.reopen(), or meshcomm.link again, on both sides",
            missing=tuple(missing),
        )

    def store(self, host: str, port: int) -> dist.TCPStore:
        """Return a client of the store at the address, which this process may have to serve."""
        lowest = int(self.mesh.layout.ranks.min())
        serves = self.side == "source" and self.mesh.rank == lowest
        job, timeout = self.mesh._state.launch.job, timedelta(seconds=self.timeout_s)
        try:
            store = find_common_store(host, port, job, timeout, serves=serves, in_vain=self.is_told)
        except TimeoutError as error:
            if self.is_told():
                self.result()
            which = (
                f"its rank {lowest}, which serves the store," if self.side == "source" else "its lowest rank"
            )
            nobody = str(error) == NOBODY
            raise TransferTimeout(
                f'the source of the link "{self.name}" has not come'
                if nobody
                else f'the store of the link "{self.name}" cannot be reached at {self.address}: {error}',
                given=f"{self.address}: {error}, for {self.timeout_s:g} s",
                expected=f"{which} to serve a store there",
                hint="check whether the source runs, whether both sides have the same address, and that only one is the target"
                if nobody
                else "another port, or the address of a host that both sides reach",
                side="source",
                missing=(lowest,) if self.side == "source" else (),
                of_job=False,
            ) from None
        if is_serving(port):
            Limited(store, self.limit_s).compare_set(
                _HOST, "", json.dumps([self.name, self.side, self.mesh.rank, process_name()])
            )
        return store

    def pair(self, presence: Presence) -> dict[str, Any]:
        """Announce this side, and wait for the other one. Return what the ranks of this side have to know."""
        layout, other = self.mesh.layout, _OTHER[self.side]
        order = layout.rank_order
        mine = {
            "dims": dict(layout.dims),
            "rank_order": None if order is None else list(order),
            "views": {view: dict(sizes) for view, sizes in layout.views.items()},
            "merge": {merged: list(parts) for merged, parts in layout.merge.items()},
        }
        presence.announce({"meshcomm": __version__, "layout": mine})
        others, looks = list[str](), time.monotonic()
        while (theirs := presence.answered(other)) is None:
            if time.monotonic() > self.deadline:
                raise self._alone(presence, other, others)
            if self.is_told():
                return {}
            presence.refuse_loss()
            # At the end, they may have left, too.
            if time.monotonic() > looks:
                others, looks = presence.others(), looks + _LOOKS_S
            time.sleep(POLL_S)
        number, offer = theirs
        numbers = (presence.number, number) if self.side == "source" else (number, presence.number)
        return {"link": f"{self.name}/{'.'.join(numbers)}", self.side: mine, other: offer}

    def _alone(self, presence: Presence, other: SideName, others: Sequence[str]) -> TransferTimeout:
        left, rival = presence.holder(other), presence.rival()
        announced = f"\n{left.process} has announced it, but does not answer" if left else ""
        announced += f"\n{rival} has announced the {self.side} as well, and was refused" if rival else ""
        announced += "".join(f"\n{line}" for line in others[:_MOST])
        hint = f"check whether the {other} runs; after a loss, both sides have to link again"
        if others:
            hint = (
                f"check whether the {other} runs; of several links, open them in the same order in both jobs"
            )
        return TransferTimeout(
            f'the {other} of the link "{self.name}" has not come',
            given=f"{self.address}: no answer for {self.timeout_s:g} s{announced}",
            expected=f'the {other} to call meshcomm.link with the name "{self.name}" and this address',
            hint=hint,
            side=other,
            of_job=False,
        )

    def result(self) -> dict[str, Any]:
        """Return what the announcing rank has learnt. Raises the error that it has got."""
        try:
            if not self.own.wait_for(["met"], self.left_s + _GRACE_S):
                leads = int(self.own.compare_set("leads", "", ""))
                raise TransferTimeout(
                    f'rank {leads} of the {self.side} of the link "{self.name}" has not come back',
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
            for key in {"missing", "mismatched_ranks"} & met.keys():
                met[key] = tuple(tuple(rank) if isinstance(rank, list) else rank for rank in met[key])
            raise _KINDS.get(kind, MeshcommError)(**met)
        return met

    def open(self, store: Any, link: str, places: Sequence[tuple[SideName, int]]) -> Mesh:
        """Open the link's mesh. places: the side and the rank there of each of its ranks. Raises TransferTimeout if ranks do not
        come.
        """
        rank, backend = places.index((self.side, self.mesh.rank)), self.mesh.plan.defaults.backend
        try:
            return across(
                store, link, rank, len(places), self.timeout_s, device=self.mesh.device, backend=backend
            )
        except MeshMismatchError as error:
            size = sum(of == "source" for of, _ in places)
            error.given = f"{error.given}\nranks 0-{size - 1} are the source, the others the target"
            if not error.missing:
                raise
            self._incomplete(error, places)

    def _incomplete(self, error: MeshMismatchError, places: Sequence[tuple[SideName, int]]) -> NoReturn:
        missing = {of: [rank for at in error.missing for on, rank in [places[at]] if on == of] for of in BOTH}
        whole = {of: sum(on == of for on, _ in places) for of in BOTH}
        texts = [
            f"the {of}" if len(ranks) == whole[of] else f"{ranks_text(ranks)} of the {of}"
            for of, ranks in missing.items()
            if ranks
        ]
        side = next(of for of, ranks in missing.items() if ranks)
        raise TransferTimeout(
            f'{" and ".join(texts)} did not come to the link "{self.name}"',
            given=error.given,
            expected=f"every rank of both meshes within {self.timeout_s:g} s",
            hint="look at the first error on these ranks",
            side=side,
            missing=() if len(missing[side]) == whole[side] else tuple(missing[side]),
            of_job=False,
        ) from None


def _limit_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0) + GRACE_S


def _of_job(mesh: Mesh) -> Any:
    """Return the store of the mesh's job, of all its meshes and generations."""
    store, prefixes = unsigned(mesh._state.held.store), 1 + bool(mesh.elastic.generation.number)
    for _ in range(prefixes):
        store = store.underlying_store if isinstance(store, dist.PrefixStore) else store
    return store


def _lost(mesh: Mesh, name: str, error: BaseException) -> StoreError:
    return store_failed(f'{mesh.label} lost the job\'s store in the link "{name}"', error)


def _served(store: Any) -> list[Any] | None:
    """Return who serves the store of a link, as in `_HOST`; None if no link's process does."""
    return json.loads(store.get(_HOST)) if store.check([_HOST]) else None


def _who(served: Sequence[Any] | None) -> str:
    return (
        f'rank {served[2]} of the {served[1]} of the link "{served[0]}"'
        if served
        else "a program outside the link"
    )


def _host(
    link: Mesh, places: Sequence[tuple[SideName, int]], name: str, served: Sequence[Any] | None
) -> Host:
    place = (served[1], served[2]) if served and served[0] == name else None
    number = places.index(place) if place in places else None
    with suppress(RuntimeError):
        held = Limited(link._state.held.store, lambda: GRACE_S)
        if served and number is not None and process_of_rank(held, number) != served[3]:
            number = None  # a process of the same rank that came before
    return Host(_who(served), number)


def _check_texts(**texts: object) -> None:
    for key, text in texts.items():
        if not isinstance(text, str) or (key == "name" and not text):
            raise LaunchError(
                "a link without a name" if text == "" else f"the {key} of a link is not a text",
                # Not the value: it may be a secret.
                given=f"{key}: {type(text).__name__}",
                expected="a text that both jobs know",
                hint=f'{key}="policy"' if key == "name" else "secret=None for none",
            )


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
