"""Runs a test's body on every rank of its mesh, and tells pytest how it ended."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import unittest
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pytest

from meshcomm.errors import MeshcommError, MeshTestError
from meshcomm.testing.body import Task, on_rank
from meshcomm.testing.crossing import pack
from meshcomm.testing.look import Look, is_users, leads_to_the_test, look_of
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.modules import compiled, sources
from meshcomm.testing.outcome import Outcome
from meshcomm.testing.pool import Ended, Pool, RankFailure
from meshcomm.testing.report import MeshFailure, RankEnd, failure_of, prefixed
from meshcomm.testing.stacks import main_stack

FAILURE: pytest.StashKey[MeshFailure] = pytest.StashKey()
SKIPPED: pytest.StashKey[tuple[str, int, str]] = pytest.StashKey()

# What the others get to say by themselves after one rank has failed.
_SETTLE_S = 2.0

# What ranks get to report a verdict after the test's time is up and their stacks are taken.
_GRACE_S = 2.0


def through_gloo(item: pytest.Function, request: MeshRequest, pool: Pool) -> list[RankEnd]:
    """The body of `item` on processes of the pool."""
    module, path = _where(item)
    arguments, of_self = given(item)
    table = sources(module)
    source = table[module]
    if source.rewrite and source.file is not None:
        compiled(source.file, source.stamp, pool.folder)
    look = look_of(item.config)
    task = Task(
        module=module,
        path=path,
        table=table,
        codes=str(pool.folder),
        labels=tuple(request.label(rank) for rank in range(request.world_size)),
        config=request.config,
        look=look,
        environ=dict(os.environ),
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        filters=_filters(),
        values=pack(item.name, arguments, of_self),
    )
    ended = pool.call(
        on_rank,
        (pickle.dumps(task),),
        ranks=request.world_size,
        timeout_s=request.timeout_s,
        capture=True,
        failed=_failed,
        settle_s=_SETTLE_S,
        grace_s=_GRACE_S,
    )
    return [
        RankEnd(
            rank=rank,
            outcome=one.value if one.state == "returned" else None,
            text=_text(one, request),
            died=one.state in ("died", "raised"),
            stack=_stack(one.stack, look),
            out=one.out,
            err=one.err,
        )
        for rank, one in enumerate(ended)
    ]


def _stack(text: str, look: Look) -> str:
    if look.full:
        return main_stack(text, lambda path: True, lambda path: False)
    return main_stack(text, is_users, leads_to_the_test)


def _failed(outcome: Outcome) -> bool:
    return outcome.kind not in ("passed", "skipped")


def _text(one: Ended, request: MeshRequest) -> str:
    return one.text if one.state != "late" else f"did not return within {request.timeout_s:g} s"


def settle(
    item: pytest.Function,
    request: MeshRequest,
    ends: Sequence[RankEnd],
    verdict: MeshcommError | None = None,
) -> None:
    """Print what the ranks printed, and return, skip, xfail or raise as they did.

    verdict: on all ranks together, a deadlock say.
    """
    __tracebackhide__ = True
    _tell(request, ends)
    outcomes = [end.outcome for end in ends if end.outcome is not None]
    for outcome in outcomes:
        if outcome.kind == "exited":
            pytest.exit(outcome.reason)
    expected = next((outcome for outcome in outcomes if outcome.kind == "xfailed"), None)
    if expected is not None and not any(end.died for end in ends) and not _any(outcomes, "failed"):
        # Those that still waited did so for the ranks that had given up.
        pytest.xfail(expected.reason)
    failure = failure_of(ends, request, "" if verdict is None else f"{type(verdict).__name__}: {verdict}")
    if failure is not None:
        item.stash[FAILURE] = failure
        if verdict is not None:
            raise verdict
        _raise(ends, request)
    if outcomes and all(outcome.kind == "skipped" for outcome in outcomes):
        first = outcomes[0]
        item.stash[SKIPPED] = (first.path, first.line, f"Skipped: {first.reason}")
        pytest.skip(first.reason)


def _any(outcomes: Sequence[Outcome], kind: str) -> bool:
    return any(outcome.kind == kind and not outcome.after for outcome in outcomes)


def _tell(request: MeshRequest, ends: Sequence[RankEnd]) -> None:
    for end in ends:
        sys.stdout.write(prefixed(end.out, request.layout, end.rank))
        sys.stderr.write(prefixed(end.err, request.layout, end.rank))
        if end.outcome is not None and end.outcome.kind == "skipped":
            sys.stdout.write(prefixed(f"skipped: {end.outcome.reason}", request.layout, end.rank))
    noted = dict.fromkeys(one for end in ends if end.outcome is not None for one in end.outcome.warnings)
    for text, category, file, line in noted:
        warnings.warn_explicit(text, category, file, line)


def _raise(ends: Sequence[RankEnd], request: MeshRequest) -> NoReturn:
    """The first failing rank's own exception where it can be had, so that xfail(raises=...) and the like work."""
    __tracebackhide__ = True
    failed = [end for end in ends if end.outcome is not None and end.outcome.kind == "failed"]
    failed.sort(key=lambda end: end.outcome is not None and end.outcome.after)
    texts = {end.rank: end.text for end in ends if end.outcome is None}
    texts |= {end.rank: end.outcome.reason for end in failed if end.outcome is not None}
    if failed and not any(end.died for end in ends):
        outcome = failed[0].outcome
        assert outcome is not None
        if outcome.error is not None:
            error = pickle.loads(outcome.error)
            # Those that would end the whole run, or mean something else here, are only told of.
            if not isinstance(error, (KeyboardInterrupt, GeneratorExit, unittest.SkipTest)):
                raise error
    raise RankFailure(texts, request.world_size)


def _where(item: pytest.Function) -> tuple[str, tuple[str, ...]]:
    """The test's module, and the names that lead from there to its function."""
    names = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return item.module.__name__, (*names, item.originalname)


def given(item: pytest.Function) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The arguments of the test's function but for `mesh`, and what has been set on `self`.

    Raises MeshTestError for a body that cannot run on ranks.
    """
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
            expected="the same examples on all ranks; every rank would draw its own",
            hint="pytest.mark.parametrize over seeds, and draw from torch.Generator inside the test",
        )
    names = item._fixtureinfo.argnames
    arguments = {name: item.funcargs[name] for name in names if name != "mesh"}
    return arguments, dict(vars(item.instance)) if item.cls is not None else {}


def _filters() -> tuple[tuple[Any, ...], ...]:
    """The warning filters that pytest has set for this test."""
    sent = []
    for action, message, category, module, line in warnings.filters:
        try:
            kind = pickle.dumps(category)
        except Exception:
            continue  # a class that only this process has
        sent.append((action, _pattern(message), kind, _pattern(module), line))
    return tuple(sent)


def _pattern(regex: Any) -> str:
    return regex if isinstance(regex, str) else "" if regex is None else regex.pattern
