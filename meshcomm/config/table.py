"""A table of a configuration: a dict that keeps its order and cannot be changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator

from meshcomm.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")


class Table(dict[K, V]):
    """A dict that refuses changes. Two tables are equal where their order is equal too.

    >>> Table(dp=2, tp=4) == {"tp": 4, "dp": 2}, Table(dp=2, tp=4) == Table(tp=4, dp=2)
    (True, False)
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return list(self.items()) == list(other.items())
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __copy__(self) -> Table[K, V]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Table[K, V]:
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "a configuration does not change",
            given=f"a change of the table {dict(self)}",
            expected="a new configuration",
            hint='meshcomm.config.load(config, ["mesh.dims.tp=4"])',
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _listed(value: object) -> object:
    # Files hold lists; strict validation wants the tuple that is kept.
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
FrozenTable: TypeAlias = Annotated[Mapping[str, T], AfterValidator(Table)]
FrozenList: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_listed)]
Pair: TypeAlias = Annotated[tuple[T, T], BeforeValidator(_listed)]
