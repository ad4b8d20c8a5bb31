"""How is a function kept out of what torch.compile makes?"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """As torch.compiler.disable, which imports torch's compiler at once and so takes seconds.

    For functions whose messages must stay where they stand, in the middle of a computation.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disabled: Any = torch.compiler.disable(function)
            result: R = disabled(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return call
