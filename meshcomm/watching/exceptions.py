"""What an exception says: why a backend raised it, which other error it followed from, and the line to show."""

from __future__ import annotations

import re
import sys
import traceback
from enum import Enum
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from meshcomm.errors import CommunicationError, MeshcommError, RankLost, StoreTimeout, TrainingError
from meshcomm.lines import source_line
from meshcomm.watching.callsite import is_ours, is_program, place_in, without_collection

# The prefixes of Gloo's and NCCL's error messages.
_CPP: Final = re.compile(r"\b\w+\.(cc|cpp|h|hpp):\d+")
# Frames of code that only started the user's script.
_STARTERS: Final = tuple(f"{Path(__file__).parents[1]}/{part}" for part in ("commands/", "job/"))


class Reason(Enum):
    """Why a backend ends a call; the value becomes part of the error's text."""

    UNREACHABLE = "could not connect"
    TIMEOUT = "did not end in time"
    CLOSED = "lost a peer"
    DATA = "failed: the received data does not match the call"
    OTHER = "failed"


# Parts of backends' error texts, in lower case; the first match decides. Gloo's are tested with torch 2.11 to 2.15. Gloo
# connects to an address that another rank offered. NCCL's are from ProcessGroupNCCL.cpp and NCCL's own messages.
_TEXTS: Final = (
    (Reason.UNREACHABLE, ("connecting", "connect timeout", "unable to find address")),
    (Reason.CLOSED, ("connection closed", "connection reset", "connection refused", "broken pipe")),
    (Reason.TIMEOUT, ("timed out", "timeout", "failed to pass monitoredbarrier")),
    (Reason.DATA, ("enforce fail", "ncclinvalidusage")),
    (Reason.CLOSED, ("ncclremoteerror", "remote process exited", "communicator was aborted")),
)


# Parts of torch that refuse a mixture of DTensors and plain tensors, or a second call. By file: the mistake, and the call to make.
# The errors of torch's operators name neither; their texts were tried with torch 2.15.
_SAID: Final = (
    "got mixed torch.Tensor and DTensor",
    "must have the same mesh",
    "sharding strategy registered",
    "in-place operations that require placement changes",
    "Muon only supports 2D parameters",
    "initialize the default process group twice",
)
_PARTS: Final = {
    "torch/nn/utils/clip_grad.py": (
        "torch's clip_grad_norm_ takes only DTensors of one DeviceMesh",
        "meshcomm.clip_grad_norm_(parameters, max_norm)",
    ),
    "torch/nn/parallel/distributed.py": (
        "DistributedDataParallel takes no DTensors, which parallelize_module makes of a module's parameters",
        'meshcomm.GradientSync(mesh, "dp", module); or fully_shard(module, mesh=mesh["dp"])',
    ),
    "torch/distributed/distributed_c10d.py": (
        "torch.distributed is initialized already: meshcomm.init does this, unless the program has",
        "leave init_process_group out; or call it before meshcomm.init, which then uses the program's default group",
    ),
    "torch/optim/_adafactor.py": (
        "torch's Adafactor takes no DTensors, because it needs means over whole rows and columns",
        "torch.optim.AdamW; in a config, state_dtype makes its state small",
    ),
    "torch/optim/lbfgs.py": (
        "torch's LBFGS takes no DTensors beside plain tensors, because it makes one vector of all parameters",
        "torch.optim.AdamW or SGD",
    ),
    "torch/optim/_muon.py": (
        "torch's Muon takes matrices, and tensor_parallel gives a third axis to a weight of several parts, such as q, k and v",
        "AdamW for these parameters; a config's groups train them with Muon; or one nn.Linear for each part",
    ),
    "torch/optim/": (
        "an optimizer with fused=True or foreach=True takes no DTensors beside plain tensors",
        "leave the option out; or parameter groups: meshcomm.parallel.optimizer.decay_groups(module)",
    ),
}


def about_torch(error: BaseException) -> MeshcommError | None:
    """Return what to call instead if a part of torch was given DTensors that it does not take, or was called twice."""
    text = first_line(error)
    if not isinstance(error, RuntimeError | ValueError) or not any(said in text for said in _SAID):
        return None
    files = [frame.filename for frame in extract_tb(error.__traceback__)]
    for part, (what, hint) in _PARTS.items():
        if any(part in file for file in files):
            given = f"{text}\nat {place_of(error)}"
            return TrainingError(
                what, given=given, expected="a call that this part of torch takes", hint=hint
            )
    return None


def reason_of(error: BaseException) -> Reason:
    """Return why the backend ended a call. The type of the error takes precedence over its text. The errors in its
    chain of causes are also searched.
    """
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    if isinstance(error, ConnectionError):
        return Reason.CLOSED
    text = text_of(error).lower()
    reason = next((why for why, texts in _TEXTS if any(said in text for said in texts)), Reason.OTHER)
    if reason is Reason.OTHER and error.__cause__ is not None:
        return reason_of(error.__cause__)
    return reason


def text_of(error: BaseException) -> str:
    """Return an error's text, or what Python prints in its place if the error's own `__str__` raises an exception."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)


def hint_about(error: str, otherwise: str) -> str:
    """Return what to try after an error of the backend or of the store: `otherwise`, unless its text says more."""
    return (
        "ulimit -n 4096 in the shell that starts the ranks" if "Too many open files" in error else otherwise
    )


# -- where it was raised ----------------------------------------------------------------------------------


class Raised(NamedTuple):
    """An exception that the program has raised, and that has not ended it. whose: "" for the main thread, or its task."""

    error: BaseException
    whose: str

    def __str__(self) -> str:
        place = place_of(self.error)
        whose = f"its {self.whose}" if self.whose else "it"
        return f"{whose} raised {one_line(self.error)}{f', at {place}' if place else ''}"


def error_under_way() -> str:
    """Return one line about the exception that is ending or has ended the program, or "" if there is none."""
    error = sys.exception() or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else one_line(error)


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *text_of(error).strip().splitlines()[:1]])


def place_of(error: BaseException) -> str:
    """Return the line to show of the traceback of an error, see `place_in`; if there is none, the innermost line outside of
    meshcomm and torch, or the innermost one. Returns "" if the error has no traceback.
    """
    frames = extract_tb(error.__traceback__)[::-1]
    if not frames:
        return ""
    if isinstance(error, SyntaxError) and error.filename and not frames_of(error):
        # The script itself has not begun.
        return source_line(error.filename, error.lineno or 1)
    index = place_in([frame.filename for frame in frames])
    frame = frames[index] if index is not None else [frames[0], *frames_of(error)][-1]
    return f"{source_line(frame.filename, frame.lineno)} in {frame.name}"


def frames_of(error: BaseException) -> list[FrameSummary]:
    """Return the frames of the error's traceback, except the frames of meshcomm and torch, and of what started the script."""
    frames = extract_tb(error.__traceback__)
    return [frame for frame in frames if not is_ours(frame.filename) and "runpy" not in frame.filename]


def handled_by(thread: int) -> BaseException | None:
    """Return the exception that a thread is handling, if any."""
    with without_collection():
        current: Any = sys._current_exceptions().get(thread)
    # A tuple before Python 3.12.
    error: BaseException | None = current[1] if isinstance(current, tuple) else current
    return error


def unawaited() -> list[Raised]:
    """Return the errors of the tasks of asyncio that have ended and that no other task has awaited."""
    loaded: Any = sys.modules.get("asyncio.tasks")
    # The names of Python 3.12 and later, and of 3.11. Both hold weak references to all tasks.
    listed: Any = getattr(loaded, "_scheduled_tasks", None) or getattr(loaded, "_all_tasks", ())
    for _ in range(8):
        try:
            tasks = list(listed)
        except RuntimeError:
            continue  # the program has created a task meanwhile
        # Reading the result would hide the error from the program.
        lost = [task for task in tasks if task.done() and getattr(task, "_log_traceback", False)]
        errors: list[Any] = [getattr(task, "_exception", None) for task in lost]
        return [Raised(error, f"task {task.get_name()}") for task, error in zip(lost, errors, strict=True)]
    return []


def trace_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the frames that only started the script."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        file = trace.tb_frame.f_code.co_filename
        if "runpy" not in file and not file.startswith(_STARTERS):
            break
        trace = trace.tb_next
    return trace


# -- what it followed from --------------------------------------------------------------------------------


def first_cause(error: BaseException) -> BaseException:
    """Return the error in the chain of causes of `error` that other ranks explain; if there is none, the error itself.

    A group follows from other ranks' errors only if all of its errors do; otherwise, return the first that does not.
    """
    if isinstance(error, BaseExceptionGroup):
        causes = [first_cause(exception) for exception in error.exceptions]
        return next((cause for cause in causes if not about_others(cause)), causes[0])
    for link in _chain(error):
        if isinstance(link, BaseExceptionGroup) and link is not error:
            link = first_cause(link)
        if about_others(link):
            return link
    return error


def held_by(error: BaseException) -> BaseException | None:
    """Return the error that the program was raising or handling when it made the call that raised `error`, if any."""
    links = _chain(error)
    contexts = [link.__context__ for link in links if link.__context__ is not link.__cause__]
    # The traceback of an error that a library has raised and handled by itself has no line of the program.
    return next(
        (
            link
            for link in links[1:]
            if any(link is context for context in contexts)
            and not about_others(link)
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
            link_behind
            for link_behind in (link.__cause__, handled)
            if link_behind is not None and not any(link_behind is other for other in chain)
        ]
    return chain


def about_others(error: BaseException) -> bool:
    """Return whether the error itself says that another rank may be the cause."""
    # torch's own errors about a lost store or peer explain the cause no better than meshcomm's errors.
    is_ours = isinstance(error, (CommunicationError, StoreTimeout, dist.DistError))
    named = isinstance(error, MeshcommError) and bool(vars(error).get("mismatched_ranks"))
    return is_ours or named or _of_torch(error)


def _of_torch(error: BaseException) -> bool:
    """Return whether `error` is a backend's own error about a peer or a timeout, which shows only that a call ended."""
    cause = backend_error(error)
    if cause is None:
        return False
    innermost = traceback.extract_tb(cause.__traceback__)[-1:]
    # If the program itself waits for a Work, the frame is the program's, but the text begins with a line of C++.
    return any(is_ours(frame.filename) for frame in innermost) or _CPP.search(text_of(cause)) is not None


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
