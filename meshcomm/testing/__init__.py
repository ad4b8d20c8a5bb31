"""A pytest plugin that runs tests on every rank, and a pool of warm rank processes that tests reuse.

The plugin is `meshcomm.testing.plugin`. pytest loads it through its entry point.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshcomm.testing.pool import Pool as Pool
    from meshcomm.testing.pool import RankFailure as RankFailure

__all__ = ["Pool", "RankFailure"]


def __getattr__(name: str) -> Any:
    # The pool is imported lazily, because pytest loads the plugin for every suite, including suites that start no ranks.
    if name not in __all__:
        raise AttributeError(f"module 'meshcomm.testing' has no attribute {name!r}")
    return getattr(import_module("meshcomm.testing.pool"), name)
