"""One thing that was looked at: well, doubtful or wrong; what was found, what was expected, what to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final, Literal, TypeAlias

from meshcomm.errors import MeshcommError

Level: TypeAlias = Literal["ok", "warn", "error"]
Facts: TypeAlias = dict[str, Any]

_KEYS: Final = ("level", "what", "given", "expected", "try")


@dataclass(frozen=True, slots=True)
class Finding:
    """level "error": the job will fail. "warn": it may, or is slow, or others can reach it."""

    level: Level
    what: str
    given: str | None = None
    expected: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: MeshcommError, level: Level = "error") -> Finding:
        """What an error would have said."""
        return cls(level, error.what, error.given, error.expected, error.hint)

    @classmethod
    def read(cls, facts: Facts) -> Finding:
        """The reverse of `facts`."""
        return cls(*(facts[key] for key in _KEYS))

    def facts(self) -> Facts:
        """As plain data, with the keys level, what, given, expected, try."""
        return dict(zip(_KEYS, astuple(self), strict=True))

    def __str__(self) -> str:
        text = MeshcommError(self.what, given=self.given, expected=self.expected, hint=self.hint)
        return f"{self.level}: {text}"


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))
