"""What are the other ranks doing? Asked through the store, by one rank of a group whose call failed, and answered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

from meshcomm.mesh.torch_store import wait_for, within

T = TypeVar("T")

# How long a rank whose call failed waits for the others' answers.
_ANSWER_S: Final = 1.5

# It looks for them again and again. What a look takes beyond this is a busy machine's, on which the others are slow
# to answer too, and is not held against them; up to so many times the wait.
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.03
_LONGER: Final = 4


@final
class StatusQuery:
    """Asks ranks for their status, answers other ranks, and shares what follows from the statuses.

    Keys: `asked/RANK` counts the questions to a rank, `ask/RANK/N` is one, `answer/RANK/N` its answer, `closed/RANK`
    the last status of a rank; `first/CALL` which rank makes the diagnosis of a call, `diagnosis/CALL` what it found.

    Args:
        store: the watchdog's; every rank of the mesh looks at it each `look_s` seconds.
    """

    def __init__(self, store: Any, rank: int, look_s: float) -> None:
        self._store = store
        self._rank = rank
        self._within_s = max(_ANSWER_S, 2 * look_s)
        self._answered = 0

    def limited(self, call: Callable[[], T]) -> T:
        """What `call`, which uses this query, returns or raises; TimeoutError where the store does not answer.

        A store that is served by a stopped rank, or cannot be reached any more, holds its callers for minutes.
        """
        within(self._within_s, lambda: self._store.check(["asked"]))
        # In `shared`: until another rank has published, then for answers. Else the store has stopped since.
        return within(3 * _LONGER * self._within_s, call)

    def shared(self, call: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first rank that comes with this name of a call makes; it asks, and the others read what it found.

        Where that rank does not publish it in time, each makes its own. Raises RuntimeError where the store fails.
        """
        own, published = str(self._rank), f"diagnosis/{call}"
        if self._store.compare_set(f"first/{call}", "", own).decode() == own:
            found = make()
            self._store.set(published, json.dumps(found))
            return found
        # The first rank waits so long itself, longer on a busy machine.
        if wait_for(self._store, [published], _LONGER * self._within_s):
            read: dict[str, Any] = json.loads(self._store.get(published))
            return read
        return make()

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The statuses of those of `ranks` that answer in time. Raises RuntimeError where the store fails.

        A few operations of the store for each rank, however long it takes.
        """
        began = last = time.monotonic()
        answers = self._read({rank: f"closed/{rank}" for rank in ranks})
        asked = {rank: self._store.add(f"asked/{rank}", 1) for rank in ranks if rank not in answers}
        for rank, number in asked.items():
            self._store.set(f"ask/{rank}/{number}", str(self._rank))
        keys = {rank: f"answer/{rank}/{number}" for rank, number in asked.items()}
        waited_s = 0.0
        while keys and waited_s < self._within_s and last - began < _LONGER * self._within_s:
            if self._store.check(list(keys.values())):
                break
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            waited_s += min(now - last, _LOOK_S)
            last = now
        answers |= self._read(keys)
        return answers | self._read({rank: f"closed/{rank}" for rank in keys if rank not in answers})

    def answer(self, status: Callable[[], Mapping[str, Any]]) -> bool:
        """Answer the questions that have arrived; whether there were any. Raises RuntimeError where the store fails."""
        before = self._answered
        while self._store.check([f"ask/{self._rank}/{self._answered + 1}"]):
            self._answered += 1
            self._store.set(f"answer/{self._rank}/{self._answered}", json.dumps(status()))
        return self._answered > before

    def leave(self, status: Mapping[str, Any]) -> None:
        """The rank answers no more: its last status is for all questions."""
        self._store.set(f"closed/{self._rank}", json.dumps(status))

    def _read(self, keys: dict[int, str]) -> dict[int, Any]:
        """The values of those keys that are there."""
        return {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }
