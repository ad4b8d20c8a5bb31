"""What the tests of the documentation share: a page's blocks, how each kind is run, and the tools that make pages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "docs" / "tools"


def tool(name: str) -> Any:
    """A module of docs/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
