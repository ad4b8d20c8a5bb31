"""Which function does a setting such as `build = "module:function"` name?"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def function_of(name: str) -> Callable[..., Any]:
    """It, imported as by a script in the folder that the command is run in. Raises what the import raises."""
    where, _, key = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Callable[..., Any] = getattr(importlib.import_module(where), key)
    return found
