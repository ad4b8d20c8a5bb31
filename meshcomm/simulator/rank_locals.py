"""State that each process has and threads share: saved when a rank stops running, restored when it goes on."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

import torch

from meshcomm.mesh.environment import put

# What a launcher sets for each rank; the rest of the environment is this process's.
_PER_RANK = ("RANK", "LOCAL_RANK")


@final
class RankLocals:
    """The state of one rank while it does not run.

    torch's, Python's and NumPy's random generators, torch's default dtype, RANK and LOCAL_RANK in the
    environment, and, for a script, sys.argv and `__main__`. A process seeds its generators from its host's
    entropy; here they begin differently on each rank and equal in each simulation.

    argv: a script's path and its arguments; empty for a function, whose ranks share `__main__`.
    """

    def __init__(self, rank: int, argv: Sequence[str] = ()) -> None:
        self._torch = torch.Generator().manual_seed(rank).get_state()
        self._python: Any = random.Random(rank).getstate()
        self._rank = rank
        self._numpy: Any = None
        self._dtype = torch.get_default_dtype()
        self._variables: dict[str, str | None] = dict.fromkeys(_PER_RANK, str(rank))
        self._main, self._argv = sys.modules["__main__"], sys.argv
        if argv:
            self._main, self._argv = ModuleType("__main__"), [*argv]
            self._main.__file__ = argv[0]

    @classmethod
    def present(cls) -> RankLocals:
        """The state of the process as it is now; `enter` restores it."""
        found = cls(0)
        found._variables = {name: os.environ.get(name) for name in _PER_RANK}
        found.leave()
        return found

    def leave(self) -> None:
        """Save the state: this rank stops running."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._numpy = numpy.get_bit_generator()
        self._dtype = torch.get_default_dtype()
        self._argv = sys.argv

    def enter(self) -> None:
        """Restore the state: this rank goes on."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            if self._numpy is None:
                self._numpy = numpy.MT19937(self._rank)
            numpy.set_bit_generator(self._numpy)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        put(self._variables)
        sys.modules["__main__"] = self._main
        sys.argv = self._argv
