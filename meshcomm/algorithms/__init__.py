"""All-reduce algorithms as plain data: who sends which chunk to whom, step by step. No torch, no process."""

from meshcomm.algorithms.formulas import Cost
from meshcomm.algorithms.interpreter import Traffic, interpret
from meshcomm.algorithms.recursive import halving_doubling, recursive_doubling
from meshcomm.algorithms.ring import ring, two_level
from meshcomm.algorithms.schedule import Receive, Schedule, Send, Step
from meshcomm.algorithms.trees import double_tree, tree

__all__ = [
    "Cost",
    "Receive",
    "Schedule",
    "Send",
    "Step",
    "Traffic",
    "double_tree",
    "halving_doubling",
    "interpret",
    "recursive_doubling",
    "ring",
    "tree",
    "two_level",
]
