"""Which part does each dim play, as the configuration says or as its name does?"""

from __future__ import annotations

from typing import Final

from meshcomm.config import Config
from meshcomm.config.parallel import Part

# What dims are usually called, where no [parallel] says what they do.
_NAMES: Final[dict[str, Part]] = {
    "tp": "tensor",
    "tensor": "tensor",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "dp": "data",
    "data": "data",
    "fsdp": "shard",
    "dp_shard": "shard",
    "cp": "context",
    "context": "context",
    "ep": "expert",
    "expert": "expert",
}


def roles(settings: Config) -> dict[str, Part]:
    """Dim -> part. From [parallel]; without it, by the dims' names in the field's usual spelling."""
    if settings.parallel is not None:
        return {dim: part for part, dim in settings.parallel.parts.items()}
    names = [*settings.mesh.dims, *(name for sizes in settings.mesh.views.values() for name in sizes)]
    return {name: _NAMES[name] for name in names if name in _NAMES}
