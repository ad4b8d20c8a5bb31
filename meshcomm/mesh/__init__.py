"""Process start and stop, agreement, group creation, and the live mesh."""

from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.opening import init

__all__ = ["Mesh", "init"]
