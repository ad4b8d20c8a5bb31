"""Context parallelism: the sequence is split along one dim of the mesh, with exact attention over the full sequence."""

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
