"""Runs ranks as threads, one at a time. It chooses the next rank, restores its state, and reacts when none can run."""

from __future__ import annotations

import contextvars
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn, final

import torch

from meshcomm.comm.torch_private import forward_level
from meshcomm.errors import UnsupportedOp
from meshcomm.layout.sizes import rank_text
from meshcomm.simulator.torch_private import has_loss_parallel, set_loss_parallel
from meshcomm.transport.variables import set_env

# Ranks need little C stack, because calls from Python to Python use none.
_STACK_BYTES: Final = 4 * 1024 * 1024

# The environment variables that differ between ranks, as under a launcher. Ranks share all other variables.
_PER_RANK = ("RANK", "LOCAL_RANK")

# After this many consecutive polls without another event, further polling cannot change anything.
_POLLS: Final = 1_000

# How often to check whether the running rank lets others run.
_LOOK_S: Final = 0.5

# How long an interrupted rank may compute or sleep before it must reach a call, which ends it cleanly.
_PATIENCE_S: Final = 3.0


@final
class RankLocals:
    """The state of a rank that is not running.

    It contains torch's, Python's and NumPy's random generators, torch's default dtype, whether torch's loss_parallel is active,
    RANK and LOCAL_RANK in the environment, and, for a script, sys.argv and `__main__`. A real process seeds its generators from
    the host's entropy. A simulated rank seeds them by rank, so that ranks differ but every simulation is the same.

    argv: a script's path and arguments; empty for a function, whose ranks share `__main__`.
    """

    def __init__(self, rank: int, argv: Sequence[str] = ()) -> None:
        self._torch = torch.Generator().manual_seed(rank).get_state()
        self._python = random.Random(rank).getstate()
        self._rank = rank
        self._numpy: Any = None
        self._dtype = torch.get_default_dtype()
        self._loss_parallel = False
        self._variables: dict[str, str | None] = dict.fromkeys(_PER_RANK, str(rank))
        self._main, self._argv = sys.modules["__main__"], sys.argv
        if argv:
            self._main, self._argv = ModuleType("__main__"), [*argv]
            self._main.__file__ = argv[0]

    @classmethod
    def present(cls) -> RankLocals:
        """Return the current state of the process, which `enter` restores."""
        of_process = cls(0)
        of_process._variables = {name: os.environ.get(name) for name in _PER_RANK}
        of_process.leave()
        return of_process

    def leave(self) -> None:
        """Save the state when this rank stops running."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._numpy = numpy.get_bit_generator()
        self._dtype = torch.get_default_dtype()
        self._loss_parallel = has_loss_parallel()
        self._argv = sys.argv

    def enter(self) -> None:
        """Restore the state when this rank continues."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            if self._numpy is None:
                self._numpy = numpy.MT19937(self._rank)
            numpy.set_bit_generator(self._numpy)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if has_loss_parallel() != self._loss_parallel:
            set_loss_parallel(self._loss_parallel)
        set_env(self._variables)
        sys.modules["__main__"] = self._main
        sys.argv = self._argv


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Lost(BaseException):
    """Ends the thread of a lost rank, as SIGKILL ends a process. Each later call raises it again."""


class Unwound(BaseException):
    """Ends the thread of a rank whose simulation is over. It is not an Exception, so that no program catches it."""


class Sleep(NamedTuple):
    """A sleep for longer than other ranks would wait."""

    seconds: float


@final
@dataclass(slots=True, eq=False)
class Actor:
    """A simulated process. process: its number. rank: its rank in the mesh, equal to `process` until ranks are lost.

    saved:    its state while it is not running. coords: its coords by dim, in the first mesh that contained it.
    wait:     the SimulatedWork, StoreWait or Sleep that it waits for; None while it is running or ready to run.
    unwaited: asynchronous calls and messages that it has not waited for yet, in order.
    ended:    whether its program has ended, with `result` or `error`. lost: whether it was lost. Another actor
              replaces it if possible.
    replaces: the generation for which the process was started as a replacement; 0 if it replaces no other process.
    operations: the number of operations on the store and on groups so far.
    """

    process: int
    rank: int
    saved: RankLocals
    coords: dict[str, int] = field(default_factory=dict)
    thread: threading.Thread | None = None
    ident: int = 0
    lock: threading.Lock = field(default_factory=_held)
    wait: Any = None
    unwaited: dict[Any, None] = field(default_factory=dict)
    ended: bool = False
    lost: bool = False
    replaces: int = 0
    operations: int = 0
    result: Any = None
    error: BaseException | None = None

    @property
    def ended_well(self) -> bool:
        """Whether the rank's program has returned."""
        return self.ended and not self.lost and self.error is None

    @property
    def name(self) -> str:
        """The rank and its coords, such as `rank 5 (dp=1 tp=0)`."""
        return rank_text(self.rank, self.coords or None)


@final
class Scheduler:
    """Lets one rank run at a time. A rank runs until it waits or sleeps. A seeded random choice then selects the next rank.

    limit_s: how long a rank may run without letting others run. After this time, the others' calls would have timed out.
    """

    def __init__(self, actors: list[Actor], seed: int, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        # The rank that holds the baton, and the time of its last call.
        self._running: Actor | None = None
        self._since = time.monotonic()
        self.actors = actors
        self.over = False
        self.error: BaseException | None = None
        self._random = random.Random(seed)
        self._ready = list(actors)
        self._polls = 0
        self._main = _held()
        self._interrupt: BaseException | None = None
        # Whether the caller was interrupted and has left. If so, the process keeps the caller's state, not a rank's.
        self._abandoned = False
        self._context = contextvars.copy_context()
        # Called at each operation; returns whether the rank is lost there.
        self.loses: Callable[[Actor], bool] = lambda actor: False
        # `expects` returns whether another actor will replace a lost one, and `is_over` whether the simulation is over
        # although some actors still wait.
        self.expects: Callable[[], bool] = lambda: False
        self.is_over: Callable[[], bool] = lambda: False
        # Called when a rank has ended; returns the error if new ranks can no longer synchronize with all others.
        self.irreplaceable: Callable[[Actor], BaseException | None] = lambda actor: None

    def run(
        self,
        body: Callable[[Actor], Any],
        diagnose: Callable[[], BaseException | None],
        unyielding: Callable[[Actor], BaseException | None],
    ) -> None:
        """Call `body` for every actor, each in its own thread. Return when all actors have ended.

        diagnose: called when no rank can run but some have not ended. It wakes a rank and returns None, or
                  returns the error that ends the simulation.
        unyielding: called when a rank has run for longer than the limit. It returns the error, or None if no other
                  rank was kept from running.
        """
        self._body, self._diagnose = body, diagnose
        present = RankLocals.present()
        usual = threading.stack_size(_STACK_BYTES)
        try:
            first = self._next()
            assert first is not None
            begun = False
            while True:
                # An interrupt may come at any line, also while the first rank's thread starts, and at the end of the inner loop.
                try:
                    if not begun:
                        begun = True
                        self._hand_to(first)
                    while not self._main.acquire(timeout=_LOOK_S if self._interrupt is None else _PATIENCE_S):
                        if self._interrupt is not None:
                            raise self._interrupt
                        running = self._running
                        if running is not None and time.monotonic() - self._since > self._limit_s:
                            self._interrupt = unyielding(running)
                    break
                except BaseException as error:
                    if self._interrupt is not None:
                        raise
                    # The running rank sees the error at its next call or when it next passes the baton.
                    self._interrupt = error
            for actor in self.actors:
                if actor.thread is not None and actor.ended:
                    actor.thread.join()
        finally:
            threading.stack_size(usual)
            self._abandoned = True
            present.enter()

    def wait(self, actor: Actor, on: object) -> None:
        """Let other ranks run until `wake` is called for `actor`. Raises Unwound if the simulation ends."""
        self.check()
        _refuse_shared(actor)
        actor.wait = on
        self._switch(actor)

    def poll(self, actor: Actor, on: object) -> None:
        """Record that `actor` polled for something that is not ready, and let other ranks run before it continues.

        If ranks do nothing but poll, the actor waits instead, so that a deadlock is detected.
        """
        if self.over:
            raise Unwound
        _refuse_shared(actor)
        self._polls += 1
        if self._polls > _POLLS:
            self._polls = 0
            self.wait(actor, on)
        else:
            self._let_others_run(actor)

    def sleeps(self, seconds: float) -> None:
        """Let other ranks run before a rank sleeps, because it may be waiting for one of them outside the mesh.

        If it sleeps for longer than the limit, all that the others can do without it comes first.
        It has no effect in threads other than the running rank's.
        """
        running = self._running
        if running is None or threading.get_ident() != running.ident or _holds_shared():
            return
        if self._interrupt is not None:
            self.stop(self._interrupt)
        if self.over:
            raise Unwound
        if seconds > self._limit_s:
            self.wait(running, Sleep(seconds))
        else:
            self._let_others_run(running)

    def maybe_pause(self, actor: Actor) -> None:
        """Let other ranks run at random times, so that different schedules show the different orders that are possible."""
        if self._ready and self._random.random() < 0.25 and not _holds_shared():
            self.check()
            self._let_others_run(actor)

    @property
    def can_run(self) -> bool:
        """Whether a rank can run."""
        return bool(self._ready)

    def choose(self, count: int) -> int:
        """Return a random number below `count`, determined by the seed."""
        return int(self._random.random() * count)

    def wake(self, actor: Actor) -> None:
        """Record that the event that `actor` waits for has happened."""
        actor.wait = None
        self._ready.append(actor)

    def add(self, actor: Actor) -> None:
        """Add a process that replaces one that has ended."""
        self.actors[actor.process] = actor
        self._ready.append(actor)

    def operates(self, actor: Actor) -> None:
        """Record that `actor` is about to use the store or a group.

        Raises Lost if the rank is lost at this operation or was lost earlier, and UnsupportedOp if the calling thread is
        not the rank's own.
        """
        actor.operations += 1
        if actor.lost or self.loses(actor):
            actor.lost = True
            raise Lost
        if threading.get_ident() != actor.ident:
            raise UnsupportedOp(
                f"rank {actor.rank} communicates from a thread that is not its own",
                given=f"thread {threading.current_thread().name}",
                expected="all communication of a simulated rank in the thread that runs its program",
                hint="meshcomm run: it starts processes, in which every thread may communicate",
            )

    def check(self) -> None:
        """Record that a rank makes a call. Raises Unwound if the simulation has ended."""
        self._polls, self._since = 0, time.monotonic()
        if self._interrupt is not None:
            self.stop(self._interrupt)
        if self.over:
            raise Unwound

    def fail(self, error: BaseException) -> NoReturn:
        """End the simulation with an error from within a rank's call."""
        self.stop(error)
        raise Unwound

    def stop(self, error: BaseException | None) -> None:
        """End the simulation by unwinding every live rank in turn. error: the simulation's error, or None for success."""
        if self.over:
            return
        self.over = True
        self.error = error
        begun = [actor for actor in self._ready if actor.thread is not None]
        for actor in self.actors:
            if actor.wait is not None:
                actor.wait = None
                begun.append(actor)
            if actor.thread is None:
                actor.ended = True
        self._ready = begun

    # -- inside ---------------------------------------------------------------------------------

    def _let_others_run(self, actor: Actor) -> None:
        if self._ready:
            self._ready.append(actor)
            self._switch(actor)

    def _switch(self, actor: Actor) -> None:
        following = self._next()
        if following is not actor:
            assert following is not None
            actor.saved.leave()
            self._hand_to(following)
            actor.lock.acquire()
            if not self._abandoned:
                actor.saved.enter()
        if self.over:
            raise Unwound

    def _next(self) -> Actor | None:
        if self._interrupt is not None:
            self.stop(self._interrupt)
        while not self._ready:
            if all(actor.ended for actor in self.actors) and (self.over or not self.expects()):
                return None
            try:
                failure = self._diagnose()
                if failure is None and not self._ready:
                    failure = AssertionError("the diagnosis woke no rank and returned no error")
            except BaseException as error:
                failure = error
            if failure is not None:
                self.stop(failure)
        ready = self._ready
        place = int(self._random.random() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _hand_to(self, actor: Actor) -> None:
        self._running, self._since = actor, time.monotonic()
        if actor.thread is not None:
            actor.lock.release()
            return
        # Each rank starts with a copy of the caller's context variables, so that it sees only its own changes.
        context = self._context.copy()
        name = f"meshcomm-rank-{actor.rank}"
        actor.thread = threading.Thread(target=context.run, args=(self._live, actor), name=name, daemon=True)
        actor.thread.start()

    def _live(self, actor: Actor) -> None:
        actor.ident = threading.get_ident()
        actor.saved.enter()
        try:
            actor.result = self._body(actor)
        except (Unwound, Lost):
            pass
        except BaseException as error:
            if not self.over and not actor.lost:
                actor.error = error
        try:
            actor.saved.leave()
            actor.ended = True
            if not self.over and (unmet := self.irreplaceable(actor)) is not None:
                self.stop(unmet)
            if not self.over and actor.ended_well and self.is_over():
                self.stop(None)
            following = self._next()
            if following is not None:
                self._hand_to(following)
        except BaseException as error:
            # No rank is left that could pass the baton, so wake the caller, which would otherwise wait forever.
            self.error, following = error, None
        if following is None:
            self._main.release()


def _importing() -> str | None:
    """Return the name of the module that the calling thread is importing, or None."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and "importlib" in frame.f_code.co_filename:
            return str(frame.f_locals.get("name", "a module"))
        frame = frame.f_back
    return None


def _holds_shared() -> bool:
    """Return whether the calling thread is in the middle of something that all ranks share, so that no other rank may run."""
    return forward_level() >= 0 or _importing() is not None


def _refuse_shared(actor: Actor) -> None:
    """Raise UnsupportedOp if `actor` would wait during the import of a module, or inside forward-mode AD.

    Ranks share their modules. Another rank that imports the same module would wait for this rank in Python's import lock,
    which the scheduler cannot see. torch has one level of forward-mode AD in a process: the first rank that leaves it
    would delete the tangents of the others.
    """
    if forward_level() >= 0:
        raise UnsupportedOp(
            f"rank {actor.rank} waits for other ranks inside forward-mode AD, of which torch has one level in a process",
            given="torch.func.jvp, jacfwd or dual_level around communication, in the simulator",
            expected="forward-mode AD without communication, or ranks that are processes",
            hint="run it with meshcomm run, or use torch.func.vjp",
        )
    module = _importing()
    if module is not None:
        raise UnsupportedOp(
            f"rank {actor.rank} waits for other ranks while it imports {module}, which all ranks share",
            given=f"meshcomm.init, or communication, in the body of {module}",
            expected="calls that wait for other ranks in the script itself, or in a function",
            hint=f"move it into a function of {module}, and call that after the import",
        )
