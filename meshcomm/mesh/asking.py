"""What are the other ranks doing? Asked through the store, by a rank whose call failed."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Final, final

# How long a failing call waits for the others to say what they are doing.
_ANSWER_S: Final = 1.5


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
        broken_off, reached = threading.Event(), threading.Event()
        within_s = max(_ANSWER_S, 2 * self._look_s)

        def collect() -> None:
            try:
                self._collect(ranks, answers, within_s, reached)
            except RuntimeError:
                broken_off.set()

        # The store may be served by a rank that is stopped, or the way to it be cut: then its calls do
        # not return.
        asking = threading.Thread(target=collect, daemon=True)
        asking.start()
        asking.join(within_s)
        self.mute = asking.is_alive() and not reached.is_set()
        return None if broken_off.is_set() and not answers else dict(answers)

    def tell(self, ranks: list[int], text: str) -> None:
        """Have each of `ranks` read `text`, JSON of a dictionary, where it would find a question.

        Raises RuntimeError where the store does not answer.
        """
        for rank in ranks:
            self._store.set(f"ask/{rank}/{self._store.add(f'asked/{rank}', 1)}", text)

    def _collect(
        self, ranks: list[int], answers: dict[int, Any], within_s: float, reached: threading.Event
    ) -> None:
        deadline = time.monotonic() + within_s
        numbers = {}
        for rank in ranks:
            numbers[rank] = self._store.add(f"asked/{rank}", 1)
            reached.set()
        for rank, number in numbers.items():
            self._store.set(f"ask/{rank}/{number}", str(self._rank))
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                for key in (f"answer/{rank}/{numbers[rank]}", f"closed/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = json.loads(self._store.get(key))
            time.sleep(0.02)
