"""What are the other ranks doing? Asked through the store, by one rank of a group whose call failed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final

T = TypeVar("T")

# How long a rank whose call failed waits for the others' answers.
_ANSWER_S: Final = 1.5

# It looks for them again and again. What a look takes beyond this is a busy machine's, on which the others are slow
# to answer too, and is not held against them; up to so many times the wait.
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.03
_LONGER: Final = 4

# How often at least a rank looks for a diagnosis that another one is making.
_READ_S: Final = 0.3


@final
class StatusQuery:
    """Asks ranks for their status, which their watchdogs answer, and shares what follows from it.

    Keys: `asked/RANK` counts the questions to a rank, `ask/RANK/N` is one, `answer/RANK/N` its answer, `closed/RANK`
    what a rank said last; `first/CALL` which rank makes the diagnosis of a call, `diagnosis/CALL` what it found.

    Args:
        store: the watchdog's; every rank of the mesh looks at it each `look_s` seconds.
    """

    def __init__(self, store: Any, rank: int, look_s: float) -> None:
        self._store = store
        self._rank = rank
        self._within_s = max(_ANSWER_S, 2 * look_s)
        # Calls of the store that have returned.
        self._returned = 0

    def limited(self, call: Callable[[], T]) -> T:
        """What `call`, which uses this query, returns or raises; TimeoutError where the store stops to answer.

        A store that is served by a stopped rank, or cannot be reached any more, holds its callers for minutes.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="meshcomm-query", daemon=True)
        thread.start()
        seen = -1
        while thread.is_alive() and self._returned != seen:
            seen = self._returned
            thread.join(self._within_s)
        if errors:
            raise errors[0]
        if not results:
            raise TimeoutError("the store does not answer")
        return results[0]

    def shared(self, call: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first rank that comes with this name of a call makes; it asks, and the others read what it found.

        Where that rank does not publish it in time, each makes its own. Raises RuntimeError where the store fails.
        """
        own = str(self._rank)
        if self._do("compare_set", f"first/{call}", "", own).decode() == own:
            found = make()
            self._do("set", f"diagnosis/{call}", json.dumps(found))
            return found
        # The first rank waits so long itself, longer on a busy machine.
        deadline = time.monotonic() + _LONGER * self._within_s
        pause_s = _PAUSE_S
        while time.monotonic() < deadline:
            if self._do("check", [f"diagnosis/{call}"]):
                read: dict[str, Any] = json.loads(self._do("get", f"diagnosis/{call}"))
                return read
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _READ_S)
        return make()

    def ask(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The statuses of those of `ranks` that answer in time. Raises RuntimeError where the store fails.

        A few operations of the store for each rank, however long it takes.
        """
        began = last = time.monotonic()
        answers = self._read({rank: f"closed/{rank}" for rank in ranks})
        asked = {rank: self._do("add", f"asked/{rank}", 1) for rank in ranks if rank not in answers}
        for rank, number in asked.items():
            self._do("set", f"ask/{rank}/{number}", str(self._rank))
        keys = {rank: f"answer/{rank}/{number}" for rank, number in asked.items()}
        waited_s = 0.0
        while keys and waited_s < self._within_s and last - began < _LONGER * self._within_s:
            if self._do("check", list(keys.values())):
                break
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            waited_s += min(now - last, _LOOK_S)
            last = now
        answers |= self._read(keys)
        return answers | self._read({rank: f"closed/{rank}" for rank in keys if rank not in answers})

    def _read(self, keys: dict[int, str]) -> dict[int, Any]:
        """The values of those keys that are there."""
        return {
            rank: json.loads(self._do("get", key)) for rank, key in keys.items() if self._do("check", [key])
        }

    def _do(self, method: str, *arguments: Any) -> Any:
        returned = getattr(self._store, method)(*arguments)
        self._returned += 1
        return returned
