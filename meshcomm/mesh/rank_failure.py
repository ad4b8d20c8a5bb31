"""Handles the error that ends a rank: explains it, then leaves it to meshcomm's launcher, or prints it if it is first."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, final

import torch.distributed as dist

from meshcomm.comm.callsite import is_ours, is_program, place_in
from meshcomm.comm.diagnosis import Reason, reason_of, text_of
from meshcomm.errors import CommunicationError, MeshcommError, RankLost, StoreTimeout
from meshcomm.mesh.rank_record import frames_of, handled_by, one_line, place_of
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.launcher import Launch, attempt_of, is_helper
from meshcomm.rendezvous.meeting import of_this_attempt
from meshcomm.rendezvous.store import within

# How long a rank waits for another rank to report first if this rank's error follows from that rank's error.
_PATIENCE_S = 3.0

# How long the job's store may take to report whether another rank has printed its error.
_ASK_S = 5.0

_INTERRUPTED: Final = 130

# The file with the names of the ranks, for each attempt.
_NAMES: Final = "{}-names.json"

# The file that asks where the ranks are, and the files with their answers.
_WHERE: Final = "{}-where"
_PLACE: Final = "{}-where-{}.json"

# The file with a rank's stack at a signal.
_STACK: Final = "{}-stack-{}"

# The prefixes of Gloo's and NCCL's error messages.
_CPP: Final = re.compile(r"\b\w+\.(cc|cpp|h|hpp):\d+")

# Frames of code that only started the user's script.
_STARTERS = tuple(f"{Path(__file__).parents[1]}/{part}" for part in ("commands/", "job/"))


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a rank, or how the rank ended without an error.

    who: the rank with its coords.
    time: seconds since the epoch.
    what: the error's type and first line or, for a rank that left no error, how the rank ended.
    frame: the innermost line of the user's code.
    text: the text to print, "" if the rank left no error.
    code: the rank's exit code.
    follows: whether another rank's error, if any, is the cause.
    mismatched: whether the error itself names this rank as the one that differs.
    missing: the ranks that this rank waited for.
    call: the collective that failed; see `CommunicationError.call`.
    chain: the ranks that this rank waited for, directly or through others; see `CommunicationError.chain`.
    raised: whether `what` is an error of this rank.
    seen: whether the rank had raised the error but not ended, as in a long `finally` block.
    held: the error that the rank had raised before this one, with its line, if a `finally` or `except` block made the call that
        failed. It may be the cause, or one that the program has handled.
    """

    rank: int
    who: str
    time: float
    what: str
    frame: str = ""
    text: str = ""
    code: int = 1
    follows: bool = False
    mismatched: bool = False
    missing: Sequence[int] = ()
    call: Mapping[str, Any] | None = None
    chain: Sequence[Sequence[Any]] = ()
    raised: bool = True
    seen: bool = False
    held: str = ""

    @property
    def summary(self) -> str:
        """One line with the rank, the error and the source line."""
        failed = "" if not self.raised else " raised" if self.seen else " failed:"
        ended = " and had not ended" if self.seen else ""
        at = f", at {self.frame}" if self.frame else ""
        return f"{self.who}{failed} {self.what}{at}{self.handling}{ended}"

    @property
    def handling(self) -> str:
        """The end of a line that names the error that the rank was handling, if any."""
        return f", while handling {self.held}" if self.held else ""


def failure_of(error: BaseException, rank: int, who: str) -> Failure:
    """Return the Failure for `rank`, which raised `error`. `who` is the rank with its coords."""
    first = _first_cause(error)
    of_others = _about_others(first)
    # The error itself, or the one of a group that no other rank explains.
    main = error if of_others or not isinstance(error, BaseExceptionGroup) else first
    misused = isinstance(main, MeshcommError) and not isinstance(main, CommunicationError)
    # In other libraries' errors, attributes with these names may have a different meaning.
    facts = vars(first) if isinstance(first, MeshcommError) else {}
    mismatched = facts.get("mismatched_ranks", ())
    frames = frames_of(main)
    text = (
        f" {type(error).__name__}: {text_of(error)}"
        if isinstance(error, MeshcommError)
        else f"\n{_traceback(error)}"
    )
    what = one_line(main)
    if of_others and first is not error:
        what = f"{what}, after {one_line(first)}"
        if text_of(first) not in text:
            # As after `raise ... from None`.
            text = f"{text}\nafter {type(first).__name__}: {text_of(first)}"
    elif main is not error:
        what = f"{what} (in {type(error).__name__})"
    if isinstance(error, CommunicationError) and frames:
        # If another rank is the cause, the call stack shows how the program reached its call.
        text = f"{text}\ncalled from:\n{''.join(traceback.format_list(frames))}".rstrip()
    held = _held(first) if isinstance(first, MeshcommError) or of_others else None
    if held is not None and (isinstance(error, MeshcommError) or one_line(held) not in text):
        text = f"{text}\nwhile handling:\n{_traceback(held)}"
    return Failure(
        rank,
        who,
        time.time(),
        what,
        place_of(main),
        f"{who}:{text}",
        code=_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2 if misused else 1,
        follows=of_others and rank not in mismatched,
        mismatched=rank in mismatched,
        missing=[*facts.get("missing", ())],
        call=facts.get("call"),
        chain=[[*each[:-1], [*each[-1]]] for each in facts.get("chain", ())],
        held="" if held is None else f"{one_line(held)}, at {place_of(held)}",
    )


def _first_cause(error: BaseException) -> BaseException:
    """Return the error in the chain of causes of `error` that other ranks explain; if there is none, the error itself.

    A group follows from other ranks' errors only if all of its errors do; otherwise, return the first that does not.
    """
    if isinstance(error, BaseExceptionGroup):
        found = [_first_cause(each) for each in error.exceptions]
        return next((each for each in found if not _about_others(each)), found[0])
    for link in _chain(error):
        if isinstance(link, BaseExceptionGroup) and link is not error:
            link = _first_cause(link)
        if _about_others(link):
            return link
    return error


def _held(error: BaseException) -> BaseException | None:
    """Return the error that the program was raising or handling when it made the call that raised `error`, if any."""
    links = _chain(error)
    contexts = [link.__context__ for link in links if link.__context__ is not link.__cause__]
    # The traceback of an error that a library has raised and handled by itself has no line of the program.
    return next(
        (
            link
            for link in links[1:]
            if any(link is each for each in contexts)
            and not _about_others(link)
            and any(is_program(frame.filename) for frame in frames_of(link))
        ),
        None,
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error with all errors that it was raised from, or while they were handled."""
    chain = [error]
    for link in chain:
        # `raise ... from None` hides the context, but does not change the cause. A program that has handled the loss of ranks,
        # by a new mesh, goes on.
        handled = None if isinstance(link.__context__, RankLost) else link.__context__
        # By identity: an error's own `__eq__` may raise an exception.
        chain += [
            each
            for each in (link.__cause__, handled)
            if each is not None and not any(each is other for other in chain)
        ]
    return chain


def _about_others(error: BaseException) -> bool:
    """Return whether the error itself says that another rank may be the cause."""
    # torch's own errors about a lost store or peer explain the cause no better than meshcomm's errors.
    known = isinstance(error, (CommunicationError, StoreTimeout, dist.DistError))
    named = isinstance(error, MeshcommError) and bool(vars(error).get("mismatched_ranks"))
    return known or named or _of_torch(error)


def _of_torch(error: BaseException) -> bool:
    """Return whether `error` is a backend's own error about a peer or a timeout, which shows only that a call ended."""
    cause = backend_error(error)
    if cause is None:
        return False
    innermost = traceback.extract_tb(cause.__traceback__)[-1:]
    # If the program itself waits for a Work, the frame is the program's, but the text begins with a line of C++.
    return any(is_ours(frame.filename) for frame in innermost) or _CPP.search(text_of(cause)) is not None


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, trace_of(error))).rstrip()


def trace_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the frames that only started the script."""
    trace = error.__traceback__
    while trace and trace.tb_next and _starts_scripts(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _starts_scripts(file: str) -> bool:
    return "runpy" in file or file.startswith(_STARTERS)


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
        found = json.loads((folder / _NAMES.format(attempt)).read_text())
        return {int(rank): name for rank, name in found.items()}
    return {}


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
    found: dict[int, Failure] = {}
    for path in sorted(folder.glob(f"{attempt}-[cfs]*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, TypeError):
            failure = Failure(**json.loads(path.read_text()))
            found[failure.rank] = failure
    return sorted(found.values(), key=attrgetter("rank"))


def forget(folder: Path, attempt: int, rank: int) -> None:
    """Remove a rank's failure, because another process has replaced the rank's process."""
    for kind in ("follows", "cause", "seen"):
        (folder / f"{attempt}-{kind}-{rank}.json").unlink(missing_ok=True)


def leave_seen(error: BaseException, label: str) -> None:
    """Write an error that this rank has raised, and that may end it later, for meshcomm's launcher."""
    if (folder := _folder_of_job()) is not None and not _about_others(_first_cause(error)):
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


def frame_at_signal(folder: Path, attempt: int, rank: int) -> tuple[str, bool]:
    """Return the program's line, as in `Failure.frame`, at which a signal ended a rank, and whether the thread that ran this
    line caused the signal. Return "" if the rank has left no stack.
    """
    try:
        text = (folder / _STACK.format(attempt, rank)).read_text()
    except OSError:
        return "", False
    threads = [each for each in text.split("\n\n") if 'File "' in each]
    own = next((each for each in threads if each.startswith("Current thread")), None)
    # Without one, a thread of a backend caused it. The main thread is last.
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', own or "".join(threads[-1:]))
    at = place_in([file for file, _, _ in frames])
    return "" if at is None else "{}:{} in {}".format(*frames[at]), own is not None


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
        found = {}
        for path in folder.glob(_PLACE.format(attempt, "*")):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
        if all(found.values()) or time.monotonic() > deadline:
            return found
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
    left = folder is not None and leave(failure, folder, attempt)
    if hook is not None:
        hook()
    if is_helper(os.environ):
        print(failure.text, file=sys.stderr)
    elif folder is not None and left:
        if failure.follows:
            await_cause(folder, attempt, patience_s)
    elif failure.code != _INTERRUPTED and _speaks_first(launch, patience_s if failure.follows else 0.0):
        print(failure.text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit immediately: destructors might wait for peers that are gone.
    os._exit(failure.code)


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
        found = self._explained(error, "")
        if found is None:
            self._before(kind, error, trace)
            show_hidden(error)
        else:
            self._before(type(found), found, found.__traceback__)

    def _thread(self, given: Any) -> None:
        name = given.thread.name if given.thread is not None else "unknown"
        error = given.exc_value
        found = None if error is None else self._explained(error, name)
        if found is not None:
            given = threading.ExceptHookArgs((type(found), found, found.__traceback__, given.thread))
        self._before_thread(given)

    def _explained(self, error: BaseException, thread: str) -> MeshcommError | None:
        try:
            found = self._explain(error, thread)
        except Exception:
            # The program's own error must be shown in any case.
            return None
        return None if found is None else caused_by(found, error)


def show_hidden(error: BaseException) -> None:
    """Print the meshcomm error that `error` followed from, if its traceback does not show it, as after `raise ... from None`."""
    first, shown = _first_cause(error), list[BaseException]()
    link: BaseException | None = error
    while link is not None and link not in shown:
        shown.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    # meshcomm's launcher prints it.
    if (
        _folder_of_job() is None
        and isinstance(first, MeshcommError)
        and not any(first is each for each in shown)
    ):
        print(
            f"meshcomm: {type(error).__name__} followed from {type(first).__name__}: {first}", file=sys.stderr
        )


def caused_by(explanation: MeshcommError, error: BaseException) -> MeshcommError:
    """Return the exception that `raise explanation from error` would raise, with the traceback of `error`, which shows how
    the program reached its call.
    """
    explanation.__cause__ = error
    return explanation.with_traceback(error.__traceback__)


def backend_error(error: BaseException) -> RuntimeError | None:
    """Return torch's error about a peer or a timeout if `error` is one or was raised from one, otherwise None.

    For a SystemExit, also check the exception that was being handled. Return None if the error is already explained.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (link.__context__ if isinstance(link, SystemExit) else None)
    if any(isinstance(link, MeshcommError) for link in chain):
        return None
    innermost = next((link for link in reversed(chain) if isinstance(link, RuntimeError)), None)
    return None if innermost is None or reason_of(innermost) is Reason.OTHER else innermost
