"""Whether a version counts: decided once for each copy of the target, in a store, so that all ranks of the copy do the same.

A rank of the target that has every byte votes. The last vote of a copy commits the version. A rank that fails, or that waits too
long for the others, aborts it. Whichever comes first counts. No group takes part, so neither side's own groups can break, and a
rank whose peers are lost still learns what was decided. A rank that cannot reach the store does not know, and refuses its weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np

from meshcomm.errors import MeshcommError, RankLost, StoreTimeout
from meshcomm.transfer.sides import Cause, Sides

_COMMIT: Final = b"commit"
# How often a rank that waits for others looks whether they live.
_LOOK_S: Final = 1.0
_LOOKS_PER_S: Final = 128


@final
class Decisions:
    """The decisions about the versions of one model.

    token: a name that all ranks of the link know, and no other link has.
    copies: the number of the copy of each position on the target.
    """

    def __init__(self, sides: Sides, token: str, copies: Any, timeout_s: float) -> None:
        self._sides, self._token, self._timeout_s = sides, token, timeout_s
        self._number = 0
        self._link = sides.mesh.store
        self._position = sides.position("target")
        self._size = len(copies)
        self._own: Any = None
        if sides.target is not None and self._position is not None:
            # The target's own store outlives the source.
            self._own = sides.target.store
            self._copy = int(copies[self._position])
            self._members = np.flatnonzero(copies == self._copy).tolist()

    def _key(self, what: str, number: int | None = None) -> str:
        return f"transfer/{self._token}/{self._number if number is None else number}/{what}"

    def begin(self) -> None:
        """Begin with the next version."""
        self._number += 1

    def undo(self) -> None:
        """Take `begin` back, because some ranks made another call and have not begun."""
        self._number -= 1

    def tidy(self) -> None:
        """Remove what was stored about the last version. Called by: every rank of the link, once all have begun the next one."""
        last = self._number - 1
        if self._position is None or not last:
            return
        of_copy = [f"{self._copy}/voted/{self._position}"]
        of_link = [f"done/{self._position}", f"problem/{self._position}"]
        if self._position == self._members[0]:
            of_copy += [f"{self._copy}/{what}" for what in ("votes", "decision", "written")]
        if self._position == 0:
            of_link += ["reports", "problems", "outcome"]
        for store, names in ((self._own, of_copy), (self._link, of_link)):
            for name in names:
                store.delete_key(self._key(name, last))

    def write(self) -> Cause | None:
        """Tell the copy that this rank overwrites its weights; return None, or why it must not any more."""
        return _cause(self._own.compare_set(self._key(f"{self._copy}/written"), "", _COMMIT))

    def vote(self) -> Cause | None:
        """Tell the copy that this rank has every byte; return None if the copy's ranks use the version, or why not.

        Raises MeshcommError if it remains unknown.
        """
        decision = self._key(f"{self._copy}/decision")
        votes = self._key(f"{self._copy}/votes")
        count = self._own.add(votes, 1)
        # Set last: a rank that is lost in between is one that others miss.
        self._own.set(self._key(f"{self._copy}/voted/{self._position}"), "")
        if count == len(self._members):
            return self._decide(_COMMIT)
        cause = self._wait(self._own, decision, f"{self._copy}/voted", self._members, limited=True)
        # If all have voted, the last of them is lost, but has every byte.
        return self._decide(_COMMIT if cause is None else cause)

    def abort(self, cause: Cause) -> tuple[Cause, bool]:
        """Record that the version is not used, before this rank has voted.

        Return the first cause that a rank has recorded, and whether ranks of this copy may have overwritten their weights.
        """
        is_written = self._own is not None
        with suppress(MeshcommError):
            if self._own is not None:
                written = self._key(f"{self._copy}/written")
                is_written = self._own.compare_set(written, "", _text(cause)) == _COMMIT
                self._decide(cause)
            return self._outcome(cause) or cause, is_written
        return cause, is_written

    def report(self, problem: str) -> None:
        """Tell all ranks of the link that this rank of the target uses the version. problem: what failed afterwards, or ""."""
        if problem:
            self._link.set(self._key(f"problem/{self._position}"), problem)
            self._link.add(self._key("problems"), 1)
        count = self._link.add(self._key("reports"), 1)
        self._link.set(self._key(f"done/{self._position}"), "")
        if count == self._size:
            self._outcome(_COMMIT)

    def outcome(self) -> tuple[Cause | None, str]:
        """Wait until every rank of the target has reported; return why not all use the version, and what failed afterwards.

        As long as the others live, however long their `on_commit` takes.
        """
        key = self._key("outcome")
        cause = self._outcome(
            self._wait(self._link, key, "done", range(self._size), limited=False) or _COMMIT
        )
        if cause is not None or self._link.add(self._key("problems"), 0) == 0:
            return cause, ""
        keys = [self._key(f"problem/{at}") for at in range(self._size)]
        return None, "\n".join(self._link.get(key).decode() for key in keys if self._link.check([key]))

    def confirmed(self) -> list[int]:
        """Return the coords along the link of the target's ranks that have reported, as far as the store tells."""
        numbers = self._sides.numbers("target")
        with suppress(MeshcommError):
            absent = {*self._without(self._link, "done", range(self._size))}
            return [int(numbers[at]) for at in range(self._size) if at not in absent]
        return []

    def _wait(self, store: Any, key: str, said: str, positions: Sequence[int], limited: bool) -> Cause | None:
        """Wait until a key is set, or until ranks of the target that have not said so are lost or, if `limited`, late.

        Return the cause that blames them; None if there are none.
        """
        mesh, numbers = self._sides.mesh, self._sides.numbers("target")
        watch, limit_s = mesh._state.watch, self._timeout_s
        timed = watch is not None and watch.timed
        look_s = min(max(_LOOK_S, mesh.world_size / _LOOKS_PER_S), limit_s) if timed else limit_s
        began, told_s = time.monotonic(), limit_s
        while True:
            try:
                store.wait([key], look_s)
            except RankLost as lost:
                return self._sides.lost(lost.missing)
            except StoreTimeout:
                pass
            if store.check([key]) or not (absent := self._without(store, said, positions)):
                return None
            ranks = {int(mesh.layout.ranks.flat[numbers[at]]): at for at in absent}
            gone = [] if watch is None else watch.gone([*ranks])
            # One that has said so may have ended since.
            if lost_ones := self._without(store, said, [ranks[rank] for rank in gone]):
                return self._sides.blame(numbers[lost_ones].tolist(), "was lost")
            if timed and (waited_s := time.monotonic() - began) < told_s:
                continue
            if limited or not timed:
                return self._sides.blame(numbers[absent].tolist(), f"did not confirm it within {limit_s:g} s")
            told_s *= 2
            who = self._sides.ranks(numbers[absent].tolist())
            sys.stderr.write(f"meshcomm: on_commit has not returned for {waited_s:.0f} s, on {who}\n")

    def _without(self, store: Any, what: str, positions: Any) -> list[int]:
        return [at for at in positions if not store.check([self._key(f"{what}/{at}")])]

    def _decide(self, value: Cause | bytes) -> Cause | None:
        decided = self._own.compare_set(self._key(f"{self._copy}/decision"), "", _text(value))
        cause = _cause(decided)
        if cause is not None:
            with suppress(MeshcommError):
                self._outcome(cause)
        return cause

    def _outcome(self, value: Cause | bytes) -> Cause | None:
        return _cause(self._link.compare_set(self._key("outcome"), "", _text(value)))


def _text(value: Cause | bytes) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def _cause(text: bytes) -> Cause | None:
    if text == _COMMIT:
        return None
    what, missing = json.loads(text)
    return Cause(what, tuple(missing))
