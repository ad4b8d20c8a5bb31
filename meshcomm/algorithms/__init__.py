"""All-reduce algorithms as plain data: which rank sends which chunk to which rank in each step. Uses no torch and no processes."""

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
