"""All-reduce algorithms as plain data: who sends which chunk to whom, step by step. No torch, no process."""

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
