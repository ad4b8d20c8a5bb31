"""Tensor parallelism: layers whose weights are split along one dim of the mesh.

A column-parallel weight keeps a slice of its outputs on each rank, a row-parallel one a slice of
its inputs. In sequence, they need a single sum in forward (after the row-parallel layer, `leave`)
and a single one in backward (before the column-parallel layers, `enter`). This is the scheme of
Megatron-LM (Shoeybi et al. 2019), where `enter` is called f and `leave` g. With sequence_parallel
it is the scheme of Korthikanti et al. 2022, where they are g and its conjugate.
"""

from meshcomm.parallel.tensor.apply import tensor_parallel
from meshcomm.parallel.tensor.layers import (
    ColumnParallel,
    RowParallel,
    VocabParallelEmbedding,
    cross_entropy,
)
from meshcomm.parallel.tensor.parameters import (
    assign,
    local,
    unsplit_state,
    whole,
    whole_shape,
)
from meshcomm.parallel.tensor.split import TensorSplit

__all__ = [
    "ColumnParallel",
    "RowParallel",
    "TensorSplit",
    "VocabParallelEmbedding",
    "assign",
    "cross_entropy",
    "local",
    "tensor_parallel",
    "unsplit_state",
    "whole",
    "whole_shape",
]
