"""All-reduce algorithms as plain data: the chunks that each rank sends and receives in each step. Requires no torch."""

from meshcomm.algorithms.all_reduce import (
    double_tree,
    halving_doubling,
    recursive_doubling,
    ring,
    tree,
    two_level,
)
from meshcomm.algorithms.formulas import Cost
from meshcomm.algorithms.schedule import Receive, Schedule, ScheduleStep, Send

__all__ = [
    "Cost",
    "Receive",
    "Schedule",
    "ScheduleStep",
    "Send",
    "double_tree",
    "halving_doubling",
    "recursive_doubling",
    "ring",
    "tree",
    "two_level",
]  # fmt: skip
