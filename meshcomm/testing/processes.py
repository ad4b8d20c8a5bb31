"""Runs a test's body on every rank of its mesh, each a warm process of the pool; and which `via` does what instead."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import pytest

from meshcomm.testing.body import Task, given, on_rank, pack
from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.modules import arguments_of, sources
from meshcomm.testing.outcome import Ends, last_stack, stack_text
from meshcomm.testing.pool import Limits, Pool

Way: TypeAlias = Callable[[pytest.Function, MeshRequest], Ends]
"""Runs a test's body on every rank. Raises MeshTestError or ConfigError where it cannot be begun."""

POOL: pytest.StashKey[Pool] = pytest.StashKey()

# What the others get to say by themselves after one rank has failed.
_SETTLE_S: Final = 2.0
# What ranks get to report a verdict after the test's time is up and their stacks are taken.
_GRACE_S: Final = 2.0


def way(via: str, config: pytest.Config) -> Way:
    """The way that a marker or `--mesh-via` calls `via`."""
    if via == "simulator":
        from meshcomm.testing import simulated

        return simulated.run
    return partial(run, pool=pool_of(config))


def pool_of(config: pytest.Config) -> Pool:
    """The run's warm ranks, forked when they are first asked for."""
    if POOL not in config.stash:
        always = ("torch", "torch.distributed", "meshcomm.mesh", "meshcomm.testing.body")
        config.stash[POOL] = Pool((*always, *config.getini("mesh_preload")))
    return config.stash[POOL]


def run(item: pytest.Function, request: MeshRequest, pool: Pool) -> Ends:
    """The body of `item` on processes of the pool; see `Way`."""
    module, full = item.module.__name__, item.config.getoption("fulltrace")
    task = Task(
        module=module,
        path=(*(node.name for node in item.listchain() if isinstance(node, pytest.Class)), item.originalname),
        table=sources(module),
        config=request.config,
        arguments=arguments_of(item.config),
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
                one,
                text=late if one.state == "late" else one.text,
                stack=stack_text(last_stack(one.stack), full),
            )
            for one in ended
        ]
    )


def _filters() -> tuple[tuple[Any, ...], ...]:
    """The warning filters that pytest has set for this test; classes pickled."""
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
