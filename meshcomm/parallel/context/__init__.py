"""Context parallelism: the sequence split along one dim of the mesh, attention exact over all of it."""

from meshcomm.parallel.context.order import Order, sequence_positions
from meshcomm.parallel.context.ring import ring_attention
from meshcomm.parallel.context.split import (
    ByHeads,
    ContextSplit,
    gather_sequence,
    split_sequence,
    ulysses_attention,
)

__all__ = [
    "ByHeads",
    "ContextSplit",
    "Order",
    "gather_sequence",
    "ring_attention",
    "sequence_positions",
    "split_sequence",
    "ulysses_attention",
]
