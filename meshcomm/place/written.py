"""A placement as a configuration file: the same training on the sizes and the order that were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcomm.config import Config
from meshcomm.config.model import plain
from meshcomm.config.wording import key_path, whole_toml
from meshcomm.errors import ConfigError
from meshcomm.place.search import Placement

# The name of the dim along which experts are copies, where the file has none.
_REPLICA = "edp"


def placed_data(settings: Config, placement: Placement) -> dict[str, Any]:
    """`settings` as a mapping, with the dims, and the expert's view, of `placement`."""
    parallel = settings.parallel
    if parallel is None:
        raise ConfigError("a configuration without training cannot be placed", given=settings.source)
    data: dict[str, Any] = plain(settings.model_dump(exclude_unset=True))
    mesh: dict[str, Any] = data["mesh"]
    mesh["dims"] = {parallel.parts[part]: size for part, size in placement.dims.items()}
    view = settings.expert_view
    if parallel.expert is not None and view is not None:
        mesh["views"] = {view: expert_view(settings, placement)}
    return data


def expert_view(settings: Config, placement: Placement) -> dict[str, int]:
    """The view in which the block of data and context is factored into copies and experts."""
    parallel = settings.parallel
    assert parallel is not None and parallel.expert is not None
    old = settings.mesh.views[settings.expert_view or ""]
    kept = {parallel.pipeline, parallel.tensor, parallel.expert}
    copies = next((name for name in old if name not in kept and name not in settings.mesh.dims), _REPLICA)
    total = placement.dims.get("data", 1) * placement.dims.get("context", 1)
    pair = {copies: total // placement.expert, parallel.expert: placement.expert}
    if not placement.experts_inside:
        pair = dict(reversed(pair.items()))
    found: dict[str, int] = {}
    inside = [part for part in ("data", "context") if placement.dims.get(part, 1) > 1]
    for part, size in placement.dims.items():
        if part in inside:
            found |= pair
        elif part in ("pipeline", "tensor"):
            found[parallel.parts[part]] = size
    return found if inside else {**pair, **found}


def placed_text(settings: Config, placement: Placement, head: str) -> str:
    """The TOML file. head: its first line, without the mark of a comment."""
    lines = [f"# {head}"]
    for section, table in placed_data(settings, placement).items():
        lines += ["", f"[{section}]"]
        lines += [f"{key_path([key])} = {whole_toml(value)}" for key, value in _written(table).items()]
    return "\n".join(lines) + "\n"


def _written(table: Mapping[str, Any]) -> dict[str, Any]:
    """Without settings of None, which TOML does not know and which are the defaults."""
    return {
        key: _written(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
