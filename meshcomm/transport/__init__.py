"""Carries bytes within one group, through a torch process group. A group of one rank needs no process group."""

from meshcomm.transport.base import P2P, Prepared, SoloTransport, Transport, Work
from meshcomm.transport.process_group import ProcessGroupTransport

__all__ = ["P2P", "Prepared", "ProcessGroupTransport", "SoloTransport", "Transport", "Work"]
