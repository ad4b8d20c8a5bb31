"""`@pytest.mark.mesh_dryrun(...)`: a test's body, or the training of a config, as some ranks of a world that nobody has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import pytest

from meshcomm.config import Config, MeshConfig, load_config
from meshcomm.errors import MeshcommError, MeshTestError, RankFailed

if TYPE_CHECKING:
    from meshcomm.mesh import Mesh

_OWN: Final = {"world", "ranks", "sample", "seed", "overrides"}
_EXAMPLE: Final = (
    '@pytest.mark.mesh_dryrun("configs/train.toml", world=16384), or (world=16384, pp=16, dp=128, tp=8)'
)


@final
@dataclass(frozen=True)
class DryRequest:
    """What the marker says. settings: of the mesh. world: its ranks; ranks, sample, seed: which of them are run."""

    settings: Config
    world: int
    ranks: tuple[int, ...]
    sample: int
    seed: int


def read(args: Sequence[Any], keywords: Mapping[str, Any]) -> DryRequest:
    """The marker's arguments. Raises MeshTestError, or ConfigError for a mesh that cannot be.

    args: a config's path, or one mapping of dims; none where the dims are keywords.
    """
    own = {name: value for name, value in keywords.items() if name in _OWN}
    rest = {name: value for name, value in keywords.items() if name not in _OWN}
    source = args[0] if args else {}
    if len(args) > 1 or (isinstance(source, (str, Path)) and rest) or not (args or rest):
        raise MeshTestError(
            "the marker mesh_dryrun does not say one mesh",
            given=", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in rest.items())])
            or "nothing",
            expected="a config's path, or dims with their sizes",
            hint=_EXAMPLE,
        )
    world = own.get("world")
    try:
        if isinstance(source, (str, Path)):
            settings = load_config(source, own.get("overrides", ()))
        else:
            keys = {name: value for name, value in rest.items() if name in MeshConfig.model_fields}
            dims = {**source, **{name: value for name, value in rest.items() if name not in keys}}
            settings = load_config(
                {"mesh": {"dims": dims, "device": "cpu", **keys}}, own.get("overrides", ())
            )
        settings = settings.resolved(world)
        size = settings.plan(world).layout.world_size
    except (TypeError, ValueError) as error:
        raise MeshTestError(
            "the marker mesh_dryrun cannot be read",
            given=str(error),
            expected=_EXAMPLE,
            hint="see meshcomm.init",
        ) from None
    return DryRequest(settings, size, tuple(own.get("ranks", ())), own.get("sample", 8), own.get("seed", 0))


def facts_of(request: DryRequest) -> dict[str, Any]:
    """What `meshcomm dryrun CONFIG --json` gives. Fails the test where calls do not meet."""
    from meshcomm.dryrun.training import dry_training

    facts = dry_training(request.settings, request.world, request.ranks, request.sample, request.seed)
    _settle(facts["findings"])
    return facts


def run_body(item: pytest.Function, request: DryRequest) -> None:
    """The test's body as ranks of the world, one after the other in this process. Fails the test where one of them
    fails, or calls do not meet.
    """
    from meshcomm.dryrun.script import function_step
    from meshcomm.dryrun.world import dry_world
    from meshcomm.testing.body import arguments_of

    arguments = arguments_of(item)

    def body(mesh: Mesh) -> None:
        item.obj(**arguments, mesh=mesh)

    layout = request.settings.plan(request.world).layout
    pipeline = next((dim for dim in layout.dims if dim == "pp"), None)
    program = partial(function_step, body, request.settings)
    found = dry_world(
        program,
        layout,
        pipeline,
        ranks=request.ranks,
        sample=request.sample,
        seed=request.seed,
        processes=0,
    )
    _settle([finding._asdict() for finding in found.findings])


def tried(what: Any, *args: Any) -> Any:
    """`what(*args)`; a MeshcommError fails the test with its text."""
    try:
        return what(*args)
    except RankFailed as error:
        problem = f"{error}"
    except MeshcommError as error:
        problem = f"{type(error).__name__}: {error}"
    pytest.fail(problem, pytrace=False)


def _settle(findings: Sequence[Mapping[str, Any]]) -> None:
    if findings:
        told = [
            line for each in findings for line in (each["what"], *(f"    {line}" for line in each["lines"]))
        ]
        pytest.fail("\n".join(told), pytrace=False)
