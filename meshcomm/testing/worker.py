"""One warm rank's life: take a call, make it, answer."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, final

# A rank's first word: torch is loaded.
READY: Final = "ready"


@final
@dataclass(frozen=True)
class Files:
    """Where one rank writes."""

    stem: Path

    @property
    def stacks(self) -> Path:
        """What its threads do, when it is asked or dies of a fault."""
        return self.stem.with_suffix(".stacks")

    @property
    def streams(self) -> tuple[Path, Path]:
        """Its stdout and stderr during a call that captures them."""
        return self.stem.with_suffix(".out"), self.stem.with_suffix(".err")

    def written(self) -> tuple[str, str]:
        """What is in the two streams."""
        out, err = (
            path.read_text(errors="backslashreplace") if path.exists() else "" for path in self.streams
        )
        return out, err


@final
@dataclass(frozen=True)
class Call:
    """What the pool sends to a rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    variables: Mapping[str, str]
    capture: bool = False


@final
@dataclass(frozen=True)
class Answer:
    """What a rank sends back. `reusable`: whether it may take another call."""

    good: bool
    value: Any
    text: str = ""
    reusable: bool = True


@final
@dataclass(frozen=True)
class Held:
    """Returned by a function on a rank: the value, and what has to live until the next call."""

    value: Any
    alive: Any = None
    reusable: bool = True


def serve(pipe: Connection, files: Files) -> None:
    """Answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    # A test may start processes of its own, a DataLoader's workers say; daemons may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    stacks = open(files.stacks, "w")  # noqa: SIM115 - faulthandler needs it open for life
    stacks.write(f"main {threading.main_thread().ident:#x}\n")
    stacks.flush()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    import torch

    torch.set_num_threads(1)
    # A collection would touch, and so copy, every page that the ranks share since the fork.
    gc.freeze()
    clean = dict(os.environ)
    held: Any = None
    pipe.send(READY)
    while True:
        try:
            call: Call = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.environ.clear()
        os.environ.update({**clean, **call.variables})
        del held
        with _written_to(files.streams) if call.capture else contextlib.nullcontext():
            answer, held = _make(call)
        try:
            pipe.send(answer)
        except Exception as error:  # what was returned or raised cannot be pickled
            note = f"{type(answer.value).__name__} cannot cross to the test: {error}\n{answer.text}"
            pipe.send(Answer(False, RuntimeError(note), note))


def _make(call: Call) -> tuple[Answer, Any]:
    try:
        value = call.function(*call.args)
        if isinstance(value, Held):
            return Answer(True, value.value, reusable=value.reusable), value.alive
        return Answer(True, value), None
    except BaseException as error:
        return Answer(False, error, traceback.format_exc()), None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _written_to(paths: tuple[Path, Path]) -> Iterator[None]:
    """Send the process's stdout and stderr to files, also what C libraries write."""
    kept = [os.dup(number) for number in (1, 2)]
    for number, path in zip((1, 2), paths, strict=True):
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        # A rank that is killed must not take the lines with it that it has printed.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def _end_with_parent() -> None:
    """End this process when the one that made the pool has ended, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="meshcomm-parent", daemon=True).start()
