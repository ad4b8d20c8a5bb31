"""A test whose body runs on every rank of a job in the pool, and opens its meshes itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from meshcomm.testing import Pool


def on_ranks(count: int, **env: str) -> Callable[[Callable[[], None]], Callable[[Pool], None]]:
    """Decorate a module-level function to run, with its assertions, on each rank. env: variables of every rank."""

    def decorate(body: Callable[[], None]) -> Callable[[Pool], None]:
        def test(pool: Pool) -> None:
            pool.run(_run, body.__module__, body.__name__, ranks=count, env=env)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.__dict__["body"] = body
        return test

    return decorate


def _run(module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).body()
