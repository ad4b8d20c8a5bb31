"""State that each process has and threads share: saved when a rank stops running, restored when it goes on."""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType
from typing import Any, final

import torch

from meshcomm.mesh.environment import put

# What a launcher sets for each rank; the rest of the environment is this process's.
_PER_RANK = ("RANK", "LOCAL_RANK")


@final
class RankLocals:
    """The state of one rank while it does not run.

    torch's, Python's and NumPy's random generators, torch's default dtype, sys.argv, `__main__`, and
    RANK and LOCAL_RANK in the environment. A process seeds its generators from its host's entropy;
    here they begin differently on each rank and equal in each simulation.

    main: the module that stands as `__main__` while the rank runs; None leaves what is there.
    """

    def __init__(
        self,
        rank: int,
        environment: dict[str, str] | None,
        main: ModuleType | None = None,
        argv: list[str] | None = None,
    ) -> None:
        generator = torch.Generator()
        generator.manual_seed(rank)
        self._torch = generator.get_state()
        self._python: Any = random.Random(rank).getstate()
        self._rank = rank
        self._numpy: Any = None
        self._dtype = torch.get_default_dtype()
        self._variables = None if environment is None else {name: environment.get(name) for name in _PER_RANK}
        self._main = main
        self._argv = argv

    @classmethod
    def present(cls) -> RankLocals:
        """The state of the process as it is now; `enter` restores it."""
        found = cls(0, dict(os.environ), sys.modules["__main__"], sys.argv)
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
        if self._argv is not None:
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
        put(self._variables or {})
        if self._main is not None:
            sys.modules["__main__"] = self._main
        if self._argv is not None:
            sys.argv = self._argv
