"""From a configuration to its ranking, and from the chosen mesh to a file that loads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from meshcomm.config import Config, TopologyConfig, load_config
from meshcomm.config.parallel import Part
from meshcomm.config.parse import parse_toml
from meshcomm.config.write import check_ending, plain, toml_text, write_whole
from meshcomm.errors import ConfigError
from meshcomm.layout.names import did_you_mean
from meshcomm.predict.machine import known_machine
from meshcomm.predict.place import (
    Placement,
    Ranking,
    rank_placements,
)
from meshcomm.predict.workload import workload

# The name of the dim along which experts are copies, where the file has none.
_REPLICA = "edp"


def place_config(
    settings: Config, world: int, topology: TopologyConfig, keep: Sequence[str] = (), top: int = 10
) -> Ranking:
    """Rank the meshes of `world` ranks for what `settings` trains.

    topology: as `discovered` gives it. keep: dims whose sizes in the file stay. Raises ConfigError.
    """
    work = workload(settings)
    machine = known_machine(topology, settings.source)
    kept = _kept(settings, keep)
    speed, memory_gb = topology.tflops, topology.memory_gbytes
    return rank_placements(work, world, machine, tflops=speed, memory_gb=memory_gb, keep=kept, top=top)


def write_placement(settings: Config, ranking: Ranking, number: int, path: Path) -> Config:
    """Write placement `number`, counted from 1, as a TOML file, and return what `load` makes of it.

    Raises ConfigError where there is no such placement, the file's name does not end in .toml, or it
    cannot be written.
    """
    if number > len(ranking.placements):
        raise ConfigError(
            f"there is no mesh {number} in the ranking",
            given=f"--choose {number}, {len(ranking.placements)} meshes",
            expected=f"1 to {len(ranking.placements)}",
            hint="--choose 1",
        )
    check_ending(path, "--write", ".toml")
    data = placed_data(settings, ranking.placements[number - 1])
    head = f"{settings.source} on {ranking.world} ranks, number {number} of `meshcomm tune`"
    text = toml_text([head], data)
    # What is written must say what was chosen, before anyone trains by it.
    assert parse_toml(text, str(path))["mesh"]["dims"] == data["mesh"]["dims"]
    load_config(data).resolved(ranking.world)
    write_whole(path, text, given=f"--write {path}")
    return load_config(path)


def placed_data(settings: Config, placement: Placement) -> dict[str, Any]:
    """`settings` as a mapping, with the dims, and the expert's view, of `placement`: the same training on them."""
    parallel = settings.parallel
    if parallel is None:
        raise ConfigError("a configuration without training cannot be placed", given=settings.source)
    data: dict[str, Any] = plain(settings.model_dump(exclude_unset=True))
    data["mesh"]["dims"] = {parallel.parts[part]: size for part, size in placement.dims.items()}
    if parallel.expert is not None and settings.expert_view is not None:
        data["mesh"]["views"] = {settings.expert_view: _expert_view(settings, placement)}
    return data


def _expert_view(settings: Config, placement: Placement) -> dict[str, int]:
    """The view in which the block of data, shard and context is factored into copies and experts."""
    parallel = settings.parallel
    assert parallel is not None and parallel.expert is not None
    old = settings.mesh.views[settings.expert_view or ""]
    kept = {parallel.pipeline, parallel.tensor, parallel.expert}
    copies = next((name for name in old if name not in kept and name not in settings.mesh.dims), _REPLICA)
    block: tuple[Part, ...] = ("data", "shard", "context")
    total = prod(placement.dims.get(part, 1) for part in block)
    pair = {copies: total // placement.expert, parallel.expert: placement.expert}
    if not placement.experts_inside:
        pair = dict(reversed(pair.items()))
    found: dict[str, int] = {}
    inside = [part for part in block if placement.dims.get(part, 1) > 1]
    for part, size in placement.dims.items():
        if part in inside:
            found |= pair
        elif part in ("pipeline", "tensor"):
            found[parallel.parts[part]] = size
    return found if inside else {**pair, **found}


def _kept(settings: Config, keep: Sequence[str]) -> dict[Part, int]:
    assert settings.parallel is not None
    parts = {dim: part for part, dim in settings.parallel.parts.items()}
    sizes = {**settings.mesh.dims, **settings.mesh.views.get(settings.expert_view or "", {})}
    for dim in keep:
        if dim not in parts or sizes[dim] == -1:
            open_size = dim in parts
            raise ConfigError(
                f"the size of {dim} is open" if open_size else f"no part of the training uses a dim {dim}",
                given=f"--keep {dim}" + (f", {dim} = -1" if open_size else ""),
                expected="a dim with a size" if open_size else "one of " + ", ".join(parts),
                hint=f"--set mesh.dims.{dim}=2" if open_size else did_you_mean(dim, parts),
            )
    return {parts[dim]: sizes[dim] for dim in keep}
