"""One rank's part of a test on real processes: become a fresh process, import the test, open the mesh, run."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist

from meshcomm.errors import CommunicationError
from meshcomm.mesh import Mesh, init
from meshcomm.testing.crossing import OwnMonkeyPatch, Values
from meshcomm.testing.look import Look, explained
from meshcomm.testing.modules import Modules, Source
from meshcomm.testing.outcome import outcome_of
from meshcomm.testing.worker import Held

# What a launcher says to its ranks; everything else in the environment is the main process's.
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@final
@dataclass(frozen=True)
class Task:
    """A test as it is sent to every rank. path: names from the module down to the function."""

    module: str
    path: tuple[str, ...]
    table: Mapping[str, Source]
    codes: str
    labels: tuple[str, ...]
    config: Mapping[str, Any]
    look: Look
    environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    filters: tuple[tuple[Any, ...], ...]
    values: Values


def on_rank(data: bytes) -> Held:
    """Run the pickled Task; its value is the Outcome."""
    task: Task = pickle.loads(data)
    _refresh(task)
    label = task.labels[int(os.environ["RANK"])]
    opened: list[Mesh] = []
    with warnings.catch_warnings(record=True) as log, explained(task.look):
        outcome = outcome_of(lambda: _run(task, opened), label, task.look, follows=_follows)
    noted = tuple((str(one.message), one.category, one.filename, one.lineno) for one in log)
    outcome = replace(outcome, warnings=_crossing(noted))
    # A failed rank's mesh stays open: closing it would break what the others are in, and they would
    # report that instead of what they had to say.
    return Held(outcome, alive=opened, reusable=not dist.is_initialized())


def _run(task: Task, opened: list[Mesh]) -> None:
    warnings.resetwarnings()
    for filter_ in reversed(task.filters):
        _apply(*filter_)
    owner: Any = importlib.import_module(task.module)
    values = task.values.load()
    for name in task.path[:-1]:
        owner = getattr(owner, name)
    if len(task.path) > 1:
        owner = owner()
        owner.__dict__.update(values.of_self)
    function: Callable[..., object] = getattr(owner, task.path[-1])
    arguments = dict(values.arguments)
    patches = {
        name: pytest.MonkeyPatch() for name, value in arguments.items() if isinstance(value, OwnMonkeyPatch)
    }
    opened.append(init(task.config))
    try:
        function(**{**arguments, **patches, "mesh": opened[0]})
    except (pytest.skip.Exception, pytest.xfail.Exception):
        opened[0].close()
        raise
    finally:
        for patch in patches.values():
            patch.undo()
    opened[0].close()


def _follows(error: BaseException) -> bool:
    """A broken connection or a call that did not end: most likely another rank has failed first."""
    return isinstance(error, CommunicationError)


def _refresh(task: Task) -> None:
    """Nothing that an earlier test left behind in this process may be seen by this one."""
    kept = {name: os.environ[name] for name in _LAUNCHER}
    os.environ.clear()
    os.environ.update({**task.environ, **kept})
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    importlib.invalidate_caches()
    _modules().use(task.table, Path(task.codes))
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # to ask costs nothing, to set imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _modules() -> Modules:
    """This rank's finder; sys.meta_path is where finders live."""
    for finder in sys.meta_path:
        if isinstance(finder, Modules):
            return finder
    sys.meta_path.insert(0, Modules())
    return _modules()


def _apply(action: Any, message: str, category: bytes, module: str, line: int) -> None:
    try:
        kind = pickle.loads(category)
    except Exception:
        return  # a warning of a module that the ranks have not imported: none of it can come up here
    warnings.filterwarnings(action, message, kind, module, line)


def _crossing(noted: tuple[tuple[str, Any, str, int], ...]) -> tuple[Any, ...]:
    kept = []
    for one in noted:
        try:
            pickle.dumps(one)
        except Exception:
            one = (one[0], UserWarning, *one[2:])
        kept.append(one)
    return tuple(dict.fromkeys(kept))
