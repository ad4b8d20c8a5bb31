"""Process start and stop, agreement, group creation, and the live mesh."""

from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.opening import from_groups, init
from meshcomm.mesh.watched import Watch, watch

__all__ = ["Mesh", "Watch", "from_groups", "init", "watch"]
