"""Checks the names and sizes of dims, and finds the nearest sizes that fit a world."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from meshcomm.errors import LayoutError


def times(sizes: Mapping[str, int]) -> str:
    """Return the product of the sizes as text.

    >>> times({"pp": 2, "dp": 2, "tp": 3})
    '2*2*3 = 12'
    """
    sizes_known = [size for size in sizes.values() if size != -1]
    text = "*".join(map(str, sizes_known)) or "1"
    return text if len(sizes_known) == 1 else f"{text} = {math.prod(sizes_known)}"


def toml_dims(sizes: Mapping[str, int]) -> str:
    """Return the sizes as written in a config file: `{ dp = 4, tp = 2 }`."""
    # TOML requires quotes around names with non-ASCII letters, which names of dims may contain.
    written = (name if name.isascii() else f'"{name}"' for name in sizes)
    listed = ", ".join(f"{name} = {size}" for name, size in zip(written, sizes.values(), strict=True))
    return f"{{ {listed} }}"


def divisors(n: int) -> list[int]:
    """Return the divisors of `n`, ascending. Above 2^24, only divisors up to 4096 and their quotients are found."""
    small = [d for d in range(1, min(math.isqrt(n), 4096) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def whole(value: Any, what: str) -> int:
    """Return `value` as an int.

    Accepts NumPy's integers; rejects bools, floats and all other types. what: the value's name in the error.
    """
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise LayoutError(
        f"{what} {value!r} is not an int",
        given=f"{value!r}, a {type(value).__name__}",
        expected=f"an int as the {what}; NumPy's integers are accepted",
        hint=f"int({value!r})" if isinstance(value, (bool, float)) else f"a number as the {what}",
    )


def check_mapping(given: Any, where: str, holds: str) -> Mapping[str, Any]:
    """Return `given` if it is a mapping, otherwise raise LayoutError. holds: what the names map to, for the error."""
    if isinstance(given, Mapping):
        return given
    raise LayoutError(
        f"{where} is not a mapping from names to {holds}",
        given=f"{given!r}, a {type(given).__name__}",
        expected=f"a mapping from names to {holds}",
        hint='{"dp": 2, "tp": 4}' if holds == "sizes" else "a dict",
    )


def is_name(name: object) -> bool:
    """Return whether `name` is an identifier that einops patterns accept, which excludes names with "_" at either end."""
    return isinstance(name, str) and name.isidentifier() and "_" not in (name[0], name[-1])


def check_name(name: object, what: str) -> None:
    """Raise LayoutError unless `is_name`. what: what has the name."""
    if not is_name(name):
        raise LayoutError(
            f"{name!r} cannot be the name of a {what}",
            given=repr(name),
            expected='letters, digits and inner underscores, not starting with a digit, as in "dp"',
            hint=f"rename the {what}",
        )


def check_sizes(dims: Mapping[str, int], where: str, open_dim: bool = False) -> dict[str, int]:
    """Return the sizes as plain ints. Raises LayoutError unless `dims` names at least one dim and each size is an
    int of 1 or more.

    where: the name of `dims` in the message. open_dim: accept -1, which `resolve` replaces.
    """
    check_mapping(dims, where, "sizes")
    if not dims:
        hint = f"{where} = {{ dp = 1 }}"
        raise LayoutError(f"{where} is empty", given="no dim", expected="at least one dim", hint=hint)
    checked = {}
    for name, size in dims.items():
        check_name(name, "dim")
        try:
            checked[name] = whole(size, "size")
        except LayoutError:
            checked[name] = 0
        if not (checked[name] >= 1 or (open_dim and checked[name] == -1)):
            raise LayoutError(
                f"{where}.{name} = {size!r} is not a size",
                given=f"{name} = {size!r}",
                expected="an integer of 1 or more",
                hint=f"{where}.{name} = 1 keeps the dim and gives it one rank",
            )
    return checked


def nearest_fits(sizes: Mapping[str, int], world: int, limit: int | None = 3) -> list[dict[str, int]]:
    """Return alternatives to `sizes` that fit `world` and, if possible, change only one dim.

    The alternatives are sorted by the factor of the change, then by dim order. A size of -1 stays -1.
    The list is empty only if neither changing one dim nor giving all ranks to one dim fits.
    """
    found: list[tuple[float, int, dict[str, int]]] = []
    for position, name in enumerate(sizes):
        if sizes[name] == -1:
            continue
        others = math.prod(s for n, s in sizes.items() if n != name and s != -1)
        for candidate in divisors(world):
            fits = world % (others * candidate) == 0 if -1 in sizes.values() else others * candidate == world
            if fits and candidate != sizes[name]:
                distance = abs(math.log(candidate / max(sizes[name], 1)))
                found.append((distance, position, {**sizes, name: candidate}))
    found.sort(key=lambda item: item[:2])
    if not found and sizes:
        # No change to a single dim fits. Shrink each size to its greatest common divisor with the rest
        # of the world, innermost first, and let the outermost take the remainder.
        left = world
        mended = dict.fromkeys(sizes, 1)
        for name in reversed(list(sizes)):
            size = sizes[name]
            if size != -1:
                mended[name] = math.gcd(max(size, 1), left)
                left //= mended[name]
        open_dim = next((n for n, s in sizes.items() if s == -1), next(iter(sizes)))
        mended[open_dim] *= left
        found.append((0.0, 0, mended))
    return [fit for _, _, fit in found[:limit]]


def resolve(
    sizes: Mapping[str, int], world: int | None, what: str = "the mesh", where: str = "dims"
) -> dict[str, int]:
    """Replace a size of -1, and check that the product of all sizes is `world`.

    world: the world size; None if unknown, in which case no size may be -1. what, where: the owner of the
        sizes and their location, as shown in errors.
    Raises LayoutError, which shows the arithmetic and the nearest sizes that fit.
    """
    given = f"{where} = {toml_dims(sizes)}"
    unknown = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(unknown) > 1:
        raise LayoutError(
            f"{what} has {len(unknown)} sizes of -1: {', '.join(unknown)}",
            given=given,
            expected="at most one size of -1; it takes the ranks that the other dims leave",
            hint=f"{where} = {toml_dims({**sizes, **dict.fromkeys(unknown[1:], 1)})}",
        )
    if world is None and unknown:
        raise LayoutError(
            f"{what} leaves {unknown[0]} = -1 open and the world size is unknown",
            given=given,
            expected="a number of processes, or a size for every dim",
            hint=f"--world-size {known * 2}, or --set mesh.dims.{unknown[0]}=2",
        )
    if world is None or (known == world and not unknown):
        return dict(sizes)
    if unknown and world % known == 0:
        return {name: world // known if size == -1 else size for name, size in sizes.items()}
    fitting = [f"{where} = {toml_dims(fit)}" for fit in nearest_fits(sizes, world)]
    processes = max(known, world // known * known) if unknown else known
    raise LayoutError(
        f"{what} does not {'divide' if unknown else 'fit'} the world: {times(sizes)}, world is {world}",
        given=f"{given}, {world} processes",
        expected=f"{world} divisible by the given sizes; {world} % {known} = {world % known}"
        if unknown
        else f"sizes that multiply to {world}",
        hint=", or\n".join([*fitting, *([f"{processes} processes"] if processes != world else [])]),
    )


def check_coord(name: str, coord: int, size: int) -> int:
    """Return `coord` as an int. Raises LayoutError if the dim `name` has no such coord."""
    coord = whole(coord, "coord")
    if not 0 <= coord < size:
        raise LayoutError(
            f"{name}={coord} is outside the mesh",
            given=f"{name}={coord}",
            expected=f"0 to {size - 1}",
            hint=f"{name} has size {size}; coords count from 0",
        )
    return coord


def coords_text(coords: Mapping[str, int]) -> str:
    """Return coords or sizes as text, such as `pp=1 tp=0`."""
    return " ".join(f"{name}={coord}" for name, coord in coords.items())


def rank_text(rank: int, coords: Mapping[str, int] | None) -> str:
    """Return text such as `rank 6 (pp=1 dp=1 tp=0)`. coords: None if unknown, {} if the rank is in no mesh."""
    return f"rank {rank}" if not coords else f"rank {rank} ({coords_text(coords)})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return text such as `rank 3` or `ranks 0 1 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}"


def fold(numbers: Iterable[int], most: int = 8) -> str:
    """Return a short text for a list of integers.

    >>> fold([0, 1, 2, 3]), fold([1, 3, 5, 7, 9, 11, 13, 15, 17, 19])
    ('0 1 2 3', '1 3 5 7 .. 19 (10)')
    """
    listed = [int(number) for number in numbers]
    if len(listed) <= most:
        return " ".join(map(str, listed))
    head = " ".join(map(str, listed[: most // 2]))
    return f"{head} .. {listed[-1]} ({len(listed)})"
