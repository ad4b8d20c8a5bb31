"""Which names a dim may have, and which name was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence

from meshcomm.errors import LayoutError


def check_name(name: object, what: str) -> None:
    """A name must be an identifier that einops patterns can hold: no "_" at either end."""
    if not isinstance(name, str) or not name.isidentifier() or name[0] == "_" or name[-1] == "_":
        raise LayoutError(
            f"{name!r} cannot be the name of a {what}",
            given=repr(name),
            expected='letters, digits and inner underscores, not starting with a digit, as in "dp"',
            hint=f"rename the {what}",
        )


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, or None where nothing is near, or several are equally near to a short word.

    >>> nearest_name("pt", ["pp", "dp", "tp"]), nearest_name("DP", ["pp", "dp"]), nearest_name("xp", ["pp", "dp"])
    ('tp', 'dp', None)
    """
    names = list(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.55)
    if not matches and 2 <= len(word) <= 3:
        # One letter of two is below the cutoff, as are letters in another order or case.
        matches = [name for name in names if sorted(name.lower()) == sorted(word.lower())]
        matches = matches or difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    return matches[0] if len(matches) == 1 else None


def merged_name(dims: Sequence[str], taken: Container[str]) -> str:
    """What a merged dim of `dims` is called that nobody has named.

    >>> merged_name(("dp", "cp"), {"dp", "cp", "dp_cp"})
    'dp_cp_all'
    """
    name = "_".join(dims)
    while name in taken:
        name += "_all"
    return name


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A question to the reader, or None where nothing is near.

    >>> did_you_mean("dpx", ["pp", "dp", "tp"])
    'did you mean "dp"?'
    """
    near = nearest_name(word, known)
    return None if near is None else f'did you mean "{near}"?'


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and whether there are more.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, ...'
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
