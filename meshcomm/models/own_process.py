"""Calls a function in a forked copy of this process, so that nothing which it changes is changed here."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Callable

import torch

from meshcomm import errors
from meshcomm.errors import MeshcommError
from meshcomm.launch.reaper import end_with_parent

# As for a worker of a DataLoader: torch's threads do not exist in a copy, so it computes with one.
_THREADS = 1


def in_a_copy(action: Callable[[], str], timeout_s: float) -> str:
    """Return the result of `action`, computed in a copy of this process. Other platforms than Linux call it here.

    Raises the MeshcommError that `action` raises. If it fails otherwise, or takes longer than timeout_s, returns why.
    """
    if not sys.platform.startswith("linux"):
        return action()
    theirs, mine = os.pipe()
    with warnings.catch_warnings():
        # The copy has only this thread, and does not use what other threads hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _answer(action, mine)
    os.close(mine)
    said = b""
    try:
        with os.fdopen(theirs, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], timeout_s)[0] and (part := pipe.read(65536)):
                said += part
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not said:
        return f"a small copy did not run within {timeout_s:g} s, or its process ended"
    why, error = pickle.loads(said)
    if error is not None:
        name, facts = error
        raise getattr(errors, name, MeshcommError)(facts.pop("what"), **facts)
    return str(why)


def _answer(action: Callable[[], str], pipe: int) -> None:
    """Write the result of `action` into the pipe, and end this process."""
    try:
        end_with_parent()
        torch.set_num_threads(_THREADS)
        error, why = None, ""
        try:
            why = action()
        except MeshcommError as raised:
            facts = {name: getattr(raised, name) for name in ("what", "given", "expected", "hint")}
            error = (type(raised).__name__, facts)
        except BaseException as raised:
            why = f"a small copy does not run: {type(raised).__name__}: {raised}"
        with os.fdopen(pipe, "wb") as file:
            file.write(pickle.dumps((why, error)))
    finally:
        os._exit(0)
