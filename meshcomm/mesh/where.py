"""Which ranks does `tp==0 and dp in (0, 1)` mean? A small language over coords; nothing is evaluated by Python."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, final

from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.layout.names import did_you_mean

Known = Mapping[str, int]
Test = Callable[[Known], bool]
Value = str | int

_TOKEN: Final = re.compile(r"\s*(?:(\d+)|([^\W\d]\w*)|(==|!=|<=|>=|[<>(),\[\]]))")
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WORDS: Final = frozenset(("and", "or", "not", "in"))
_EXAMPLE: Final = "as in tp==0 and (dp in (0, 1) or not rank < 4)"


class WhereError(MeshcommError):
    """A coordinate expression that does not read, or that no rank of the mesh can ever match."""


@final
class Where:
    """A condition on a rank, as in `tp==0 and dp==0`.

    Names are the layout's dims, merged dims and views' dims, and `rank`, the global rank. Numbers
    are whole. Comparisons are == != < <= > >= (chained as in `1 <= dp < 3`), `in (0, 2)` and
    `not in (0, 2)`; they are joined by `not`, `and`, `or` (binding in this order) and parentheses.

    Raises: WhereError for an unknown name, for what does not read, and for `tp==5` or `tp in (5,)`
    where tp has no coord 5.
    """

    def __init__(self, text: str, layout: Layout) -> None:
        self.text = text
        self.layout = layout
        reader = _Reader(text, layout)
        self._test = reader.read()
        self._names = reader.names

    def holds(self, rank: int) -> bool:
        """Whether the condition holds for `rank`. A rank outside the mesh has a `rank`, but no coords."""
        known = {"rank": rank}
        if rank in self.layout:
            known |= {name: self.layout.coord(rank, name) for name in self._names if name != "rank"}
        elif self._names - {"rank"}:
            return False
        return self._test(known)


class _Reader:
    """Recursive descent, one method per level of binding."""

    def __init__(self, text: str, layout: Layout) -> None:
        self.text = text
        self.layout = layout
        self.names: set[str] = set()
        self.tokens: list[tuple[str, int]] = []
        self.at = 0

    def read(self) -> Test:
        end = len(self.text.rstrip())
        place = 0
        while place < end:
            match = _TOKEN.match(self.text, place)
            if match is None:
                start = place + len(self.text[place:]) - len(self.text[place:].lstrip())
                char = self.text[start]
                known = {"=": "== compares", "&": "and", "|": "or", "!": "not"}
                near = f"; did you mean {known[char]}?" if char in known else ""
                self._refuse(f"{char!r} means nothing here{near}", start)
            self.tokens.append((match.group(match.lastindex or 0), match.start(match.lastindex or 0)))
            place = match.end()
        if not self.tokens:
            self._refuse("it is empty", 0)
        test = self._either()
        if self._peek():
            self._refuse(f"{self._peek()!r} is too much", self._place())
        return test

    def _either(self) -> Test:
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else lambda known: any(part(known) for part in parts)

    def _both(self) -> Test:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda known: all(part(known) for part in parts)

    def _one(self) -> Test:
        if self._take("not"):
            inner = self._one()
            return lambda known: not inner(known)
        if self._take("("):
            inner = self._either()
            self._need(")")
            return inner
        return self._comparison()

    def _comparison(self) -> Test:
        left = self._value()
        links: list[Test] = []
        while self._peek() in _COMPARISONS:
            compare, sign = _COMPARISONS[self._peek()], self._peek()
            self.at += 1
            place = self._place()
            right = self._value()
            if sign == "==":
                self._possible(left, right, place)
                self._possible(right, left, place)
            links.append(_link(compare, left, right))
            left = right
        if not links:
            return self._membership(left)
        return links[0] if len(links) == 1 else lambda known: all(link(known) for link in links)

    def _membership(self, left: Value) -> Test:
        wanted = not self._take("not")
        if not self._take("in"):
            self._refuse(f"{left} is compared with nothing", self._place())
        closing = ")" if self._take("(") else "]" if self._take("[") else self._refuse(
            "in needs numbers in parentheses", self._place()
        )  # fmt: skip
        members: set[int] = set()
        while not self._take(closing):
            place = self._place()
            member = self._value()
            if isinstance(member, str):
                self._refuse(f"{member} is not a number", place)
            self._possible(left, member, place)
            members.add(member)
            if not self._take(","):
                self._need(closing)
                break
        if not members:
            self._refuse("nothing is in ()", self._place())
        return lambda known: (_of(left, known) in members) == wanted

    def _value(self) -> Value:
        token, place = self._peek(), self._place()
        if token.isdigit():
            self.at += 1
            return int(token)
        if not token or token in _WORDS or not token.isidentifier():
            self._refuse(
                f"a name or a number has to stand {f'where {token!r} is' if token else 'at the end'}", place
            )
        self.at += 1
        if token != "rank" and token not in self.layout.names:
            names = (*self.layout.names, "rank")
            raise WhereError(
                f"the mesh has no dim {token}",
                given=self._shown(place),
                expected="one of " + ", ".join(names),
                hint=did_you_mean(token, names) or f"use {names[0]}",
            )
        self.names.add(token)
        return token

    def _possible(self, name: Value, number: Value, place: int) -> None:
        if not isinstance(name, str) or not isinstance(number, int) or name == "rank":
            return
        size = self.layout.size(name)
        if number >= size:
            raise WhereError(
                f"no rank has {name} {number}",
                given=f"{self._shown(place)}, {name} of size {size}",
                expected="0" if size == 1 else f"a coord from 0 to {size - 1}",
                hint=f"{name}=={size - 1} is the last",
            )

    def _peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _place(self) -> int:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)

    def _take(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self.at += 1
        return True

    def _need(self, token: str) -> None:
        if not self._take(token):
            found = self._peek()
            self._refuse(
                f"{token!r} is missing {f'before {found!r}' if found else 'at the end'}", self._place()
            )

    def _shown(self, place: int) -> str:
        return f"{self.text!r}, at character {place + 1}"

    def _refuse(self, why: str, place: int) -> NoReturn:
        raise WhereError(
            f"the condition does not read: {why}",
            given=self._shown(place),
            expected="comparisons of dims and rank with whole numbers, joined by and, or, not",
            hint=_EXAMPLE,
        )


def _of(value: Value, known: Known) -> int:
    return known[value] if isinstance(value, str) else value


def _link(compare: Callable[[Any, Any], bool], left: Value, right: Value) -> Test:
    return lambda known: compare(_of(left, known), _of(right, known))
