"""How ranks lie on nodes and racks, and what that says about a mesh. No torch, no process."""

from meshcomm.topology.discover import discovered
from meshcomm.topology.finding import Finding
from meshcomm.topology.lint import lint
from meshcomm.topology.machine import Level, Machine, known_machine, machine
from meshcomm.topology.span import Span, span

__all__ = [
    "Finding",
    "Level",
    "Machine",
    "Span",
    "discovered",
    "known_machine",
    "lint",
    "machine",
    "span",
]
