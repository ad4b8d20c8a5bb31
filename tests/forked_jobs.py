"""`python ARGUMENTS` and its ranks, forked from a process that has loaded torch. This saves two seconds of CPU per process.

Everything except exec is as in a real job: the launcher, its ranks, their signals, streams and exit codes. Tests of features of a
new process need a real one: its environment in /proc, which identifies orphans, and the end of the Python interpreter.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import Any, Final, NoReturn

from meshcomm.testing import Pool

_WITHIN_S: Final = 100.0


def after_start(err: str) -> list[str]:
    """Return the lines of stderr, without those about the start, and the notes of torch's store and Gloo about peers that vanish."""
    notes = ("[W", "[/", "[E", "meshcomm: starting ", "meshcomm: the ranks are up ")
    return [line for line in err.splitlines(True) if not line.startswith(notes)]


class Job:
    """Run `python ARGUMENTS` in `folder`, with its output in files there. The pool has already set the fork server's preloads."""

    def __init__(
        self, _: Pool, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, name: str = ""
    ) -> None:
        self._out, self._err = folder / f"{name}out", folder / f"{name}err"
        given = (str(folder), arguments, str(self._out), str(self._err), dict(env or {}))
        self._process = get_context("forkserver").Process(target=_start, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def until_printed(self, line: str) -> None:
        """Wait until some rank has printed this line."""
        deadline = time.monotonic() + _WITHIN_S
        while not self._out.exists() or f"{line}\n" not in self._out.read_text():
            assert self._process.is_alive() and time.monotonic() < deadline, self._err.read_text()
            time.sleep(0.02)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        """Wait for the job. Returns its exit code, or None if it still runs after so many seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """End the launcher, after which the ranks end themselves."""
        self._process.kill()
        self._process.join()

    def finish(self) -> tuple[int, str, str]:
        """Wait for the job. Returns its exit code, stdout and stderr."""
        self._process.join(_WITHIN_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
            raise TimeoutError(self._err.read_text())
        return code, self._out.read_text(), "".join(after_start(self._err.read_text()))


def _start(folder: str, arguments: Sequence[str], out: str, err: str, env: Mapping[str, str]) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from meshcomm.job import reaper, spawn

    reaper.end_with_parent()
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    os.chdir(folder)
    # This process's launcher, or torch's, starts the ranks with it.
    spawn.Popen = subprocess_handler.Popen = _Forked  # type: ignore[attr-defined,misc]
    _become(arguments, os.environ | env)


class _Forked(subprocess.Popen[bytes]):
    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        environment, new_session = more[5], more[-2]
        assert args[0] == sys.executable and new_session
        with warnings.catch_warnings():
            # fork() warns of the thread of the launcher's store, which the child does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            # The launcher's finalizers would remove its temporary folders when this process ends.
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]
            # As of a copy of the standby process: psutil cannot see the variables of a fork.
            Path("/proc/self/comm").write_text(f"rank {environment.get('RANK')}")
            _become(args[1:], environment)


def _become(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Imitate exec and a new Python in this process."""
    try:
        os.setsid()
        os.closerange(3, 4096)
        # The tracker would close its descriptor, whose number now belongs to another file.
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(env)
        for each in signal.valid_signals():
            if callable(signal.getsignal(each)):
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        try:
            code: Any = _run(arguments)
        except SystemExit as left:
            code = left.code
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    finally:
        os._exit(70)


def _run(arguments: Sequence[str]) -> None:
    kind, *words = arguments
    if kind in ("-u", "-P"):
        return _run(words)
    sys.argv = words
    sys.path[0] = os.getcwd()
    if kind == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = list(arguments)
        runpy.run_path(kind, run_name="__main__")
    return None
