"""What carries bytes along one group: torch process groups, or nothing at all for a group of one."""

from meshcomm.transport.base import P2P, Done, Prepared, Transport, Work
from meshcomm.transport.process_group import ProcessGroupTransport
from meshcomm.transport.solo import SoloTransport

__all__ = ["P2P", "Done", "Prepared", "ProcessGroupTransport", "SoloTransport", "Transport", "Work"]
