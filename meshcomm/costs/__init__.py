"""How long a collective takes on its links, by which algorithm. No torch, no process."""

from meshcomm.costs.bus import bus_factor
from meshcomm.costs.lines import Line, best, fastest_by_size
from meshcomm.costs.operations import OPERATIONS, Operation, lines
from meshcomm.costs.route import Hop, Route, route

__all__ = [
    "OPERATIONS",
    "Hop",
    "Line",
    "Operation",
    "Route",
    "best",
    "bus_factor",
    "fastest_by_size",
    "lines",
    "route",
]
