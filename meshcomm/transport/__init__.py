"""Carries bytes along one group: by a torch process group, or not at all for a group of one."""

from meshcomm.transport.base import P2P, Prepared, SoloTransport, Transport, Work
from meshcomm.transport.process_group import ProcessGroupTransport

__all__ = ["P2P", "Prepared", "ProcessGroupTransport", "SoloTransport", "Transport", "Work"]
