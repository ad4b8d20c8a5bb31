"""One thing about a mesh that would cost time or fail, and what to try."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshcomm.errors import MeshcommError


class Finding(NamedTuple):
    """rule: its name. what: the finding, and why it matters. given, expected, hint: as in MeshcommError."""

    rule: str
    what: str
    given: str
    expected: str
    hint: str | None

    def facts(self) -> dict[str, Any]:
        """As plain data, with the keys rule, what, given, expected, try."""
        return {
            "rule": self.rule,
            "what": self.what,
            "given": self.given,
            "expected": self.expected,
            "try": self.hint,
        }

    def __str__(self) -> str:
        error = MeshcommError(
            f"{self.rule}: {self.what}", given=self.given, expected=self.expected, hint=self.hint
        )
        return str(error)
