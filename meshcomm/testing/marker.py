"""Reads and checks the marker `@pytest.mark.mesh(dp=2, tp=2, ...)` without importing torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from meshcomm.errors import MeshcommError, MeshTestError
from meshcomm.layout import Layout

VIAS: Final = ("simulator", "gloo", "emulated_nccl")
TIMEOUT_S: Final = 60.0

_EXAMPLE = "@pytest.mark.mesh(dp=2, tp=2)"


@final
@dataclass(frozen=True)
class MeshRequest:
    """The contents of a marker. Fixtures get this object instead of the mesh, which exists only on the ranks.

    config: the config for `meshcomm.init`. world_size: the number of ranks that run the test's body. skip: why the marker
    excludes the test from `via`, or "".
    """

    via: str
    config: Mapping[str, Any]
    layout: Layout
    world_size: int
    timeout_s: float
    skip: str = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MeshTestError(
            f"mesh.{name} is used in the main process, where no mesh is open",
            given=f"mesh.{name} in a fixture or a hook",
            expected="mesh used in the body of the test, which runs on every rank",
            hint="move it into the test; a fixture's value is created once and passed to every rank",
        )


def vias(marker_via: object, override: str | None) -> tuple[str, ...]:
    """Return the ways to run a test, in order. Raises MeshTestError if one of them is unknown.

    marker_via: the marker's `via`, or None. override: the value of `--mesh-via`, or None.
    """
    if override is not None:
        return (override,)
    if marker_via is None:
        return (VIAS[0],)
    requested = (marker_via,) if isinstance(marker_via, str) else marker_via
    if (
        not isinstance(requested, Sequence)
        or not requested
        or any(via not in VIAS for via in requested)
        or len(set(requested)) != len(requested)
    ):
        raise MeshTestError(
            f"the mesh marker has via={marker_via!r}",
            given=f"via={marker_via!r}",
            expected=f"{', '.join(map(repr, VIAS[:-1]))} or {VIAS[-1]!r}, or a tuple of them",
            hint=f'via={VIAS!r} runs the test through each; default: "{VIAS[0]}"',
        )
    return tuple(requested)


def read(args: Sequence[Any], keywords: Mapping[str, Any], via: str) -> MeshRequest:
    """Return the marker's arguments as a request. Raises MeshTestError, or ConfigError for an invalid mesh.

    args: empty, or one mapping of dims. A mapping allows dim names that are not Python identifiers or that are keywords of
    the marker.
    """
    from meshcomm.config import MeshConfig

    keys = {name for name in MeshConfig.model_fields if name != "dims"}
    keywords_of_marker = {"via", "not_via", "timeout_s", "world_size"}
    dims = _dims(args, keywords, keys | keywords_of_marker)
    timeout_s = keywords.get("timeout_s", TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise MeshTestError(
            f"the mesh marker has timeout_s={timeout_s!r}",
            given=f"timeout_s={timeout_s!r}",
            expected="seconds, more than 0",
            hint=f"default: {TIMEOUT_S:g}",
        )
    mesh = {
        "device": "cpu",
        # A test that hangs must not leave a folder with reports. The test's own report contains the same information.
        "reports": "",
        **{name: value for name, value in keywords.items() if name in keys},
        "dims": dims,
        # Groups time out shortly before the test does, so that they can report the missing ranks.
        "timeout_s": max(timeout_s - 5.0, timeout_s * 0.7),
    }
    skip = _not_via(keywords, via)
    if via == "emulated_nccl" and mesh.get("backend", "auto") in ("auto", "nccl"):
        mesh["backend"] = via
    world = keywords.get("world_size")
    try:
        settings = MeshConfig(**mesh)
        if world is None and settings.ranks is not None:
            world = max(settings.ranks, default=0) + 1
        layout = settings.plan(world).layout
    except MeshcommError:
        raise
    except (TypeError, ValueError) as error:
        raise MeshTestError(
            "the mesh marker cannot be read", given=str(error), expected=_EXAMPLE, hint="see meshcomm.init"
        ) from None
    return MeshRequest(via, {"mesh": mesh}, layout, world or layout.world_size, float(timeout_s), skip)


def _not_via(keywords: Mapping[str, Any], via: str) -> str:
    """Return why the test is not run through `via`, or "" if it is run."""
    refused = keywords.get("not_via", {})
    named = keywords.get("via")
    requested = (named,) if isinstance(named, str) else named or (VIAS[0],)
    if not isinstance(refused, Mapping) or not all(
        via in VIAS and via not in requested and isinstance(why, str) and why for via, why in refused.items()
    ):
        raise MeshTestError(
            f"the mesh marker has not_via={refused!r}",
            given=f"not_via={refused!r}, via={named!r}",
            expected=f"a mapping from names not in via ({', '.join(map(repr, VIAS[:-1]))} or {VIAS[-1]!r}) to reasons",
            hint='not_via={"emulated_nccl": "needs tags"}: skipped, with the reason, under --mesh-via emulated_nccl',
        )
    return str(refused.get(via, ""))


def _dims(args: Sequence[Any], keywords: Mapping[str, Any], known: set[str]) -> dict[str, int]:
    if len(args) > 1 or (args and not isinstance(args[0], Mapping)):
        raise MeshTestError(
            "the mesh marker takes its dims by name",
            given=", ".join(map(repr, args)),
            expected=f"{_EXAMPLE}, or one mapping of dims",
            hint='@pytest.mark.mesh({"dp": 2, "tp": 2}) for names that are not Python names',
        )
    dims: dict[str, int] = dict(args[0]) if args else {}
    for name, value in keywords.items():
        if name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
        if isinstance(value, bool) or not isinstance(value, int) or near:
            raise MeshTestError(
                f"the mesh marker has an unknown keyword {name!r}",
                given=f"{name}={value!r}",
                expected=f"dims with their sizes, or one of {', '.join(sorted(known))}",
                hint=f'{near[0]}=..., or {{"{name}": size}} as the first argument if a dim has that name'
                if near
                else f"{_EXAMPLE}: the size of a dim is an integer",
            )
        if name in dims:
            raise MeshTestError(
                f"the mesh marker names dim {name!r} twice",
                given=f"{name} in the mapping and as a keyword",
                expected="each dim once",
                hint=_EXAMPLE,
            )
        dims[name] = value
    if not dims:
        raise MeshTestError(
            "the test uses the mesh fixture but has no mesh marker",
            given="no dims",
            expected=_EXAMPLE,
            hint="above the test, on its class, or pytestmark = pytest.mark.mesh(dp=2, tp=2) in the module",
        )
    return dims
