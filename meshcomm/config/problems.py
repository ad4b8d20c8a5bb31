"""What is wrong with a configuration, and how all of it becomes one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from meshcomm.errors import ConfigError, MeshcommError

Path: TypeAlias = tuple[str, ...]

# How far to look for a value that fits: far enough for batch sizes and widths, and quick to search.
FURTHEST: Final = 4096


class Near(NamedTuple):
    """In place of a way out: the values nearest to that of `setting` that no rule refuses, `most` at most."""

    setting: str
    most: int = 1
    within: int = 256


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    what: what is wrong, with the arithmetic. expected, given: as in MeshcommError. tries: the ways out; of a rule, they
    may be worked out when it is run for its report.
    key: the path of the setting, as in `mesh.dims.tp`. A rule that leaves out key and given has those of the
    settings that it needs.
    """

    what: str
    expected: str | None = None
    tries: Iterable[str | Near] = ()
    given: str | None = None
    key: str = ""

    @classmethod
    def of(cls, key: str, error: MeshcommError) -> Problem:
        """An error of another layer as a problem of the setting `key`."""
        return cls(error.what, error.expected, [error.hint] if error.hint else [], error.given, key)

    @property
    def hint(self) -> str | None:
        """The ways out as one text; None where there is none."""
        return ", or\n".join(each for each in self.tries if isinstance(each, str)) or None

    def under(self, section: str) -> Problem:
        """The same problem, its key one level deeper."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        what = f"{self.key}: {self.what}"
        return str(MeshcommError(what, given=self.given, expected=self.expected, hint=self.hint))


def report(source: str, problems: Iterable[Problem]) -> ConfigError:
    """All problems of `source` (a file's name, as it was given) as one error."""
    listed = [str(problem) for problem in problems]
    lines = [f"{source}: {len(listed)} problem{'s' if len(listed) > 1 else ''}"]
    for text in listed:
        lines.extend("  " + line for line in text.splitlines())
    return ConfigError("\n".join(lines))


class Broken:
    """Which settings are wrong by themselves, so that no further conclusion is drawn from them."""

    __slots__ = ("_paths",)

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._paths: set[Path] = set(paths)

    def __contains__(self, path: Path) -> bool:
        return path in self._paths

    def add(self, path: Path) -> None:
        """Mark the setting at `path`, and with it all that holds it or lies in it."""
        self._paths.add(path)

    def touches(self, *keys: str) -> bool:
        """Whether one of the settings (`"dims"`, `"options.pp"`) holds, is or lies in a broken one."""
        if not self._paths:
            return False
        wanted = [tuple(key.split(".")) for key in keys]
        return any(all(map(str.__eq__, path, want)) for path in self._paths for want in wanted)

    def under(self, section: str) -> Broken:
        """The broken settings of one section, as that section sees them."""
        # () is a prefix of everything: a section that is broken as a whole is broken in all parts.
        return Broken(path[1:] for path in self._paths if path[0] == section)


def nearest(value: int, fits: Callable[[int], bool], most: int = 2, within: int = FURTHEST) -> Iterator[int]:
    """The whole numbers of 1 or more nearest to `value` for which `fits` holds, nearest first.

    >>> list(nearest(8, lambda n: n % 3 == 0))
    [9, 6]
    """
    for distance in range(1, within):
        for candidate in (value + distance, value - distance):
            if candidate >= 1 and fits(candidate):
                yield candidate
                most -= 1
                if not most:
                    return


def remainder(number: int, by: int) -> str:
    """The arithmetic as text.

    >>> remainder(8, 3)
    '8 % 3 = 2'
    """
    return f"{number} % {by} = {number % by}"


def shared(number: int, by: int) -> str:
    """What a number is for each of `by`, for the text before another number; nothing where there is one.

    >>> shared(32, 2), shared(32, 1)
    ('32/2 = 16, ', '')
    """
    return "" if by == 1 else f"{number}/{by} = {number // by}, "
