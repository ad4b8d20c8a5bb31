"""What a process has to itself and a thread does not: put aside when a rank stops, put back when it runs."""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType
from typing import Any, final

import torch

from meshcomm.mesh.environment import put

# What a launcher tells each process of itself. Everything else in the environment is the process's.
_TOLD = ("RANK", "LOCAL_RANK")


@final
class Own:
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
        self._told = None if environment is None else {name: environment.get(name) for name in _TOLD}
        self._main = main
        self._argv = argv

    @classmethod
    def present(cls) -> Own:
        """What is there now: taken by `leave`, to be put back by `enter`."""
        found = cls(0, dict(os.environ), sys.modules["__main__"], sys.argv)
        found.leave()
        return found

    def leave(self) -> None:
        """Remember what is there."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._numpy = numpy.get_bit_generator()
        self._dtype = torch.get_default_dtype()
        if self._argv is not None:
            self._argv = sys.argv

    def enter(self) -> None:
        """Put back what was remembered."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            if self._numpy is None:
                self._numpy = numpy.MT19937(self._rank)
            numpy.set_bit_generator(self._numpy)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        put(self._told or {})
        if self._main is not None:
            sys.modules["__main__"] = self._main
        if self._argv is not None:
            sys.argv = self._argv
