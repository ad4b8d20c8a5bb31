"""What one call of `meet` announces at a link's address, and how others see that it lives."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, final

from meshcomm import __version__
from meshcomm.errors import LaunchError, MeshMismatchError, StoreError, TransferFailed
from meshcomm.rendezvous.processes import is_running, process_name
from meshcomm.rendezvous.signed import unsigned
from meshcomm.rendezvous.store import Limited, prefixed, within
from meshcomm.transfer.sides import BOTH, SideName
from meshcomm.transport.torch_private import await_at_exit

_PREFIX: Final = "meshcomm/link/{}"
_NAMES: Final = "meshcomm/links"
# How often the rank that announces a side shows that it lives, and how long another job waits for such a sign.
_BEAT_S: Final = 0.5
_SILENT_S: Final = 5.0
POLL_S: Final = 0.02
# How long a store that may be lost is told that a link has closed.
_LEAVES_S: Final = 2.0


class Job(NamedTuple):
    """Whose a call of `meet` is.

    name: of its job and its mesh's ranks, which no other job has. order: greater for each later meeting of this job.
    """

    name: str
    order: int


class Holder(NamedTuple):
    """Who has taken the key of a side: the number of a call of `meet`, its job, and a process."""

    number: str
    job: Job
    process: str

    def __str__(self) -> str:
        return f"{self.number} {self.job.name} {self.job.order} {self.process}"

    @classmethod
    def of(cls, text: str) -> Holder:
        # Any program can write to the store.
        number, name, order, process = (*text.split(" ", 3), "", "", "")[:4]
        return cls(number, Job(name, int(order) if order.isdecimal() else 0), process)


@final
class Presence:
    """What one call of `meet` announces, and the thread that shows that it lives.

    Keys, below the link's name: `side/SIDE` is the side's holder, `offer/NUMBER` its announcement, `beat/NUMBER` counts,
    `left/NUMBER` is set at its end, `answer/A/B` is set by the call B, which has read the number A, and `rival/NUMBER` names a
    process that was refused. `waits/NUMBER` is set until the link is open. Only the announcements are signed, so that two sides learn
    that their secrets differ. `_NAMES` lists the links that were ever announced in this store.

    limit_s: returns the seconds within which the store has to answer.
    """

    def __init__(self, store: Any, name: str, side: SideName, job: Job, limit_s: Callable[[], float]) -> None:
        prefix, plain = _PREFIX.format(name), unsigned(store)
        self._plain, self._all = prefixed(prefix, plain), Limited(plain, limit_s)
        self._store, self._offers = self._all.prefixed(prefix), Limited(prefixed(prefix, store), limit_s)
        self._name, self._side, self._job = name, side, job
        self.number = secrets.token_hex(8)
        self._held = str(Holder(self.number, job, process_name()))
        self._answered = self._replaced = ""
        self._stop = threading.Event()
        beats = partial(prefixed(prefix, plain.clone()).add, f"beat/{self.number}", 1)
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
                within(_LEAVES_S, partial(self._plain.set, f"left/{self.number}", ""))

    def holder(self, side: SideName) -> Holder | None:
        """Return the holder of a side's key, which may be dead; None if it has left or nobody has taken the key."""
        return _holder(self._store, side)

    def announce(self, offer: Mapping[str, Any]) -> None:
        """Take the key of this side. Raises LaunchError if another job has it, TransferFailed if a later meeting of this job has.

        An earlier meeting of this job is over: one of its ranks has called again.
        """
        self._offers.set(f"offer/{self.number}", json.dumps(offer))
        self._store.set(f"waits/{self.number}", "")
        names = ""
        while self._name not in (listed := json.loads(names or "[]")):
            names = self._all.compare_set(_NAMES, names, json.dumps([*listed, self._name])).decode()
        key, first, since = f"side/{self._side}", ("", 0), 0.0
        while (held := self._store.compare_set(key, "", self._held).decode()) != self._held:
            number, job, process = Holder.of(held)
            self._refuse_later(job)
            beat, now = self._store.add(f"beat/{number}", 0), time.monotonic()
            if number != first[0]:
                first, since = (number, beat), now
            if (
                job.name == self._job.name
                or process == process_name()
                or is_running(process) is False
                or self._store.check([f"left/{number}"])
                or now - since > _SILENT_S
            ):
                self._replaced = number
                self._store.compare_set(key, held, self._held)
            elif beat != first[1]:
                self._store.set(f"rival/{number}", process_name())
                raise self._taken(process)
            time.sleep(POLL_S)

    def refuse_loss(self) -> None:
        """Raise an error, as `announce`, if the key of this side was taken meanwhile."""
        number, job, process = Holder.of(self._store.get(f"side/{self._side}").decode())
        self._refuse_later(job)
        if number != self.number:
            raise self._taken(process)

    def _refuse_later(self, job: Job) -> None:
        if job.name == self._job.name and job.order > self._job.order:
            raise TransferFailed(
                f'a rank of the {self._side} has left this meeting of the link "{self._name}", and called again',
                given=f"call {job.order} of this job in place of call {self._job.order}",
                expected="every rank of a side to wait for the link together",
                hint="link.reopen(), or meshcomm.link again, on every rank of this side",
            )

    def rival(self) -> str:
        """Return the process of another job that announced the same side and was refused, or ""."""
        key = f"rival/{self.number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def others(self) -> list[str]:
        """Return who waits in this store for other links, as lines of text."""
        lines = []
        for name in json.loads(self._all.get(_NAMES)):
            store = self._all.prefixed(_PREFIX.format(name))
            for side in BOTH if name != self._name else ():
                holder = _holder(store, side)
                waits = holder is not None and store.check([f"waits/{holder.number}"])
                if holder is not None and waits and is_running(holder.process) is not False:
                    lines.append(f'{holder.process} waits as the {side} of the link "{name}"')
        return lines

    def tidy(self) -> None:
        """Remove what nobody reads any more, once the link is open: of this call and of the one that had the key before."""
        keys = [f"answer/{self._answered}/{self.number}", f"waits/{self.number}"]
        if self._replaced:
            keys += [f"{what}/{self._replaced}" for what in ("offer", "beat", "left", "rival", "waits")]
        with suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def answered(self, other: SideName) -> tuple[str, dict[str, Any]] | None:
        """Answer the other side, if it has announced itself. Return its number and its layout once it has answered."""
        holder = self.holder(other)
        if holder is None:
            return None
        number = holder.number
        if number != self._answered:
            self._store.set(f"answer/{number}/{self.number}", "")
            self._answered = number
        if not self._store.check([f"answer/{self.number}/{number}"]):
            return None
        try:
            offer: dict[str, Any] = json.loads(self._offers.get(f"offer/{number}"))
        except (StoreError, ValueError) as error:
            raise secrets_differ(self._name, "between the two sides") from error
        if offer["meshcomm"] != __version__:
            raise MeshMismatchError(
                f'the two sides of the link "{self._name}" have different versions of meshcomm',
                given=f"{self._side}: {__version__}; {other}: {offer['meshcomm']}",
                expected="the same version on both sides",
                hint="install the same version in both jobs",
                of_job=False,
            )
        return number, offer["layout"]

    def _taken(self, process: str) -> LaunchError:
        return LaunchError(
            f'the link "{self._name}" has another {self._side} already',
            given=f"{process}; this is {process_name()}",
            expected="one source and one target for each name; a side is free once its link is closed, or its process ended",
            hint=f'another name, such as "{self._name}2"',
        )


def _holder(store: Any, side: SideName) -> Holder | None:
    """See `Presence.holder`. store: under the prefix of a link."""
    key = f"side/{side}"
    if not store.check([key]):
        return None
    holder = Holder.of(store.get(key).decode())
    return None if store.check([f"left/{holder.number}"]) else holder


def _beat(beats: Callable[[], object], stop: threading.Event) -> None:
    with suppress(RuntimeError):
        while not stop.is_set():
            beats()
            stop.wait(_BEAT_S)


def secrets_differ(name: str, where: str) -> MeshMismatchError:
    return MeshMismatchError(
        f'secret= differs {where} of the link "{name}"',
        given="values with another signature, or with one on one side only",
        expected="the same secret= in meshcomm.link on every rank of both sides, or none",
        hint="compare where both jobs take it from",
        of_job=False,
    )
