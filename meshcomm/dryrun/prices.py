"""How long does a call take on the links that its group crosses, and a floating-point operation?"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from meshcomm.predict.links import span as links_of
from meshcomm.predict.machine import Machine
from meshcomm.predict.times import OPERATIONS, Operation, fastest

if TYPE_CHECKING:
    from meshcomm.comm.spans import Span
    from meshcomm.dryrun.compare import Members
    from meshcomm.dryrun.replay import Seconds

# Priced as what carries as much over the same links.
_LIKE: Final[dict[str, Operation]] = {"gather": "reduce", "scatter": "broadcast"}


def prices(machine: Machine) -> Seconds:
    """The alpha-beta time of each call by the best algorithm that a backend would choose, as `meshcomm costs` has it.

    Exchanges of Python objects and barriers, which are small, take nothing.
    """

    @cache
    def priced(operation: Operation, nbytes: int, members: Members) -> float:
        route = links_of(np.array([members]), machine).route
        return fastest(operation, route, nbytes).seconds(nbytes)

    def seconds(span: Span, members: Members) -> float:
        if span.parts:
            return priced("sendrecv", span.nbytes // len(span.parts), members)
        name = span.call.removesuffix(" (torch)")
        operation = _LIKE.get(name) or next((each for each in OPERATIONS if each == name), None)
        return 0.0 if operation is None or not span.nbytes else priced(operation, span.nbytes, members)

    return seconds
