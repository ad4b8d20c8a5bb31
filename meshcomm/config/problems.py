"""What is wrong with a configuration, and how all of it becomes one report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from meshcomm.errors import ConfigError, MeshcommError

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    key: the path of the setting, as in `mesh.dims.tp`.
    what: what is wrong with it, with the arithmetic. given, expected, hint: as in MeshcommError.
    """

    key: str
    what: str
    given: str | None = None
    expected: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, key: str, error: MeshcommError) -> Problem:
        """An error of another layer as a problem of the setting `key`."""
        return cls(key, error.what, error.given, error.expected, error.hint)

    def under(self, section: str) -> Problem:
        """The same problem, its key one level deeper."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        return str(
            MeshcommError(
                f"{self.key}: {self.what}", given=self.given, expected=self.expected, hint=self.hint
            )
        )


def report(source: str, problems: Iterable[Problem]) -> ConfigError:
    """All problems of `source` (a file's name, as it was given) as one error."""
    listed = [str(problem) for problem in problems]
    lines = [f"{source}: {len(listed)} problem{'s' if len(listed) > 1 else ''}"]
    for text in listed:
        lines.extend("  " + line for line in text.splitlines())
    return ConfigError("\n".join(lines))


def either(ways: Iterable[str]) -> str | None:
    """Several ways out as one hint; None where there is none."""
    return ", or\n".join(ways) or None


class Broken:
    """Which settings are wrong by themselves, so that no further conclusion is drawn from them."""

    __slots__ = ("_paths",)

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._paths: set[Path] = set(paths)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths)

    def add(self, path: Path) -> None:
        """Mark the setting at `path`, and with it all that holds it or lies in it."""
        self._paths.add(path)

    def touches(self, *keys: str) -> bool:
        """Whether one of the settings (`"dims"`, `"options.pp"`) holds, is or lies in a broken one."""
        for key in keys:
            wanted = tuple(key.split("."))
            for path in self._paths:
                shared = min(len(path), len(wanted))
                if path[:shared] == wanted[:shared]:
                    return True
        return False

    def under(self, section: str) -> Broken:
        """The broken settings of one section, as that section sees them."""
        # () is a prefix of everything: a section that is broken as a whole is broken in all parts.
        return Broken(path[1:] for path in self._paths if path[0] == section)
