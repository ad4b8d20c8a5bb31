"""Process start and stop, agreement, group creation, and the live mesh."""

from meshcomm.mesh.opening import init
from meshcomm.mesh.mesh import Mesh

__all__ = ["Mesh", "init"]
