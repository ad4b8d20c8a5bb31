"""Which ranks does `tp==0 and dp in (0, 1)` mean? A condition on coords, of which nothing but comparisons is evaluated."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Final, NoReturn, final

from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.layout.names import did_you_mean

_SIGNS: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


class WhereError(MeshcommError):
    """A coordinate expression that does not read, or that no rank of the mesh can ever match."""


@final
class Where:
    """A condition on a rank, as in `tp==0 and dp==0`.

    Names are the layout's dims, merged dims and views' dims, and `rank`, the global rank. Numbers
    are whole. Comparisons are == != < <= > >= (chained as in `1 <= dp < 3`), `in (0, 2)` and
    `not in (0, 2)`; they are joined by `not`, `and`, `or` and parentheses, with Python's meaning.

    Raises: WhereError for an unknown name, for what does not read, and for `tp==5` or `tp in (5,)`
    where tp has no coord 5.
    """

    def __init__(self, text: str, layout: Layout) -> None:
        self.text = text
        self.layout = layout
        self._names: set[str] = set()
        try:
            condition = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            self._refuse(str(getattr(error, "msg", error)), (getattr(error, "offset", None) or 1) - 1)
        self._check(condition.body)
        self._code = compile(condition, "where", "eval")

    def holds(self, rank: int) -> bool:
        """Whether the condition holds for `rank`. A rank outside the mesh has a `rank`, but no coords."""
        known = {"rank": rank}
        if rank in self.layout:
            known |= {name: self.layout.coord(rank, name) for name in self._names - {"rank"}}
        elif self._names - {"rank"}:
            return False
        # `_check` let nothing through but comparisons of these names with numbers.
        return bool(eval(self._code, {"__builtins__": {}}, known))

    def _check(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._check(part)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand)
        elif isinstance(node, ast.Compare) and all(isinstance(sign, _SIGNS) for sign in node.ops):
            pairs = pairwise([node.left, *node.comparators])
            for sign, (left, right) in zip(node.ops, pairs, strict=True):
                self._value(left)
                if not isinstance(sign, (ast.In, ast.NotIn)):
                    self._value(right)
                    if isinstance(sign, ast.Eq):
                        self._possible(left, right)
                        self._possible(right, left)
                elif not isinstance(right, (ast.Tuple, ast.List)) or not right.elts:
                    self._refuse("in needs numbers in parentheses, as in (0, 1) or (0,)", right.col_offset)
                else:
                    for member in right.elts:
                        if isinstance(member, ast.Name):
                            self._refuse(f"{member.id} is not a number", member.col_offset)
                        self._value(member)
                        self._possible(left, member)
        else:
            self._refuse(f"{ast.unparse(node)} is no comparison", node.col_offset)

    def _value(self, node: ast.expr) -> None:
        """Refuse what is neither a whole number nor a name that ranks have."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return
        if not isinstance(node, ast.Name):
            self._refuse(f"{ast.unparse(node)} is neither a name nor a whole number", node.col_offset)
        if node.id != "rank" and node.id not in self.layout.names:
            names = (*self.layout.names, "rank")
            raise WhereError(
                f"the mesh has no dim {node.id}",
                given=self._shown(node.col_offset),
                expected="one of " + ", ".join(names),
                hint=did_you_mean(node.id, names) or f"use {names[0]}",
            )
        self._names.add(node.id)

    def _possible(self, name: ast.expr, number: ast.expr) -> None:
        if not isinstance(name, ast.Name) or not isinstance(number, ast.Constant) or name.id == "rank":
            return
        size = self.layout.size(name.id)
        if number.value >= size:  # type: ignore[operator]
            raise WhereError(
                f"no rank has {name.id} {number.value!r}",
                given=f"{self._shown(number.col_offset)}, {name.id} of size {size}",
                expected="0" if size == 1 else f"a coord from 0 to {size - 1}",
                hint=f"{name.id}=={size - 1} is the last",
            )

    def _shown(self, place: int) -> str:
        return f"{self.text!r}, at character {place + 1}"

    def _refuse(self, why: str, place: int) -> NoReturn:
        raise WhereError(
            f"the condition does not read: {why}",
            given=self._shown(place),
            expected="comparisons of dims and rank with whole numbers, joined by and, or, not",
            hint="as in tp==0 and (dp in (0, 1) or not rank < 4)",
        )
