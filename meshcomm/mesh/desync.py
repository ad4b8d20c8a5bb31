"""Compares the ranks' calls in each step through the job's store, in a background thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch.distributed as dist

from meshcomm.errors import CallMismatchError, MeshcommError, StoreError
from meshcomm.mesh.rank_record import RankRecord
from meshcomm.rendezvous.store import kind_of, within
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.steps import find_desync, last_common
from meshcomm.watching.verdict import error_of

# The interval in seconds at which a rank posts and compares in small worlds.
_PERIOD_S: Final = 1.0
# The limit on store operations per second for all ranks together.
_MOST_PER_S: Final = 2_000
# The interval for a file store, whose file grows with each post.
_FILE_PERIOD_S: Final = 30.0
# How long a leaving rank waits for its last steps to be compared.
_LEAVES_S: Final = 2.0
_PAUSE_S: Final = 0.01


def period_s(world_size: int) -> float:
    """Return how many seconds pass between two comparisons of a rank's steps. Each comparison takes three store operations."""
    return max(_PERIOD_S, 3 * world_size / _MOST_PER_S)


@final
class DesyncMonitor:
    """Posts the checksums of this rank's steps; the first rank of each group compares that group's checksums.

    Each period with a step takes two store operations per rank, a third if the rank's steps changed, and one multi_get
    per group. The last rank to leave deletes these keys under the mesh's prefix: `steps/RANK`, the checksums for the rank's
    groups; `calls/RANK`, see `StepHistory.data`; `desync`, the difference, which ends the comparison.

    found: the difference between ranks of the mesh, see `find_desync`; None while no difference is known.
    """

    def __init__(self, store: Any, record: RankRecord, world_size: int) -> None:
        self.found: dict[str, Any] | None = None
        self._store = store
        self._record = record
        self._world_size = world_size
        self._period_s = max(period_s(world_size), _FILE_PERIOD_S if kind_of(store) == "FileStore" else 0.0)
        self._due = 0.0
        self._step = 0
        self._raised = False
        # The last posts, by key. The last compared step of each group, by label, once all ranks of the group have posted.
        self._posted: dict[str, str] = {}
        self._compared: dict[str, int] = {}
        # The error for a value that no rank has written.
        self._refused: StoreError | None = None
        # Shared by the thread of `look` and the thread of a leaving rank.
        self._lock = threading.Lock()

    # -- the program's thread -------------------------------------------------------------------

    def noted(self, step: int) -> None:
        """Record that all groups have noted `step`. Raises CallMismatchError once a difference has been found, and
        StoreError once a value that no rank has written.
        """
        self._step = step
        if self._refused is not None:
            self._raised = True
            raise self._refused
        if self.found is not None:
            raise self._error(self.found)

    def before_leaving(self) -> MeshcommError | None:
        """Return the error from the last steps, if any. Wait at most two seconds for each group's other ranks."""
        if self._step and self.found is None:
            # Calls to a lost store may block for minutes.
            try:
                within(2 * _LEAVES_S, self._leave)
            except TimeoutError:
                pass
            except StoreError as error:
                self._refused = error
        if self._refused is not None and not self._raised:
            return self._refused
        return None if self.found is None or self._raised else self._error(self.found)

    def cause(self, statuses: Mapping[int, Any]) -> CallMismatchError | None:
        """Return the error for a failed call if the ranks made different calls in an earlier step.

        statuses: maps each rank that answered to its status; see RankRecord.data.
        """
        self.found = self.found or next((s["differs"] for s in statuses.values() if s.get("differs")), None)
        coords = {rank: status["coords"] for rank, status in statuses.items()}
        for recorder in list(self._record.recorders):
            # In the order of the group, which is the same on every rank.
            histories = {
                rank: group.get("steps")
                for rank in recorder.ranks
                if rank in statuses
                for group in statuses[rank]["groups"]
                if group["label"] == recorder.label
            }
            self.found = self.found or find_desync(recorder.label, histories, coords)
        return None if self.found is None else self._error(self.found)

    @property
    def linger_s(self) -> float:
        """How long a rank that knows of a difference keeps the store available for the other ranks."""
        return 0.0 if self.found is None else 1.25 * self._period_s

    def let_go(self) -> None:
        """Drop the connection to the store."""
        self._store = dist.HashStore()

    def _error(self, found: Mapping[str, Any]) -> CallMismatchError:
        self._raised = True
        return error_of(found)

    # -- other threads ----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Post and compare when due. `now` is a time in seconds. Takes no store operation before the first step."""
        if now >= self._due and self._step and self.found is None:
            self._due = now + self._period_s
            try:
                self._exchange()
            except StoreError as error:
                self._refused = error

    def _leave(self) -> None:
        deadline = time.monotonic() + _LEAVES_S
        with contextlib.suppress(RuntimeError):
            while not self._exchange(leaving=True) and time.monotonic() < deadline:
                time.sleep(max(_PAUSE_S, 3 * self._world_size / _MOST_PER_S))
            if self.found is None and self._store.add("left", 1) == self._world_size:
                ranks = range(self._world_size)
                for key in (*(f"{kind}/{rank}" for kind in ("steps", "calls") for rank in ranks), "left"):
                    self._store.delete_key(key)

    def _exchange(self, leaving: bool = False) -> bool:
        """Post and compare. Return whether everything up to this rank's last step has been compared."""
        with self._lock:
            step, through = self._step, True
            self._post()
            if self._store.check(["desync"]):
                self.found = json.loads(self._store.get("desync"))
                return True
            # Groups outside the mesh have no steps, because other threads may make calls there at their own pace.
            for recorder in [recorder for recorder in self._record.recorders if recorder.steps.step]:
                # A leaving rank does not know whether the first rank of its group has already compared the steps.
                first = recorder.ranks[0] == self._record.rank
                if first or leaving:
                    peers = recorder.ranks[1:] if first else recorder.ranks[:1]
                    through = self._compare_with(peers, recorder, step) and through
            return through

    def _post(self) -> None:
        histories = {recorder.label: recorder.steps.data() for recorder in list(self._record.recorders)}
        groups = {label: history for label, history in histories.items() if history is not None}
        sums = {label: history.pop("sums") for label, history in groups.items()}
        # Post the calls first, so that a rank that sees different checksums finds the calls.
        calls = json.dumps({"coords": self._record.coords, "groups": groups})
        for key, text in (("calls", calls), ("steps", json.dumps(sums))):
            if text != self._posted.get(key):
                self._store.set(f"{key}/{self._record.rank}", zlib.compress(text.encode()))
                self._posted[key] = text

    def _read(self, key: str, ranks: Sequence[int]) -> list[Any]:
        posted = self._store.multi_get([f"{key}/{rank}" for rank in ranks])
        return [json.loads(zlib.decompress(history)) for history in posted]

    def _compare_with(self, peers: Sequence[int], recorder: FlightRecorder, step: int) -> bool:
        """Compare the existing posts, and publish any difference. Return whether all posts reach `step`."""
        label = recorder.label
        if self._compared.get(label, 0) >= step:
            return True
        # A get would block until all ranks have posted.
        if label not in self._compared and not self._store.check(
            [f"steps/{rank}" for rank in recorder.ranks]
        ):
            return False
        mine, common = dict(recorder.steps.sums), []
        for peer, sums in zip(peers, self._read("steps", peers), strict=True):
            theirs = dict(sums.get(label, ()))
            common.append(last_common(mine, theirs))
            if common[-1] and mine[common[-1]] != theirs[common[-1]]:
                self._publish(recorder, peer)
                return True
        self._compared[label] = min(common)
        return self._compared[label] >= step

    def _publish(self, recorder: FlightRecorder, peer: int) -> None:
        """Find the step that differs, and publish the difference for all ranks of the mesh."""
        ranks, label = recorder.ranks, recorder.label
        calls = dict(zip(ranks, self._read("calls", ranks), strict=True))
        sums = dict(zip(ranks, self._read("steps", ranks), strict=True))
        coords = {rank: calls[rank]["coords"] for rank in ranks}
        histories = {
            rank: {**calls[rank]["groups"][label], "sums": sums[rank][label]}
            for rank in ranks
            if label in calls[rank]["groups"]
        }
        # If the other ranks are too far behind for a comparison, compare only these two ranks.
        two = {rank: histories[rank] for rank in ranks if rank in (self._record.rank, peer)}
        difference = find_desync(label, histories, coords) or find_desync(label, two, coords)
        if difference is not None:
            self.found = json.loads(self._store.compare_set("desync", "", json.dumps(difference)))
