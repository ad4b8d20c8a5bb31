"""Tensor parallelism: layers whose weights are split along one dim of the mesh.

Each rank keeps a slice of a column-parallel weight's outputs, and of a row-parallel weight's
inputs. Column-parallel layers followed by a row-parallel layer need one sum in forward (`leave`,
after the row-parallel layer) and one in backward (`enter`, before the column-parallel layers). This
is the scheme of Megatron-LM (Shoeybi et al. 2019), where `enter` is called f and `leave` is called g.
With sequence_parallel, it is the scheme of Korthikanti et al. 2022, where they are g and its conjugate.
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
