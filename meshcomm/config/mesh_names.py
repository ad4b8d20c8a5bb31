"""Do the names that `[mesh]` uses exist, and does each mean one thing?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshcomm.config.problems import Problem
from meshcomm.config.wording import key_path, toml, whole_toml
from meshcomm.errors import LayoutError
from meshcomm.layout.names import check_name, nearest_name

if TYPE_CHECKING:
    from meshcomm.config.mesh import MeshConfig


def view_name_problems(mesh: MeshConfig) -> Iterator[Problem]:
    """Names of views that no view can have."""
    for view in mesh.views:
        path = key_path(["views", view])
        try:
            check_name(view, "view")
        except LayoutError as error:
            yield Problem.of(path, error)
        if view in mesh.dims or any(view in sizes for sizes in mesh.views.values()):
            yield Problem(
                path,
                "a dim has this name",
                given=f"the view {view}, and the dim {view}",
                expected="a name that no dim has",
                hint=f"rename it, as in mesh.views.{view}_view",
            )


def merge_problems(mesh: MeshConfig) -> Iterator[Problem]:
    """Merged dims that cannot have their name, or cannot merge what they list."""
    homes = {"": mesh.dims, **mesh.views}
    dims = list(dict.fromkeys(name for sizes in homes.values() for name in sizes))
    for name, parts in mesh.merge.items():
        path = key_path(["merge", name])
        given = f"{name} = {toml(parts)}"
        once = list(dict.fromkeys(parts))
        try:
            check_name(name, "merged dim")
        except LayoutError as error:
            yield Problem.of(path, error)
        if name in dims or name in mesh.views:
            yield Problem(
                path,
                f"a {'dim' if name in dims else 'view'} has this name",
                given=given,
                expected="a name that no dim and no view has",
                hint="rename it, as in " + key_path(["mesh", "merge", "_".join(parts)]),
            )
        unknown = [part for part in parts if part not in dims]
        if unknown:
            yield _unknown_parts(mesh, name, parts, unknown, dims)
        elif len(parts) < 2:
            yield Problem(
                path,
                f"merges {len(parts)} dim{'s' if not parts else ''}",
                given=given,
                expected="two or more dims",
                hint=f"use the dim {parts[0]} itself, and remove mesh.{path}"
                if parts
                else f"remove mesh.{path}",
            )
        elif len(set(parts)) != len(parts):
            yield Problem(
                path,
                f"names {next(part for part in parts if parts.count(part) > 1)} twice",
                given=given,
                expected="each dim once",
                hint=f"mesh.{path} = {whole_toml(once)}" if len(once) > 1 else f"remove mesh.{path}",
            )
        elif not any(all(part in sizes for part in parts) for sizes in homes.values()):
            whose = {part: next(v for v, sizes in homes.items() if part in sizes) for part in parts}
            yield Problem(
                path,
                "its dims do not belong to one factorisation of the ranks",
                given=", ".join(
                    f"{part} of {'the base' if not view else f'view {view}'}" for part, view in whose.items()
                ),
                expected="dims of the base, or dims of one view",
                hint="declare a view that has them all",
            )


def _unknown_parts(
    mesh: MeshConfig, name: str, parts: Sequence[str], unknown: Sequence[str], dims: Sequence[str]
) -> Problem:
    merged = [part for part in unknown if part in mesh.merge]
    mended: list[str] = []
    for part in parts:
        if part in mesh.merge and part != name:
            mended.extend(mesh.merge[part])
        else:
            mended.append(part if part in dims else nearest_name(part, dims) or "")
    known = "" not in mended and len(mended) > 1
    path = key_path(["merge", name])
    return Problem(
        path,
        f"{merged[0]} is itself merged" if merged else f"no dim {', '.join(unknown)}",
        given=f"{name} = {toml(parts)}",
        expected="dims out of " + ", ".join(dims),
        hint=f"mesh.{path} = {whole_toml(list(dict.fromkeys(mended)))}" if known else f"remove mesh.{path}",
    )


def option_problems(mesh: MeshConfig) -> Iterator[Problem]:
    """Options for names that the mesh does not have."""
    names = list(
        dict.fromkeys([*mesh.dims, *mesh.merge, *(n for sizes in mesh.views.values() for n in sizes)])
    )
    for name, options in mesh.options.items():
        if name not in names:
            near = nearest_name(name, names)
            path = key_path(["options", name])
            yield Problem(
                path,
                f"no dim {name}",
                given=f"options.{name} = {toml(options)}",
                expected="one of " + ", ".join(names),
                hint=f"remove mesh.{path}" if near is None else f'did you mean "mesh.options.{near}"?',
            )
