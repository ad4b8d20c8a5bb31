"""Names as text: the one that the user probably meant, a list of some, and a merged dim's."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `word`; None if no name is close, or if a short word has several closest names.

    >>> nearest_name("pt", ["pp", "dp", "tp"]), nearest_name("DP", ["pp", "dp"]), nearest_name("xp", ["pp", "dp"])
    ('tp', 'dp', None)
    >>> nearest_name("dpp", ["pp", "dp"])
    'dp'
    """
    names = list(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.55)
    # Of equally close names, one that begins like the word comes first.
    near.sort(key=lambda name: (-difflib.SequenceMatcher(None, name, word).ratio(), name[:1] != word[:1]))
    matches = near[:1]
    if not matches and 2 <= len(word) <= 3:
        # Two-letter names that differ in one letter, in order or in case score below the cutoff.
        matches = [name for name in names if sorted(name.lower()) == sorted(word.lower())]
        matches = matches or difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    return matches[0] if len(matches) == 1 else None


def merged_name(dims: Sequence[str], taken: Container[str]) -> str:
    """Return the default name of a merged dim of `dims`.

    >>> merged_name(("dp", "cp"), {"dp", "cp", "dp_cp"})
    'dp_cp_all'
    """
    name = "_".join(dims)
    while name in taken:
        name += "_all"
    return name


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a suggestion as a question, or None if no name is close.

    >>> did_you_mean("dpx", ["pp", "dp", "tp"])
    'did you mean "dp"?'
    """
    near = nearest_name(word, known)
    return None if near is None else f'did you mean "{near}"?'


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names as text, with "..." if there are more.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, ...'
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
