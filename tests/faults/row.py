"""One row of the table: a fault, when and where it happens, and the errors that have to follow."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import torch

import meshcomm
from meshcomm.mesh import Mesh

TIMEOUT_S: Final = 2.0

# meshcomm promises that differing ranks are known 2 s after the last rank arrived, and missing ranks 2 s
# after the timeout.
DIFFERS_S: Final = 2.0
MISSING_S: Final = TIMEOUT_S + 2.0
# The suite adds this to every promise, because its rows run on 2 cores with other tests. The page is made without it.
BUSY_S: Final = 6.0

Program: TypeAlias = Callable[["Rank"], object]
End: TypeAlias = Literal["SIGKILL", "SIGSTOP"]
# The process that holds the store: the test (like a launcher's agent), a separate process, or rank 0. Or no
# process: a socket that never answers, or the store of another job, has the port.
Server: TypeAlias = Literal["agent", "own process", "rank 0", "taken by a socket", "taken by a store"]


class WrongNumber(AssertionError):
    """A call returned without an error and with wrong values. No row expects that."""


@final
@dataclass(frozen=True)
class Row:
    """A fault and its expected outcome.

    program:  run by every rank that is started; a rank's outcome is the error that it raises.
    expected: rank -> name of the error's class, or several names joined by "|"; "": the rank ends without an
              error, with right numbers. Ranks that are missing here are killed, stopped or never started.
    named:    ranks that every error has to name, except the errors of these ranks; or, by rank, the ranks
              that its error has to name.
    blameless: ranks that no error may list as missing or odd.
    promise_s: seconds after the fault within which all ranks have raised, on an otherwise idle machine.
    quick:    part of the short form that the normal suite runs.
    bare:     the mesh is opened without `with` and never closed; the error that Python reports at its end counts.
    flaw:     why meshcomm does not meet this expectation yet; "": it does.
    sometimes: the flaw shows in some runs only.
    """

    name: str
    fault: str
    moment: str
    dim: str
    program: Program
    expected: Mapping[int, str]
    named: tuple[int, ...] | Mapping[int, tuple[int, ...]] = ()
    promise_s: float = MISSING_S
    dims: Mapping[str, int] = field(default_factory=lambda: {"dp": 2, "tp": 2})
    absent: tuple[int, ...] = ()
    server: Server = "agent"
    blameless: tuple[int, ...] = ()
    environment: Callable[[int], Mapping[str, str]] = lambda _: {}
    quick: bool = False
    bare: bool = False
    flaw: str = ""
    sometimes: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks of the job, including ranks that are never started."""
        return prod(self.dims.values())

    def to_name(self, rank: int) -> tuple[int, ...]:
        """The ranks that the error of `rank` has to name."""
        if isinstance(self.named, tuple):
            return () if rank in self.named else self.named
        return self.named.get(rank, ())

    @property
    def opens(self) -> bool:
        """Whether the fault happens while meshes are opened."""
        return self.moment.startswith(("before agreement", "agreement", "creation"))

    @property
    def started(self) -> list[int]:
        """The ranks that get a process."""
        return [rank for rank in range(self.ranks) if rank not in self.absent]


@final
class Rank:
    """One process's view of its row, given to the row's program.

    number: this rank's number in the row; the environment may give another one.
    folder: a new folder that all ranks of the row share.
    server: process id of the store's own process, or 0 if it has none.
    """

    def __init__(self, number: int, row: Row, folder: Path, server: int, pipe: Connection) -> None:
        self.number = number
        self.row = row
        self.folder = folder
        self.raised_at: float | None = None
        # Of a bare row: the errors that Python reported as uncaught, and the mesh, which is never closed.
        self.reported: list[BaseException] = []
        self.left_open: Mesh | None = None
        self._server = server
        self._pipe = pipe

    @contextmanager
    def mesh(self, **keys: Any) -> Iterator[Mesh]:
        """An open mesh of the row's dims. `keys`: keywords of meshcomm.init, which override the row's."""
        usual = {"dims": dict(self.row.dims), "device": "cpu", "timeout_s": TIMEOUT_S}
        config = {"mesh": {**usual, "reports": str(self.folder / "reports"), **keys}}
        if self.row.bare:
            sys.excepthook = lambda kind, error, trace: self.reported.append(error)
            threading.excepthook = lambda given: self.reported.append(given.exc_value or SystemExit())
            self.left_open = meshcomm.init(config)
            yield self.left_open
            return
        with meshcomm.init(config) as mesh:
            try:
                yield mesh
            except BaseException:
                # Closing comes later. The time when the program got its error counts, whatever it did afterwards.
                self.raised_at = self.raised_at or time.monotonic()
                raise

    def strike(self) -> None:
        """Mark the time of the fault. If this is called several times, the last one counts."""
        self._pipe.send(("fault", time.monotonic()))

    def end(self, how: End) -> None:
        """End or stop this process at once, as the fault."""
        self.strike()
        os.kill(os.getpid(), getattr(signal, how))

    def end_server(self) -> None:
        """Kill the process that holds the store, as the fault."""
        self.strike()
        os.kill(self._server, signal.SIGKILL)

    def wait_for(self, name: str) -> None:
        """Block until some rank calls `say(name)`. This uses the file system, which no fault touches."""
        while not (self.folder / name).exists():
            time.sleep(0.005)

    def say(self, name: str) -> None:
        """Release the ranks that wait for `name`."""
        (self.folder / name).touch()


ENDS: Final[tuple[End, ...]] = ("SIGKILL", "SIGSTOP")


def row(
    cells: str,
    program: Program,
    expected: Mapping[int, str],
    named: tuple[int, ...] | Mapping[int, tuple[int, ...]] = (),
    promise_s: float = MISSING_S,
    **more: Any,
) -> Row:
    """A row by its first four cells on the page: name | fault | moment | dim."""
    name, fault, moment, dim = cells.split(" | ")
    return Row(name, fault, moment, dim, program, expected, named, promise_s, **more)


def both(cells: str, program: Callable[[End, Rank], object], *args: Any, **more: Any) -> list[Row]:
    """One row for SIGKILL and one for SIGSTOP. cells: without the fault; the signal is put before the name."""
    name, rest = cells.split(" | ", 1)
    return [
        row(f"{how.lower()}-{name} | {how} | {rest}", partial(program, how), *args, **more) for how in ENDS
    ]


def opened(act: Callable[[Rank, Mesh], object], **keys: Any) -> Program:
    """`act` in an open mesh. keys: keywords of the mesh."""

    def program(me: Rank) -> None:
        with me.mesh(**keys) as mesh:
            act(me, mesh)

    return program


def struck(act: Callable[[Rank, Mesh], object], **keys: Any) -> Program:
    """`act` in an open mesh whose groups are connected; the fault happens when it begins."""

    def connected(me: Rank, mesh: Mesh) -> None:
        mesh.warm_up()
        me.strike()
        act(me, mesh)

    return opened(connected, **keys)


def check(found: torch.Tensor | None, expected: object) -> None:
    """Raise WrongNumber unless every element of `found` is `expected`, a number or a tensor."""
    wanted = torch.as_tensor(expected, dtype=torch.float32)
    if found is None or not torch.equal(found.float(), wanted.expand(found.shape)):
        raise WrongNumber(f"{found} instead of {expected}")


def everyone(error: str, ranks: int = 4, **others: str) -> dict[int, str]:
    """The same error on all ranks; `r2="..."` sets another one for rank 2."""
    return {rank: others.get(f"r{rank}", error) for rank in range(ranks)}


def without(expected: Mapping[int, str], *gone: int) -> dict[int, str]:
    """`expected` for the surviving ranks."""
    return {rank: error for rank, error in expected.items() if rank not in gone}
