"""Problems in a configuration: a class for one problem, and one error for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, Final, NamedTuple

from meshcomm.errors import ConfigError, LayoutError, MeshcommError

# How many problems of one kind an error lists.
_LISTED: Final = 8
_OPTIONS: Final = "attention bucket_mb reduce_dtype reshard schedule sequence_parallel stages_per_rank"
# Old key -> new key in the same section. The error for an old key names the new key.
RENAMED: Final[dict[str, str]] = {
    "data.sequence": "seq_len",
    "mesh.options.lane": "comm_id",
    "model.ff": "intermediate_size",
    "model.head": "head_dim",
    "model.heads": "num_heads",
    "model.kv_heads": "num_kv_heads",
    "model.layers": "num_layers",
    "model.vocabulary": "vocab_size",
    "model.width": "hidden_size",
    "train.global_batch": "global_batch_size",
    "train.microbatch": "micro_batch_size",
    "train.nonfinite": "on_nonfinite",
    "train.recompute": "activation_checkpointing",
    **{f"parallel.{key}": f"options.{key}" for key in _OPTIONS.split()},
}


class Fit(NamedTuple):
    """A computed fix: up to `most` sizes of the dim with this role that satisfy all rules, nearest first."""

    part: str
    most: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration.

    key: the path of the setting, such as `mesh.dims.tp`. what: what is wrong, with the arithmetic. expected, given: as
         in MeshcommError. tries: possible fixes.
    """

    key: str
    what: str
    expected: str | None = None
    tries: Sequence[str | Fit] = ()
    given: str | None = None

    @property
    def hint(self) -> str | None:
        """The possible fixes as one string, or None if there are none."""
        return ", or\n".join(way for way in self.tries if isinstance(way, str)) or None

    def under(self, section: str) -> Problem:
        """Return the same problem with its key one level deeper."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        what = f"{self.key}: {self.what}"
        return str(MeshcommError(what, given=self.given, expected=self.expected, hint=self.hint))


def report(source: str, problems: Iterable[Problem]) -> ConfigError:
    """Return one error that lists all problems in `source` (the file name as given).

    Of the problems of one section with the same expectation, the first ones are listed in full, and the others are counted.
    """
    kinds: dict[tuple[str, str | None], list[str]] = {}
    lines = []
    for problem in problems:
        alike = kinds.setdefault((problem.key.rpartition(".")[0], problem.expected), [])
        alike.append(problem.key)
        if len(alike) <= _LISTED:
            lines.append(indent(str(problem), "  "))
    for keys in kinds.values():
        if more := keys[_LISTED:]:
            lines.append(f"  {more[0]} .. {more[-1]}: {len(more)} more problems like those of {keys[0]}")
    count = sum(map(len, kinds.values()))
    return ConfigError("\n".join([f"{source}: {count} problem{'s' * (count > 1)}", *lines]))


def refused(key: str, make: Callable[..., object], *args: Any, **options: Any) -> list[Problem]:
    """Call `make`. If it raises a LayoutError, return the error as a problem with the setting `key`."""
    try:
        make(*args, **options)
    except LayoutError as error:
        ways = [error.hint] if error.hint else []
        return [Problem(key, error.what, error.expected, ways, error.given)]
    return []


def nearest(value: int, fitting: Iterable[int], most: int = 2) -> list[int]:
    """Return the `most` numbers in `fitting` that are nearest to `value`, excluding `value` itself. In a tie, the
    larger number comes first.

    >>> nearest(8, range(3, 100, 3))
    [9, 6]
    """
    by_distance = sorted((abs(number - value), -number) for number in fitting if number != value)
    return [-negative for _, negative in by_distance[:most]]


def multiples(number: int, by: int, most: int = 2) -> list[int]:
    """Return the multiples of `by` nearest to `number`, nearest first, excluding `number` itself.

    >>> multiples(34, 16), multiples(5, 8)
    ([32, 48], [8])
    """
    below = number // by * by
    return nearest(number, {below, below + by} - {0}, most)


def remainder(number: int, by: int) -> str:
    """Return a remainder as text: `8 % 3 = 2`."""
    return f"{number} % {by} = {number % by}"


def quotient(number: int, by: int) -> str:
    """Return a division as a text prefix, such as `32/2 = 16, `, or "" for a division by 1."""
    return "" if by == 1 else f"{number}/{by} = {number // by}, "
