"""Findings, which are errors or warnings with a cause and a fix, and how they are shown together with facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from meshcomm.errors import MeshcommError
from meshcomm.layout.sizes import coords_text
from meshcomm.show.page import Line
from meshcomm.show.units import count

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

Level: TypeAlias = Literal["warn", "error"]
Facts: TypeAlias = dict[str, Any]

_KEYS: Final = ("level", "what", "given", "expected", "try")
# The style of each level, with errors first.
_STYLES: Final = {"error": "bold red", "warn": "yellow"}


class Finding(NamedTuple):
    """level "error": the job will fail. "warn": the job may fail, may be slow, or may be exposed to others."""

    level: Level
    what: str
    given: str | None = None
    expected: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: MeshcommError, level: Level = "error") -> Finding:
        """Return a finding with the text of an error."""
        return cls(level, error.what, error.given, error.expected, error.hint)

    @classmethod
    def read(cls, facts: Facts) -> Finding:
        """Return the finding that corresponds to plain data from `facts`."""
        return cls(*(facts[key] for key in _KEYS))

    def facts(self) -> Facts:
        """Return the finding as plain data, with the keys level, what, given, expected and try."""
        return dict(zip(_KEYS, self, strict=True))

    def __str__(self) -> str:
        text = MeshcommError(self.what, given=self.given, expected=self.expected, hint=self.hint)
        return f"{self.level}: {text}"


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if any finding is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))


def view(facts: Facts, everything: bool = False) -> Group:
    """Return the findings for a rich console, errors first. everything: whether the other facts follow, key by key."""
    from rich.console import Group

    findings = [Finding.read(found) for found in facts["findings"]]
    levels = [found.level for found in findings]
    headline = f"{count(levels.count('error'), 'error')}, {count(levels.count('warn'), 'warning')}"
    lines: list[RenderableType] = [Line(headline)]
    for level, style in _STYLES.items():
        lines += [Line(str(found), style=style) for found in findings if found.level == level]
    for title, value in facts.items():
        if everything and value and title != "findings":
            rows = value if isinstance(value, list) else [{name: value[name]} for name in value]
            lines += [Line(f"\n{title}"), *(Line(f"  {_text(row)}") for row in rows)]
    return Group(*lines)


def _text(facts: Facts) -> str:
    """Return facts as text, such as `name eth0, up yes, addresses 10.0.0.7`."""
    return ", ".join(f"{name} {_value_text(value)}" for name, value in facts.items())


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return coords_text(value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
