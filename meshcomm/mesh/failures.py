"""What a rank that fails leaves for the launcher: its error, where it was, and whether it is a cause."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshcomm.comm.site import is_ours
from meshcomm.errors import CommunicationError, MeshcommError, StoreTimeout

# Frames that only started the user's script.
_STARTERS = tuple(f"{Path(__file__).parents[1]}/{part}" for part in ("jobs/", "mesh/rank.py"))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a rank.

    who: the rank with its coords. time: seconds since the epoch. kind, first: the error's type and
    first line. frame: the user's innermost line, "" where there is none. text: all to be printed.
    code: the rank's exit code. follows: it is about communication, so another rank may be the cause.
    odd: the error itself names this rank as the one that differs. missing: ranks that it waited for.
    patient: another rank is to speak first, if it does.
    """

    rank: int
    who: str
    time: float
    kind: str
    first: str
    frame: str
    text: str
    code: int
    follows: bool
    odd: bool = False
    missing: tuple[int, ...] = ()
    patient: bool = False

    @property
    def summary(self) -> str:
        """One line: who, what, where."""
        what = f"{self.kind}: {self.first}" if self.first else self.kind
        return f"{self.who} failed: {what}{f', at {self.frame}' if self.frame else ''}"


def failure_of(error: BaseException, rank: int, who: str) -> Failure:
    """What to leave of `error`, which `who`, with this rank's coords, is told to have raised."""
    told = isinstance(error, MeshcommError) and not isinstance(error, CommunicationError)
    first = str(error).splitlines()[0] if str(error) else ""
    # torch's own errors about a store or a peer that is gone are no better a cause than ours.
    follows = isinstance(error, (CommunicationError, StoreTimeout, dist.DistError))
    odd_ranks = getattr(error, "odd_ranks", ())
    return Failure(
        rank,
        who,
        time.time(),
        type(error).__name__,
        first,
        _frame(error),
        f"{who}: {type(error).__name__}: {error}" if told else f"{who}:\n{_traceback(error)}",
        2 if told else 1,
        follows,
        rank in odd_ranks,
        tuple(getattr(error, "missing", ())),
        follows or bool(odd_ranks and rank not in odd_ranks),
    )


def _traceback(error: BaseException) -> str:
    # The frames that started the script say nothing about it.
    trace = error.__traceback__
    while (
        trace is not None and trace.tb_next is not None and _starts_scripts(trace.tb_frame.f_code.co_filename)
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _starts_scripts(file: str) -> bool:
    return "runpy" in file or file.startswith(_STARTERS)


def _frame(error: BaseException) -> str:
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not is_ours(each.filename) and not _starts_scripts(each.filename)
    ]
    # In what others wrote, the library that raised says less than the line that called it.
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def leave(failure: Failure, folder: Path, attempt: int) -> bool:
    """Leave `failure` for the launcher; whether that was possible."""
    kind = "patient" if failure.patient else "cause"
    path = folder / f"{attempt}-{kind}-{failure.rank}.json"
    try:
        half = path.with_suffix(".half")
        half.write_text(json.dumps(dataclasses.asdict(failure)))
        half.replace(path)
    except OSError:
        return False
    return True


def await_cause(folder: Path, attempt: int, within_s: float) -> None:
    """Return when a rank that need not be patient has left its error, or time is up."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and next(folder.glob(f"{attempt}-cause-*.json"), None) is None:
        time.sleep(0.05)


def collect(folder: Path, attempt: int) -> list[Failure]:
    """What the ranks have left."""
    found = []
    for path in sorted(folder.glob(f"{attempt}-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            facts = json.loads(path.read_text())
            found.append(Failure(**{**facts, "missing": tuple(facts["missing"])}))
    return found
