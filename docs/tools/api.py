"""Pages of the API from signatures and docstrings: `python docs/tools/api.py` writes them.

docs/reference/api.md has what `import meshcomm` gives, docs/reference/packages.md the packages beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from pydantic import BaseModel

import meshcomm

REFERENCE: Final = Path(__file__).parents[1] / "reference"
_WIDTH: Final = 100
# How sections of a configuration check each other, and what pydantic makes.
_INNER: Final = {"problems", "given", "world_problems", "model_post_init"}
# What hangs on a mesh, and where it is written down.
_OF_A_MESH: Final = {
    "mesh.functional": "meshcomm.comm.functional.Functional",
    "mesh.objects": "meshcomm.comm.objects.Objects",
    "mesh.store": "meshcomm.mesh.store.MeshStore",
}
PACKAGES: Final = (
    "meshcomm.parallel",
    "meshcomm.parallel.tensor",
    "meshcomm.parallel.context",
    "meshcomm.parallel.expert",
    "meshcomm.train",
    "meshcomm.stages",
    "meshcomm.algorithms",
    "meshcomm.topology",
    "meshcomm.costs",
    "meshcomm.place",
    "meshcomm.layout",
    "meshcomm.pattern",
    "meshcomm.config",
    "meshcomm.doctor",
    "meshcomm.testing",
)


class _Written:
    """An annotation as it stands in the source, without the quotes that repr puts around a text."""

    def __init__(self, annotation: object) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        if isinstance(self.annotation, str):
            return self.annotation
        return inspect.formatannotation(self.annotation)


def api() -> str:
    """What `import meshcomm` gives: functions and classes, what hangs on a mesh, all errors."""
    lines = [
        "# API",
        "",
        "Made by `python docs/tools/api.py` from the docstrings; a test compares them. Names that begin with an underscore, and",
        "modules that are neither here nor in [packages](packages.md), may change from one version to the next.",
        "",
    ]
    for name in meshcomm.__all__:
        if name != "MeshcommError":
            lines += _entry(f"meshcomm.{name}", getattr(meshcomm, name))
    for name, path in _OF_A_MESH.items():
        module, _, kind = path.rpartition(".")
        lines += _entry(name, getattr(import_module(module), kind), made_by_mesh=True)
    lines += [
        "## Errors",
        "",
        "All are in `meshcomm.errors`. [Errors](errors.md) has each with a program.",
        "",
    ]
    lines += ["| error | is a | |", "|---|---|---|"]
    for name, kind in vars(import_module("meshcomm.errors")).items():
        if inspect.isclass(kind) and not name.startswith("_") and issubclass(kind, Exception):
            first = inspect.getdoc(kind) or ""
            what = " ".join(first.split("\n\n")[0].split())
            lines.append(f"| `{name}` | `{kind.__bases__[0].__name__}` | {what} |")
    return "\n".join(lines).rstrip() + "\n"


def packages() -> str:
    """The packages beside the front door: every name that their `__all__` lists and the front door lacks."""
    lines = [
        "# Packages",
        "",
        "Made by `python docs/tools/api.py` from the docstrings; a test compares them. What `import meshcomm` gives is in",
        "[API](api.md). Everything here is imported from its package: `from meshcomm.stages import orders`.",
        "",
    ]
    front = [getattr(meshcomm, name) for name in meshcomm.__all__]
    for name in PACKAGES:
        package = import_module(name)
        lines += [f"## {name}", "", " ".join((package.__doc__ or "").split()), ""]
        inner = [import_module(below) for below in PACKAGES if below.startswith(f"{name}.")]
        elsewhere: dict[str, list[str]] = {}
        entries: list[str] = []
        for each in sorted(package.__all__):
            found = getattr(package, each)
            homes = [below.__name__ for below in inner if found is getattr(below, each, None)]
            if homes:
                elsewhere.setdefault(homes[0], []).append(f"`{each}`")
            elif not any(found is known for known in front):
                entries += _entry(each, found, level=3)
        lines += [
            f"Also from [{home}](#{_anchor(home)}): {', '.join(names)}." for home, names in elsewhere.items()
        ]
        lines += ["", *entries] if elsewhere else entries
    return "\n".join(lines).rstrip() + "\n"


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "")


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
    """Public methods and properties with a docstring, in the order of the source, of it and of our bases."""
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
    """Whether a user makes one, by a constructor that says what it takes."""
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
    """The parameter as its source has it; a function as default, whose repr has an address, as `...`."""
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
    """The signature, where it is called by a name, and the docstring as it stands in the source."""
    text = inspect.getdoc(found) or ""
    if name is not None:
        text = f"{_signature(name, found)}\n\n{indent(text, '    ')}".rstrip()
    return ["```text", text, "```", ""] if text else []


if __name__ == "__main__":
    for path, made in ((REFERENCE / "api.md", api()), (REFERENCE / "packages.md", packages())):
        path.write_text(made, encoding="utf-8")
        print(f"written: {path.relative_to(REFERENCE.parents[1])}")
