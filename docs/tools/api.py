"""Generates the API page from signatures and docstrings: `python docs/tools/api.py` writes docs/reference/api.md.

It has the full documentation of the names of `import meshcomm` and of the building blocks for custom training loops, and
one line for each other public name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, Final

from pydantic import BaseModel

import meshcomm

PAGE: Final = Path(__file__).parents[1] / "reference" / "api.md"
_WIDTH: Final = 100
# Methods by which sections of a configuration check each other, and names made by pydantic.
_INNER: Final = {
    *("problems", "world_problems", "given", "written", "place", "rules", "no_effect", "count", "at", "has"),
    "model_post_init",
}
# Attributes of a mesh, and the classes that define them.
_OF_A_MESH: Final = {
    "mesh.functional": "meshcomm.comm.functional.Functional",
    "mesh.objects": "meshcomm.comm.objects.Objects",
    "mesh.store": "meshcomm.mesh.store.MeshStore",
}
# Building blocks of custom training loops.
_BLOCKS: Final = (
    "meshcomm.parallel.Pipelined",
    "meshcomm.train.Callback",
    "meshcomm.testing.Pool",
)
PACKAGES: Final = (
    "meshcomm.parallel",
    "meshcomm.parallel.tensor",
    "meshcomm.parallel.context",
    "meshcomm.parallel.expert",
    "meshcomm.models",
    "meshcomm.train",
    "meshcomm.algorithms",
    *(
        f"meshcomm.predict.{name}"
        for name in ("links", "times", "lint", "stages", "passes", "estimate", "place")
    ),
    "meshcomm.layout",
    "meshcomm.pattern",
    "meshcomm.config",
    "meshcomm.doctor",
    "meshcomm.testing",
)


class _Written:
    """An annotation as written in the source, without the quotes of repr."""

    def __init__(self, annotation: object) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        if isinstance(self.annotation, str):
            return self.annotation
        return inspect.formatannotation(self.annotation)


def api() -> str:
    """The names of `import meshcomm`, attributes of a mesh, building blocks, all errors, and the names of packages."""
    lines = [
        "# API",
        "",
        "This page lists every public name: the arguments, results and errors of each call. `python docs/tools/api.py` generates it from the docstrings; a test compares them.",
        "Names that begin with an underscore, and modules that are not on this page, may change between versions.",
        "",
    ]
    for name in meshcomm.__all__:
        if name != "MeshcommError":
            lines += _entry(f"meshcomm.{name}", getattr(meshcomm, name))
    for name, path in _OF_A_MESH.items():
        lines += _entry(name, _found(path), made_by_mesh=True)
    for path in _BLOCKS:
        lines += _entry(path, _found(path))
    lines += [
        "## Errors",
        "",
        "All errors are in `meshcomm.errors`. The page [Errors](errors.md) shows a program for each.",
        "",
        "| error | is a | |",
        "|---|---|---|",
    ]
    for name, kind in vars(import_module("meshcomm.errors")).items():
        if inspect.isclass(kind) and not name.startswith("_") and issubclass(kind, Exception):
            lines.append(f"| `{name}` | `{kind.__bases__[0].__name__}` | {_first(kind)} |")
    return "\n".join([*lines, *_packages()]).rstrip() + "\n"


def _packages() -> list[str]:
    """A line for each name that a package's `__all__` lists and that is not on the page yet."""
    lines = [
        "",
        "## Packages",
        "",
        "Further public names. Import each from its package, as in `from meshcomm.predict.lint import lint`. `help(lint)`, or an editor, shows the full docstring.",
        "",
        "| name | |",
        "|---|---|",
    ]
    known = [getattr(meshcomm, name) for name in meshcomm.__all__] + [_found(path) for path in _BLOCKS]
    # Inner packages first, so that a name is listed where it is defined.
    for package in (
        import_module(name) for name in sorted(PACKAGES, key=lambda name: (-name.count("."), name))
    ):
        for name in _listed(package):
            found = getattr(package, name)
            if not any(found is each for each in known):
                known.append(found)
                documented = inspect.isclass(found) or inspect.isfunction(found)
                what = _first(found) if documented else "a constant, or a type"
                lines.append(f"| `{package.__name__}.{name}` | {what} |")
    return lines


def _listed(package: ModuleType) -> list[str]:
    """The names in `__all__`, or the functions and classes of a module without it."""
    own = (n for n, it in vars(package).items() if getattr(it, "__module__", None) == package.__name__)
    return sorted(getattr(package, "__all__", None) or (name for name in own if not name.startswith("_")))


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _first(found: Any) -> str:
    """The first paragraph of a docstring, on one line of a table."""
    return " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _entry(name: str, found: Any, *, level: int = 2, made_by_mesh: bool = False) -> list[str]:
    lines = ["#" * level + f" {name}", ""]
    short = name.rpartition(".")[2]
    if inspect.isclass(found):
        lines += _block(short if not made_by_mesh and _has_signature(found) else None, found)
        if issubclass(found, BaseModel):
            lines += ["Keys: see [configuration](config.md).", ""]
        for member, value in _members(found):
            lines += ["#" * (level + 1) + f" {member}", ""]
            lines += _block(member if callable(value) else None, value)
    elif inspect.isfunction(found):
        lines += _block(short, found)
    else:
        lines += ["```text", f"{short} = {found}", "```", ""]
    return lines


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, of a class and its bases in meshcomm, in the order of the source."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("meshcomm"):
            continue
        for name, value in vars(base).items():
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            known = inspect.isfunction(value) or isinstance(value, (property, cached_property))
            public = not name.startswith("_") or name == "__getitem__"
            if known and public and name not in _INNER and name not in seen and value.__doc__:
                seen.add(name)
                yield name, value


def _has_signature(kind: type) -> bool:
    """Whether users create instances by a documented constructor."""
    return not issubclass(kind, BaseModel) and kind.__name__ not in ("Mesh", "Handle")


def _signature(name: str, found: Any) -> str:
    signature = inspect.signature(found)
    parameters = [_plain(each) for each in signature.parameters.values() if each.name != "self"]
    returns = "" if inspect.isclass(found) else _returns(signature)
    short = name + str(signature.replace(parameters=parameters, return_annotation=signature.empty)) + returns
    if len(short) <= _WIDTH:
        return short
    shown: list[str] = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and "*" not in shown and not any(p.startswith("*") for p in shown):
            shown.append("*")
        shown.append(str(each))
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){returns}"])


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter as in the source. A default that is a function is shown as `...`, because its repr has an address."""
    if parameter.annotation is not parameter.empty:
        parameter = parameter.replace(annotation=_Written(parameter.annotation))
    if inspect.isfunction(parameter.default):
        parameter = parameter.replace(default=_Written("..."))
    return parameter


def _returns(signature: inspect.Signature) -> str:
    if signature.return_annotation is signature.empty:
        return ""
    return f" -> {_Written(signature.return_annotation)!r}"


def _block(name: str | None, found: Any) -> list[str]:
    """The signature, if there is a name to call, and the docstring as in the source."""
    text = inspect.getdoc(found) or ""
    if name is not None:
        text = f"{_signature(name, found)}\n\n{indent(text, '    ')}".rstrip()
    return ["```text", text, "```", ""] if text else []


if __name__ == "__main__":
    PAGE.write_text(api(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(PAGE.parents[2])}")
