"""What a block of Python says about itself, without being run."""

from __future__ import annotations

import ast
import builtins
import io
import symtable
import tokenize
from typing import Any


def free_names(text: str) -> set[str]:
    """Names that a block uses and does not make."""
    top = symtable.symtable(text, "page", "exec")
    made = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for one in table.get_symbols():
            if one.is_referenced() and (table is top or one.is_global()):
                found.add(one.get_name())
        for child in table.get_children():
            visit(child)

    visit(top)
    return found - made - set(dir(builtins))


def opens_a_mesh(tree: ast.Module) -> bool:
    """Whether a block calls meshcomm.init itself, outside of every function."""
    return any(_is_init(node) for node in _outside_functions(tree))


def dims_of_init(tree: ast.Module) -> dict[str, int]:
    for node in _outside_functions(tree):
        if _is_init(node):
            for keyword in node.keywords:
                if keyword.arg == "dims":
                    sizes = ast.literal_eval(keyword.value)
                    return {name: 2 if size == -1 else size for name, size in sizes.items()}
    return {}


def _outside_functions(tree: ast.AST) -> list[Any]:
    found, waiting = [], list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            found.append(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _is_init(node: Any) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("meshcomm.init", "init")


def comments(text: str) -> dict[int, str]:
    """Comments by line; by the negative one where nothing else stands on it."""
    tokens = tokenize.generate_tokens(io.StringIO(text + "\n").readline)
    return {
        one.start[0] * (-1 if one.line.lstrip().startswith("#") else 1): one.string.lstrip("# ")
        for one in tokens
        if one.type == tokenize.COMMENT
    }
