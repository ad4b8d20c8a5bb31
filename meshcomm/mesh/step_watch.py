"""Do the other ranks call in each step what this one does? Compared beside the program, through the store."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from meshcomm.comm.recorder import Recorder
from meshcomm.comm.step_verdict import difference, error_of, finding
from meshcomm.comm.store_wait import kind_of
from meshcomm.errors import CallMismatchError
from meshcomm.mesh.asking import Asking

# How often a rank says how far it is, where the world is small.
_EVERY_S: Final = 1.0
# What all ranks together may ask the store for steps, in a second.
_MOST_PER_S: Final = 10_000
# A store that is a file grows with everything that is said.
_FILE_EVERY_S: Final = 30.0
# How long a rank that leaves waits for what its neighbours have called.
_LEAVES_S: Final = 2.0
_PAUSE_S: Final = 0.01
# How long it is asked again which ranks differ, while some have not come as far.
_SETTLES_S: Final = 3.0


@final
class StepWatch:
    """Compares the steps of this rank with those of the next one on each of its groups.

    Each rank keeps one key: the last step that it noted, and for each group a digest of all its calls up
    to there. About once a second, where there was a step meanwhile, it writes that key and reads those of
    the next coord's rank along each group; as these close a ring, a difference is seen by somebody. Who
    sees one asks the group, finds the step, and tells everyone in it.

    Args:
        store: of the Watch. recorders: of the rank's groups; more may come.
        asking: asks and tells the others. status: of this rank.
        world_size: number of ranks that use the store so.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        recorders: Sequence[tuple[Recorder, float]],
        asking: Asking,
        status: Callable[[], dict[str, Any]],
        world_size: int,
    ) -> None:
        self.found: dict[str, Any] | None = None
        self._store = store
        self._rank = rank
        self._recorders = recorders
        self._asking = asking
        self._status = status
        self._world_size = world_size
        self._least_s = _FILE_EVERY_S if kind_of(store) == "FileStore" else _EVERY_S
        self._step = 0
        self._posted = 0
        self._due = 0.0
        self._raised = False
        self._inquiry: threading.Thread | None = None
        # By the next rank: its last word that this rank is not far enough for, and up to where it is compared.
        self._ahead: dict[int, dict[str, Any]] = {}
        self._compared: dict[int, int] = {}
        self._spoke: set[int] = set()
        # The answering thread and the last look of a rank that leaves.
        self._lock = threading.Lock()

    # -- the program's thread -------------------------------------------------------------------

    def noted(self, step: int) -> None:
        """All groups have noted `step`. Raises CallMismatchError once a difference has been found."""
        self._step = step
        if self.found is not None:
            raise self._error()

    def before_leaving(self) -> CallMismatchError | None:
        """A last comparison: the error, where there is one that this rank has not raised.

        Waits until the neighbours have come as far as this rank, two seconds at most.
        """
        if not self._step:
            return None
        looking = threading.Thread(target=self._last_look, name="meshcomm-steps", daemon=True)
        looking.start()
        # No longer than that, also where the store does not answer; but an inquiry is heard out.
        looking.join(_LEAVES_S)
        if self._inquiry is not None:
            self._inquiry.join(2 * _SETTLES_S)
        return None if self.found is None or self._raised else self._error()

    def cause(self, statuses: dict[int, Any]) -> CallMismatchError | None:
        """The error for a call that failed, where ranks had called differently in a step before.

        statuses: of the ranks that answered, by rank.
        """
        told = [status["differs"] for status in statuses.values() if status.get("differs") is not None]
        if self.found is None and told:
            self.found = told[0]
        for recorder, _ in list(self._recorders):
            if self.found is None:
                found = difference(recorder.label, recorder.ranks, statuses)
                self.found = None if found is None else finding(found, statuses)
        return None if self.found is None else self._error()

    def let_go(self, store: Any, asking: Asking) -> None:
        """Keep no connection to the store: the Watch is closed, and has these in their place."""
        self._store, self._asking = store, asking

    def _error(self) -> CallMismatchError:
        assert self.found is not None
        self._raised = True
        return error_of(self.found)

    # -- the answering thread -------------------------------------------------------------------

    def heard(self, said: bytes) -> bool:
        """What another rank wrote when it asked; whether it was a finding, so no question."""
        told = json.loads(said)
        if not isinstance(told, dict):
            return False
        self.found = self.found or told
        return True

    def look(self, now: float) -> None:
        """Say how far this rank is and compare with its neighbours, where that is due; now in seconds.

        Costs the store nothing while `mesh.step` is not called.
        """
        if now < self._due or not self._step or self.found is not None:
            return
        with self._lock:
            self._look_once()
        least_s = self._world_size * (1 + len(self._neighbours())) / _MOST_PER_S
        self._due = now + max(self._least_s, least_s)

    def _last_look(self) -> None:
        deadline = time.monotonic() + _LEAVES_S
        with contextlib.suppress(RuntimeError):
            while self.found is None and time.monotonic() < deadline:
                with self._lock:
                    if self._look_once():
                        break
                time.sleep(max(_PAUSE_S, self._world_size * len(self._neighbours()) / _MOST_PER_S))

    def _look_once(self) -> bool:
        """Whether there is nothing left to compare up to this rank's last step."""
        step = self._step
        neighbours = self._neighbours()
        if step > self._posted:
            sums = {recorder.label: recorder.steps.sums.get(step) for recorder, _ in list(self._recorders)}
            self._store.set(f"step/{self._rank}", json.dumps([step, sums]))
            self._posted = step
        through = True
        for peer, recorders in neighbours.items():
            if self._compared.get(peer, 0) < step:
                self._compare(peer, recorders, step)
                through = through and self._compared.get(peer, 0) >= step
        return through

    def _compare(self, peer: int, recorders: list[Recorder], step: int) -> None:
        said = self._ahead.get(peer) or self._read(peer)
        if said is None:
            return
        if said["step"] > step:
            # Compared when this rank has come as far, by what it said now.
            self._ahead[peer] = said
            return
        self._ahead.pop(peer, None)
        self._compared[peer] = said["step"]
        for recorder in recorders:
            mine, theirs = recorder.steps.sums.get(said["step"]), said["sums"].get(recorder.label)
            if mine is not None and theirs is not None and mine != theirs and self._inquiry is None:
                self._inquiry = threading.Thread(
                    target=self._inquire, args=(recorder,), name="meshcomm-differs", daemon=True
                )
                self._inquiry.start()

    def _read(self, peer: int) -> dict[str, Any] | None:
        key = f"step/{peer}"
        if peer not in self._spoke:
            # A get would wait for it.
            if not self._store.check([key]):
                return None
            self._spoke.add(peer)
        step, sums = json.loads(self._store.get(key))
        return {"step": step, "sums": sums}

    def _neighbours(self) -> dict[int, list[Recorder]]:
        """The next rank along each group, and the groups that it is the next one in."""
        found: dict[int, list[Recorder]] = {}
        for recorder, _ in list(self._recorders):
            place = recorder.ranks.index(self._rank)
            found.setdefault(recorder.ranks[(place + 1) % len(recorder.ranks)], []).append(recorder)
        return found

    # -- a difference ---------------------------------------------------------------------------

    def _inquire(self, recorder: Recorder) -> None:
        """Find out which ranks of the group differ since when, and tell them all."""
        others = [rank for rank in recorder.ranks if rank != self._rank]
        deadline = time.monotonic() + _SETTLES_S
        while True:
            statuses = {**(self._asking.ask(others) or {}), self._rank: self._status()}
            found = difference(recorder.label, recorder.ranks, statuses)
            whole = found is not None and len(found.odd) + len(found.usual) == len(recorder.ranks)
            if whole or self.found is not None or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if found is not None and self.found is None:
            told = finding(found, statuses)
            with contextlib.suppress(RuntimeError):
                self._asking.tell(others, json.dumps(told))
            # After the others have been told: who raises may take the connections with it.
            self.found = told
        elif found is None:
            self._inquiry = None
