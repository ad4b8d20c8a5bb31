"""The results of commands as tables and as JSON, and a check that a table has no fact that JSON lacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch

from rich.console import RenderableType

from meshcomm.commands import report
from meshcomm.commands.app import GROUPS, function_of
from meshcomm.show.page import as_text

COMMANDS = [name for names in GROUPS.values() for name in names]


class Shown(NamedTuple):
    """One result of a command. keys: the key of every fact, with [] for the items of a list."""

    keys: frozenset[str]
    json: str
    table: str


@contextmanager
def recorded() -> Iterator[list[Shown]]:
    """Record the results that commands show in this block, and still print them."""
    files = [sys.modules[function_of(name).__module__] for name in COMMANDS]
    found: list[Shown] = []

    def show_facts(
        facts: dict[str, Any],
        as_json: bool,
        view: Callable[[dict[str, Any]], RenderableType],
        width: int = 100,
    ) -> None:
        function = view.func if isinstance(view, partial) else view
        # A closure, or a view with arguments besides options, could show facts that the JSON lacks.
        assert isinstance(function, FunctionType) and function.__closure__ is None, view
        assert "<" not in function.__qualname__, function
        if isinstance(view, partial):
            assert not view.args and all(isinstance(each, bool) for each in view.keywords.values())
        text = json.dumps(facts, indent=2)
        table = as_text(view(facts), width)
        assert as_text(view(json.loads(text)), width) == table
        found.append(Shown(frozenset(keys(facts)), text, table))
        print(text if as_json else table)

    with ExitStack() as patches:
        for file in files:
            if hasattr(file, "show_facts"):
                patches.enter_context(patch.object(file, "show_facts", show_facts))
        yield found


def keys(facts: Any, above: str = "") -> Iterator[str]:
    """The key of every fact within `facts`."""
    if isinstance(facts, dict):
        for name, value in facts.items():
            yield f"{above}.{name}"
            yield from keys(value, f"{above}.{name}")
    elif isinstance(facts, list):
        for item in facts:
            yield from keys(item, f"{above}[]")


def combined(folder: Path) -> str:
    """The text that `meshcomm report` shows of a folder."""
    return as_text(report.view(report.facts_of(folder)), 10_000)
