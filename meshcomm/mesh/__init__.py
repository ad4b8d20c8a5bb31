"""Process start and stop, agreement, group creation, and the live mesh."""

from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.mesh.watched import Watch, watch

__all__ = ["Mesh", "Watch", "init", "watch"]
