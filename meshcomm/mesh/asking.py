"""What are the other ranks doing? Asked through the store, by a rank whose call failed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, final

# How long a failing call waits for the others to say what they are doing.
_ANSWER_S: Final = 1.5

# It looks for their answers again and again. What a look takes beyond this is a busy machine's, on which the
# others are slow to answer too, and is not held against them; up to so many times the wait.
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.03
_CALL_S: Final = 0.001
_LONGER: Final = 4


@dataclass
class _Progress:
    """calls: of the store that have returned."""

    calls: int = 0


@final
class Asking:
    """Asks ranks for their status, which their Watch answers.

    mute: whether the store itself did not answer, the last time. Calls of one that cannot be reached do not
    return, so what it said before is no answer.

    Args:
        store: the Watch's; every rank of the mesh looks at it each `look_s` seconds.
    """

    def __init__(self, store: Any, rank: int, look_s: float) -> None:
        self._store = store
        self._rank = rank
        self._look_s = look_s
        self.mute = False

    def ask(self, ranks: list[int]) -> dict[int, Any] | None:
        """The statuses of those of `ranks` that answer in time; None where the store does not."""
        answers: dict[int, Any] = {}
        broken_off, progress = threading.Event(), _Progress()
        within_s = max(_ANSWER_S, 2 * self._look_s)

        def collect() -> None:
            try:
                self._collect(ranks, answers, within_s, progress)
            except RuntimeError:
                broken_off.set()

        # The store may be served by a rank that is stopped, or the way to it be cut: then its calls do
        # not return.
        asking = threading.Thread(target=collect, daemon=True)
        asking.start()
        seen = -1
        while asking.is_alive() and progress.calls != seen:
            seen = progress.calls
            asking.join(within_s)
        self.mute = asking.is_alive() and progress.calls == 0
        return None if broken_off.is_set() and not answers else dict(answers)

    def _collect(
        self, ranks: list[int], answers: dict[int, Any], within_s: float, progress: _Progress
    ) -> None:
        usual_s = _LOOK_S + 2 * len(ranks) * _CALL_S
        began = last = time.monotonic()
        waited_s = 0.0
        numbers = {}
        for rank in ranks:
            numbers[rank] = self._store.add(f"asked/{rank}", 1)
            progress.calls += 1
        for rank, number in numbers.items():
            self._store.set(f"ask/{rank}/{number}", str(self._rank))
        while len(answers) < len(ranks) and waited_s < within_s and last - began < _LONGER * within_s:
            for rank in ranks:
                for key in (f"answer/{rank}/{numbers[rank]}", f"closed/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = json.loads(self._store.get(key))
                    progress.calls += 1
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            waited_s += min(now - last, usual_s)
            last = now
