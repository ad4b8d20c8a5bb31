"""Findings: errors or warnings with a cause and a fix."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

from meshcomm.errors import MeshcommError

Level: TypeAlias = Literal["warn", "error"]
Facts: TypeAlias = dict[str, Any]

_KEYS: Final = ("level", "what", "given", "expected", "try")


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
