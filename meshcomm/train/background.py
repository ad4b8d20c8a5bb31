"""Work that all ranks do beside the training, and one of them completes: did it end well?

The training's groups carry one sequence of calls, and a thread that used them too would mix its own
among them. So the thread here makes no collective: ranks leave word in the mesh's store, which any
thread may use, and only look there, as waiting would keep other threads of the process from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

import torch

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.exchange import bytes_of_every_rank, failure_of, is_first, parts, together

_DONE, _FAILED = b"+", b"-"
_FIRST_PAUSE_S: Final = 0.005
_LAST_PAUSE_S: Final = 0.25
# Share of the time to wait that the lowest rank gets for telling the others who was late.
_MARGIN: Final = 0.1


@final
class Background:
    """One piece of work in a thread of each rank, begun when this is made.

    Args:
        mesh: of the ranks that take part.
        what: "save into runs/x", for the text "rank 3 could not ...", with `expected` and `hint`.
        work: done by every rank.
        complete: done by the lowest rank, once all have done `work`.
        give_up: done by the lowest rank where a rank failed, after all have ended their work.

    Called by: every rank of the mesh. Neither of the functions may communicate.
    """

    def __init__(
        self,
        mesh: Mesh,
        what: str,
        *,
        work: Callable[[], None],
        complete: Callable[[], None],
        give_up: Callable[[], None],
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self._mesh = mesh
        self._store = mesh.store
        self._what = what
        self._expected, self._hint = expected, hint
        self._work, self._complete, self._give_up = work, complete, give_up
        # The same on all ranks, and another one each time.
        token = bytes_of_every_rank(mesh, os.urandom(8))[0].hex()
        self._ranks = sorted(int(rank) for rank in mesh.layout.ranks.flat)
        self._keys = {rank: f"meshcomm.background/{token}/{rank}" for rank in self._ranks}
        self._verdict = f"meshcomm.background/{token}/verdict"
        self._failure: MeshcommError | None = None
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._hurry = threading.Event()
        self._deadline = self._last = float("inf")
        # A daemon: where a disk hangs, the process can end all the same.
        self._thread = threading.Thread(target=self._run, name=f"meshcomm: {what}", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Whether the work has ended on every rank, the same answer on all of them. Does not wait.

        Called by: every rank, at the same point of the program: one all_reduce of a number per dim.
        Raises: as `finish`.
        """
        ended = torch.tensor([int(self._ended.is_set())], device=self._mesh.device)
        for dim in self._mesh.layout.dims:
            self._mesh.all_reduce(dim, ended, op="min")
        if not ended.item():
            return False
        self._conclude()
        return True

    def finish(self, timeout_s: float) -> None:
        """Wait until the work has ended on every rank, for `timeout_s` at most.

        Called by: every rank, at the same point of the program.
        Raises: TrainingError on every rank where one of them failed or did not end in time: with the
                words and the name of the lowest such rank.
        """
        self._await_end(timeout_s)
        self._conclude()

    def settle(self, timeout_s: float) -> None:
        """Wait as `finish`, but alone: for a rank that is about to end with an error of its own."""
        self._await_end(timeout_s)

    # -- the training's thread ------------------------------------------------------------------

    def _await_end(self, timeout_s: float) -> None:
        now = time.monotonic()
        self._last = now + timeout_s * (1 + _MARGIN)
        self._deadline = now + timeout_s
        self._hurry.set()
        self._ended.wait(timeout_s * (1 + 2 * _MARGIN))

    def _conclude(self) -> None:
        def outcome() -> None:
            if not self._ended.is_set():
                raise TrainingError(**self._late(self._mesh.rank))
            if self._failure is not None:
                raise self._failure

        try:
            together(self._mesh, self._what, outcome, expected=self._expected, hint=self._hint)
        finally:
            # Every rank has read the verdict, or will not wait for it any more.
            if is_first(self._mesh):
                with contextlib.suppress(MeshcommError):
                    for key in (*self._keys.values(), self._verdict):
                        self._store.delete_key(key)

    # -- the thread of the work -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._leave(self._keys[self._mesh.rank], self._work)
            if is_first(self._mesh):
                self._judge()
            if not self._appear([self._verdict], lambda: self._last):
                raise TrainingError(**self._late(self._ranks[0]))
            word = self._store.get(self._verdict)
            if word[:1] == _FAILED and self._failure is None:
                self._failure = TrainingError(**json.loads(word[1:]))
        except Exception as error:
            self._failure = self._failure or self._failure_of(error)
        finally:
            self._ended.set()

    def _judge(self) -> None:
        """The lowest rank: how it ended, once all have left word."""
        keys = list(self._keys.values())
        if not self._appear(keys, lambda: self._deadline):
            late = next(rank for rank, key in self._keys.items() if not self._store.has_key(key))
            self._store.set(self._verdict, _FAILED + json.dumps(self._late(late)).encode())
            return
        said = self._store.multi_get(keys)
        failed = [word for word in said if word[:1] == _FAILED]
        if failed:
            self._give_up()
            self._store.set(self._verdict, failed[0])
            return

        self._leave(self._verdict, self._complete)

    def _leave(self, key: str, action: Callable[[], None]) -> None:
        """Do `action` and leave word of how it ended."""
        word = _DONE
        try:
            action()
        except Exception as error:
            self._failure = self._failure_of(error)
            word = _FAILED + json.dumps(parts(self._mesh, self._what, self._failure)).encode()
        self._store.set(key, word)

    def _appear(self, keys: list[str], deadline: Callable[[], float]) -> bool:
        """Whether all `keys` are set before the deadline; there is none until somebody waits."""
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() > deadline():
                return False
            if self._hurry.is_set():
                time.sleep(_FIRST_PAUSE_S)
            else:
                self._hurry.wait(pause_s)
                pause_s = min(1.3 * pause_s, _LAST_PAUSE_S)
        return True

    def _late(self, rank: int) -> dict[str, Any]:
        coords = " ".join(f"{dim}={coord}" for dim, coord in self._mesh.coords_of(rank).items())
        return {
            "what": f"rank {rank} ({coords}) could not {self._what}",
            "given": f"not done {time.monotonic() - self._began:.1f} s after it was begun",
            "expected": self._expected,
            "hint": self._hint,
        }

    def _failure_of(self, error: Exception) -> MeshcommError:
        return failure_of(self._mesh, self._what, error, expected=self._expected, hint=self._hint)
