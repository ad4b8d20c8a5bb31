"""A communicator along dims: collectives, messages, and their differentiable forms."""

from meshcomm.comm.communicator import Communicator, CommunicatorCache
from meshcomm.comm.functional import Functional
from meshcomm.comm.handle import Handle

__all__ = ["Communicator", "CommunicatorCache", "Functional", "Handle"]
