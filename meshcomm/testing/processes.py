"""Runs a test's body on the pool's processes: sends the test with its fixtures and parameters to each rank and runs it.

pytest imports test modules by its own rules (rootdir, import modes) and rewrites their asserts, but only in its own
process. Therefore each rank creates a pytest.Config, which installs pytest's import hook, and looks up files in a table.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import random
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.abc import MetaPathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, final

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CommunicationError, MeshTestError
from meshcomm.mesh import Mesh, init
from meshcomm.testing import emulated_nccl
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.pool import Held, Limits, Pool
from meshcomm.testing.report import PYTEST, Ends, last_stack, outcome_of, stack_text

POOL: pytest.StashKey[Pool] = pytest.StashKey()

# How many seconds the other ranks may take to report after one rank has failed.
_SETTLE_S: Final = 2.0
# How many seconds ranks may take to report a verdict after the test's time is up and their stacks were taken.
_GRACE_S: Final = 2.0
# The variables that a launcher sets for its ranks. All other variables are copied from the main process.
_LAUNCHER: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Values:
    """The arguments of a test function except `mesh`, and the attributes of its `self`."""

    arguments: Mapping[str, Any]
    of_self: Mapping[str, Any]


@final
@dataclass(frozen=True)
class _OwnMonkeyPatch:
    """A placeholder for the fixture `monkeypatch`. Every rank creates a MonkeyPatch and undoes it after the body."""


def given(item: pytest.Function) -> Values:
    """Return the values that a test's function receives. Raises MeshTestError if the body cannot run on ranks."""
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        raise MeshTestError(
            f"{item.name} is async",
            given="an async test function",
            expected="a plain function: it is called on every rank",
            hint="asyncio.run inside the test",
        )
    if getattr(item.obj, "is_hypothesis_test", False):
        raise MeshTestError(
            f"{item.name} draws its examples with hypothesis",
            given="@given on a test that runs on every rank",
            expected="the same examples on all ranks; with hypothesis, each rank draws its own",
            hint="pytest.mark.parametrize over seeds, and draw from torch.Generator inside the test",
        )
    names = [
        name for name in inspect.signature(item.obj).parameters if name in item.funcargs and name != "mesh"
    ]
    arguments = {name: item.funcargs[name] for name in names}
    return Values(arguments, dict(vars(item.instance)) if item.cls is not None else {})


def pack(test: str, values: Values) -> bytes:
    """Return the pickled values. Raises a MeshTestError that names any value that cannot be sent to the ranks."""
    patches = {
        name: _OwnMonkeyPatch()
        for name, value in values.arguments.items()
        if isinstance(value, pytest.MonkeyPatch)
    }
    values = replace(values, arguments={**values.arguments, **patches})
    try:
        return pickle.dumps(values)
    except Exception as error:
        of_self = {f"self.{name}": value for name, value in values.of_self.items()}
        raise _uncrossed(test, {**values.arguments, **of_self}, error) from None


def _uncrossed(test: str, named: Mapping[str, object], error: Exception) -> MeshTestError:
    """Return an error that names the value that cannot be pickled, or all values if each can be pickled separately."""
    culprit = ", ".join(named)
    hint = "values that can be pickled together"
    for name, value in named.items():
        try:
            pickle.dumps(value)
        except Exception as own:
            culprit, hint = name, _hint(name, value)
            error = type(own)(f"a {type(value).__module__}.{type(value).__qualname__}: {own}")
            break
    return MeshTestError(
        f"{culprit} cannot be given to the ranks of {test}",
        given=f"{culprit}, {error}",
        expected="fixtures and parameters that can be pickled: they are created once, in the main process, and every "
        "rank gets a copy",
        hint=hint,
    )


def _hint(name: str, value: object) -> str:
    if (getattr(sys.modules.get(type(value).__module__), "__file__", None) or "").startswith(PYTEST):
        return f"{name} belongs to pytest and stays in the main process; use it in a fixture, not in the test"
    if callable(value):
        return "a function at the top of a module, or functools.partial of one; lambdas cannot be pickled"
    return "create it inside the test, or let the fixture return the values it is created from"


class Source(NamedTuple):
    """The source of one module. search: the folders of a package. rewritten: whether pytest rewrites its asserts."""

    file: str | None
    search: tuple[str, ...] | None
    rewritten: bool


@final
@dataclass(frozen=True)
class Task:
    """A test in the form that every rank receives.

    path: the names that lead from the module to the function. full: whether to show all frames of a traceback.
    values: the pickled `Values`.
    """

    module: str
    path: tuple[str, ...]
    table: Mapping[str, Source]
    config: Mapping[str, Any]
    full: bool
    environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    filters: Sequence[bytes]
    values: bytes


# -- in the main process ----------------------------------------------------------------------------


def pool_of(config: pytest.Config) -> Pool:
    """Return the session's pool of warm ranks, which is created on first use."""
    if POOL not in config.stash:
        always = ("torch", "torch.distributed", "meshcomm.mesh", "meshcomm.testing.processes")
        config.stash[POOL] = Pool((*always, *config.getini("mesh_preload")))
    return config.stash[POOL]


def run(item: pytest.Function, request: MeshRequest, pool: Pool) -> Ends:
    """Run the body of `item` on ranks that are processes of the pool. Raises MeshTestError if it cannot be started."""
    module, full = item.module.__name__, item.config.getoption("fulltrace")
    task = Task(
        module=module,
        path=(*(node.name for node in item.listchain() if isinstance(node, pytest.Class)), item.originalname),
        table=sources(module),
        config=request.config,
        full=full,
        environ=dict(os.environ),
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        filters=_filters(),
        values=pack(item.name, given(item)),
    )
    ended = pool.call(
        partial(on_rank, pickle.dumps(task)),
        ranks=request.world_size,
        limits=Limits(request.timeout_s, _SETTLE_S, _GRACE_S),
        capture=True,
        failed=lambda outcome: outcome.kind not in ("passed", "skipped"),
    )
    late = f"did not return within {request.timeout_s:g} s"
    return Ends(
        [
            replace(
                end,
                text=late if end.state == "late" else end.text,
                stack=stack_text(last_stack(end.stack), full),
            )
            for end in ended
        ]
    )


def sources(wanted: str) -> dict[str, Source]:
    """Return the modules of this process that a rank could not import, or could import only without rewritten asserts.

    wanted: a module that is always included.
    """
    libraries = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), *meshcomm.__path__)
    names = {wanted}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and _is_rewritten(module) and not file.startswith(libraries):
            names.add(name)
    with_parents = {parent for name in names for parent in accumulate(name.split("."), "{}.{}".format)}
    return {name: _source(sys.modules[name]) for name in sorted(with_parents) if name in sys.modules}


def _is_rewritten(module: ModuleType) -> bool:
    # pytest's import hook is the loader of the modules that it finds. Python's finders use separate loaders.
    return any(getattr(module, "__loader__", None) is finder for finder in sys.meta_path)


def _source(module: ModuleType) -> Source:
    file, search = getattr(module, "__file__", None), getattr(module, "__path__", None)
    if file is not None and not Path(file).exists():
        file = None
    # pytest creates packages without a file or folders. Modules in these are found only through the table.
    folders = None if search is None and file is not None else tuple(search or ())
    return Source(file, folders, _is_rewritten(module))


def _filters() -> list[bytes]:
    """Return the arguments of warnings.filterwarnings that lead to the filters of this test, the last filter first."""
    sent = []
    for action, message, category, module, line in reversed(warnings.filters):
        patterns = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        with suppress(Exception):  # a class that exists only in this process
            sent.append(pickle.dumps((action, patterns[0], category, patterns[1], line)))
    return sent


# -- on a rank --------------------------------------------------------------------------------------


def on_rank(data: bytes) -> Held:
    """Run a pickled Task. The value of the result is the Outcome."""
    task: Task = pickle.loads(data)
    _refresh(task)
    opened: list[Mesh | ExitStack] = []
    with warnings.catch_warnings(record=True) as log:
        # A CommunicationError most likely means that another rank failed first.
        outcome = outcome_of(partial(_run, task, opened), task.full, CommunicationError)
    noted = dict.fromkeys(
        (str(warning.message), _known(warning.category), warning.filename, warning.lineno) for warning in log
    )
    # The mesh of a failed rank stays open. If it were closed, the calls of other ranks would break, and these ranks
    # would report that instead of their own failures.
    return Held(replace(outcome, warnings=tuple(noted)), opened, reusable=not dist.is_initialized())


def _known(category: type[Warning]) -> type[Warning]:
    """Return a warning category that the main process knows. A category that cannot be pickled becomes UserWarning."""
    try:
        pickle.dumps(category)
    except Exception:
        return UserWarning
    return category


def _run(task: Task, opened: list[Mesh | ExitStack]) -> None:
    warnings.resetwarnings()
    for pickled in task.filters:
        with suppress(Exception):  # a class that this rank cannot load
            warnings.filterwarnings(*pickle.loads(pickled))
    owner: Any = importlib.import_module(task.module)
    values: Values = pickle.loads(task.values)
    for name in task.path[:-1]:
        owner = getattr(owner, name)
    if len(task.path) > 1:
        owner = owner()
        owner.__dict__.update(values.of_self)
    function: Callable[..., object] = getattr(owner, task.path[-1])
    patch = pytest.MonkeyPatch()
    arguments = {
        name: patch if isinstance(value, _OwnMonkeyPatch) else value
        for name, value in values.arguments.items()
    }
    # If the body fails, the stack stays open, like the mesh.
    stack = ExitStack()
    opened.append(stack)
    if task.config["mesh"].get("backend") == emulated_nccl.NAME:
        stack.enter_context(emulated_nccl.emulated_nccl())
    mesh = init(task.config)
    opened.append(mesh)
    stack.callback(mesh.close)
    try:
        function(**{**arguments, "mesh": mesh})
    except (pytest.skip.Exception, pytest.xfail.Exception):
        stack.close()
        raise
    finally:
        patch.undo()
    stack.close()


def _refresh(task: Task) -> None:
    """Remove all traces of earlier tests from this process."""
    of_launcher = {name: os.environ[name] for name in _LAUNCHER}
    os.environ.clear()
    os.environ.update({**task.environ, **of_launcher})
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    importlib.invalidate_caches()
    # Find or create this rank's finder in sys.meta_path.
    finder = next((finder for finder in sys.meta_path if isinstance(finder, Modules)), None)
    if finder is None:
        finder = Modules()
        sys.meta_path.insert(0, finder)
    finder.use(task.table)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # reading is free; setting imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


@final
class Modules(MetaPathFinder):
    """Finds the modules of a table. Each rank has one, in the first position of sys.meta_path."""

    def __init__(self) -> None:
        before = list(sys.meta_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            patch.delenv("PYTEST_PLUGINS", raising=False)
            pytest.Config.fromdictargs({}, ["-c", os.devnull, "--noconftest"])
        self._hook: Any = next(finder for finder in sys.meta_path if finder not in before)
        self._table: Mapping[str, Source] = {}

    def use(self, table: Mapping[str, Source]) -> None:
        """Use a new table. A module that was loaded from a different file is imported again when it is needed."""
        for name, source in table.items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec and source.rewritten and (spec.loader, spec.origin) != (self._hook, source.file):
                inside = [module for module in sys.modules if module == name or module.startswith(f"{name}.")]
                for module in inside:
                    del sys.modules[module]
        self._table = dict(table)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        source = self._table.get(fullname)
        if source is None:
            return None
        search = None if source.search is None else list(source.search)
        if source.file is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = search or []
            return spec
        loader = self._hook if source.rewritten else None
        return importlib.util.spec_from_file_location(
            fullname, source.file, loader=loader, submodule_search_locations=search
        )
