"""Handles the error that ends a rank: explains it, then leaves it to meshcomm's launcher, or prints it if it is first."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, final

import torch.distributed as dist

from meshcomm.errors import LaunchError, MeshcommError
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.launcher import Launch, attempt_of, is_helper
from meshcomm.rendezvous.meeting import of_this_attempt
from meshcomm.rendezvous.store import within
from meshcomm.watching.callsite import place_in
from meshcomm.watching.ending import INTERRUPTED, Failure, failure_of
from meshcomm.watching.exceptions import about_others, caused_by, first_cause, handled_by

# How long a rank waits for another rank to report first if this rank's error follows from that rank's error.
_PATIENCE_S = 3.0

# How long the job's store may take to report whether another rank has printed its error.
_ASK_S = 5.0

# The file with the names of the ranks, for each attempt.
_NAMES: Final = "{}-names.json"

# The file with the folder of the ranks' reports, and the file there with what the launcher tells.
_REPORTS: Final = "{}-reports"
TOLD: Final = "launcher.json"

# The file that asks where the ranks are, and the files with their answers.
_WHERE: Final = "{}-where"
_PLACE: Final = "{}-where-{}.json"

# The file with a rank's stack at a signal.
_STACK: Final = "{}-stack-{}"


def leave(failure: Failure, folder: Path, attempt: int) -> bool:
    """Write `failure` for the launcher. Return whether the write succeeded."""
    kind = "follows" if failure.follows else "cause"
    return _leave(asdict(failure), folder / f"{attempt}-{kind}-{failure.rank}.json")


def leave_names(names: Mapping[int, str], *, again: bool = False) -> None:
    """Write the ranks' names for meshcomm's launcher, with the ranks' coords in the program's first mesh.

    again: whether the ranks have met again, and may have new processes.
    """
    folder = _folder_of_job()
    if folder is not None:
        path = folder / _NAMES.format(attempt_of(os.environ))
        if again or not path.exists():
            _leave({str(rank): name for rank, name in names.items()}, path)


def names_of_ranks(folder: Path, attempt: int) -> dict[int, str]:
    """Return the names that `leave_names` wrote, or {} if no rank has opened a mesh."""
    with contextlib.suppress(OSError, ValueError):
        names = json.loads((folder / _NAMES.format(attempt)).read_text())
        return {int(rank): name for rank, name in names.items()}
    return {}


def leave_folder(reports: Path) -> None:
    """Tell meshcomm's launcher where this rank has written a report."""
    folder = _folder_of_job()
    if folder is not None:
        _leave({"folder": str(reports.resolve())}, folder / _REPORTS.format(attempt_of(os.environ)))


def leave_told(cause: Mapping[str, Any], folder: Path, attempt: int) -> None:
    """Write the root cause that the launcher tells beside the ranks' reports, if there are any. cause: see `Supervisor.told`.

    Ranks that the launcher has ended leave no report, so their reports alone may not show the cause.
    """
    with contextlib.suppress(OSError, ValueError):
        reports = json.loads((folder / _REPORTS.format(attempt)).read_text())["folder"]
        _leave(cause, Path(reports) / TOLD)


def _leave(facts: Mapping[str, Any], path: Path) -> bool:
    try:
        half = path.with_suffix(".half")
        half.write_text(json.dumps(facts))
        half.replace(path)
    except OSError:
        return False
    return True


def _folder_of_job() -> Path | None:
    """Return the folder of meshcomm's launcher, or None if another launcher started this rank, or if this process is not the
    rank itself.
    """
    folder = os.environ.get("MESHCOMM_JOB")
    # A rank may itself start a job with torchrun. The folder then belongs to the rank's parent.
    ours = folder is not None and os.environ.get("TORCHELASTIC_RUN_ID") == Path(folder).name
    return Path(folder) if folder is not None and ours and not is_helper(os.environ) else None


def await_cause(folder: Path, attempt: int, within_s: float) -> None:
    """Wait until a rank has written an error that does not follow from another error, or until the time is up."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not any(folder.glob(f"{attempt}-cause-*.json")):
        time.sleep(0.05)


def collect(folder: Path, attempt: int) -> list[Failure]:
    """Return the failures that ranks have written, in rank order. Of an error that was seen before it ended its rank, and the
    error that did, return only the latter.
    """
    failures: dict[int, Failure] = {}
    for path in sorted(folder.glob(f"{attempt}-[cfs]*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, TypeError):
            failure = Failure(**json.loads(path.read_text()))
            failures[failure.rank] = failure
    return sorted(failures.values(), key=attrgetter("rank"))


def forget(folder: Path, attempt: int, rank: int) -> None:
    """Remove a rank's failure, because another process has replaced the rank's process."""
    for kind in ("follows", "cause", "seen"):
        (folder / f"{attempt}-{kind}-{rank}.json").unlink(missing_ok=True)


def leave_seen(error: BaseException, label: str) -> None:
    """Write an error that this rank has raised, and that may end it later, for meshcomm's launcher."""
    if (folder := _folder_of_job()) is not None and not about_others(first_cause(error)):
        attempt, rank = attempt_of(os.environ), int(os.environ["RANK"])
        failure = replace(failure_of(error, rank, label), seen=True)
        _leave(asdict(failure), folder / f"{attempt}-seen-{rank}.json")


def forget_seen() -> None:
    """Remove what `leave_seen` wrote, because the program has handled the error."""
    if (folder := _folder_of_job()) is not None:
        path = folder / f"{attempt_of(os.environ)}-seen-{os.environ['RANK']}.json"
        path.unlink(missing_ok=True)


# -- signals --------------------------------------------------------------------------------------------


def leave_stack_on_signal() -> None:
    """Have this process write its stack for meshcomm's launcher if a signal such as SIGSEGV or SIGABRT ends it."""
    folder = _folder_of_job()
    if folder is not None and not faulthandler.is_enabled():
        path = folder / _STACK.format(attempt_of(os.environ), os.environ["RANK"])
        with contextlib.suppress(OSError):
            faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            # A fork is not the rank.
            os.register_at_fork(after_in_child=faulthandler.disable)
            _end_quietly()


def _end_quietly() -> None:
    """Have a C++ exception that nothing catches, as one of Gloo, end this process without printing `terminate called`.

    The launcher's lines say what happened. torch's own variable for C++ details keeps the message.
    """
    if os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") == "0" and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            std, c = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
            # std::set_terminate(abort)
            std["_ZSt13set_terminatePFvvE"](ctypes.cast(c.abort, ctypes.c_void_p))


def frame_at_signal(folder: Path, attempt: int, rank: int) -> tuple[str, bool]:
    """Return the program's line, as in `Failure.frame`, at which a signal ended a rank, and whether the thread that ran this
    line caused the signal. Return "" if the rank has left no stack.
    """
    try:
        text = (folder / _STACK.format(attempt, rank)).read_text()
    except OSError:
        return "", False
    threads = [block for block in text.split("\n\n") if 'File "' in block]
    current = next((thread for thread in threads if thread.startswith("Current thread")), None)
    # Without one, a thread of a backend caused it. The main thread is last.
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', current or "".join(threads[-1:]))
    index = place_in([file for file, _, _ in frames])
    return "" if index is None else "{}:{} in {}".format(*frames[index]), current is not None


# -- where the ranks are, for a launcher that is about to end them ---------------------------------------


def expect_question(rank_is_open: bool) -> None:
    """Record whether this rank will answer `ask_places`, because it has an open mesh or watches its groups."""
    if (folder := _folder_of_job()) is not None:
        path = _place_path(folder, attempt_of(os.environ), int(os.environ["RANK"]))
        if rank_is_open:
            _leave({}, path)
        else:
            path.unlink(missing_ok=True)


def answer_place(status: Callable[[], Mapping[str, Any]]) -> bool:
    """Answer the launcher's question, if it has asked. Return whether it has."""
    folder, attempt = _folder_of_job(), attempt_of(os.environ)
    if folder is None or not (folder / _WHERE.format(attempt)).exists():
        return False
    return _leave(status(), _place_path(folder, attempt, int(os.environ["RANK"])))


def ask_places(folder: Path, attempt: int, within_s: float) -> dict[int, dict[str, Any]]:
    """Ask the ranks of a job where they are. Return the status of each rank that has an open mesh, {} if it does not answer."""
    (folder / _WHERE.format(attempt)).touch()
    deadline = time.monotonic() + within_s
    while True:
        places = {}
        for path in folder.glob(_PLACE.format(attempt, "*")):
            with contextlib.suppress(OSError, ValueError):
                places[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
        if all(places.values()) or time.monotonic() > deadline:
            return places
        time.sleep(0.05)


def _place_path(folder: Path, attempt: int, rank: int) -> Path:
    return folder / _PLACE.format(attempt, rank)


def end_rank(
    error: BaseException,
    launch: Launch,
    label: str,
    *,
    patience_s: float = _PATIENCE_S,
    code: int | None = None,
    hook: Callable[[], None] | None = None,
) -> NoReturn:
    """Make the job print a single error, and end this process. May be called from any thread.

    label: this rank with its coords.
    patience_s: how long a rank whose error has another cause waits for that cause to be reported first.
    code: the exit code, if it differs from the error's own.
    hook: called when the error has been left for the launcher; it may end this process itself.
    """
    if threading.current_thread() is not threading.main_thread() and error.__context__ is None:
        error.__context__ = handled_by(threading.main_thread().ident or 0)
    failure = failure_of(error, launch.rank, label)
    if code is not None:
        failure = replace(failure, code=code)
    folder = _folder_of_job()
    attempt = attempt_of(os.environ)
    has_left = folder is not None and leave(failure, folder, attempt)
    if hook is not None:
        hook()
    if is_helper(os.environ):
        print(failure.text, file=sys.stderr)
    elif folder is not None and has_left:
        if failure.follows:
            await_cause(folder, attempt, patience_s)
    elif failure.code != INTERRUPTED and _speaks_first(launch, patience_s if failure.follows else 0.0):
        print(failure.text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit immediately: destructors might wait for peers that are gone.
    os._exit(failure.code)


def end_by(launch: Launch, label: str, error: MeshcommError) -> None:
    """End this process with `error`, which describes a call that is blocked in the backend."""
    # If the rank that caused the error has not reported a grace period after the timeout, it never will. But a rank that
    # this rank waits for may be about to report which rank it waits for.
    # Ranks of another job do not report for this job.
    asks = replace(launch, address=None) if isinstance(error, LaunchError) else launch
    end_rank(error, asks, label, patience_s=1.0)


def _speaks_first(launch: Launch, patience_s: float) -> bool:
    """Return whether no other rank has printed an error. True if no other rank can be asked."""
    if launch.world_size == 1 or launch.address is None:
        return True
    limit = timedelta(seconds=_ASK_S)
    try:
        store, _, _ = within(
            _ASK_S + 1,
            lambda: next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=limit)),
        )
        store = of_this_attempt(store)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and store.add(keys.SPOKE, 0) == 0:
            time.sleep(0.05)
        return bool(store.add(keys.SPOKE, 1) == 1)
    except (dist.DistError, RuntimeError, ValueError, OSError):
        return True


# -- errors that another one explains -----------------------------------------------------------------------

# Receives an error and the name of the thread that it ends ("" for the main thread). Returns an error that explains the
# received one, or None.
Explain = Callable[[BaseException, str], MeshcommError | None]


@final
class ExceptHooks:
    """Explains exceptions that Python reports as uncaught, in any thread, until `close`.

    Earlier hooks receive the explanation, with the original error as its cause. A hook that the program sets later and
    that calls this hook receives the original error.
    """

    def __init__(self, explain: Explain) -> None:
        self._explain: Explain = explain
        self._before, self._before_thread = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._main, self._thread

    def close(self) -> None:
        """Stop explaining errors, and restore the earlier hooks if this object's hooks are still set."""
        self._explain = lambda error, thread: None
        if sys.excepthook == self._main:
            sys.excepthook = self._before
        if threading.excepthook == self._thread:
            threading.excepthook = self._before_thread

    def _main(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explained = self._explained(error, "")
        if explained is None:
            self._before(kind, error, trace)
            show_hidden(error)
        else:
            self._before(type(explained), explained, explained.__traceback__)

    def _thread(self, args: Any) -> None:
        name = args.thread.name if args.thread is not None else "unknown"
        error = args.exc_value
        explained = None if error is None else self._explained(error, name)
        if explained is not None:
            args = threading.ExceptHookArgs(
                (type(explained), explained, explained.__traceback__, args.thread)
            )
        self._before_thread(args)

    def _explained(self, error: BaseException, thread: str) -> MeshcommError | None:
        try:
            explained = self._explain(error, thread)
        except Exception:
            # The program's own error must be shown in any case.
            return None
        return None if explained is None else caused_by(explained, error)


def show_hidden(error: BaseException) -> None:
    """Print the meshcomm error that `error` followed from, if its traceback does not show it, as after `raise ... from None`."""
    first, shown = first_cause(error), list[BaseException]()
    link: BaseException | None = error
    while link is not None and link not in shown:
        shown.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    # meshcomm's launcher prints it.
    if (
        _folder_of_job() is None
        and isinstance(first, MeshcommError)
        and not any(first is error for error in shown)
    ):
        print(
            f"meshcomm: {type(error).__name__} followed from {type(first).__name__}: {first}", file=sys.stderr
        )
