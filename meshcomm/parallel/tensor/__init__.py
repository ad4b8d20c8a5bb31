"""Tensor parallelism: layers whose weights are split along one dim of the mesh.

Column-parallel weights are split over ranks along their outputs, and row-parallel weights along their inputs. Column-parallel
layers followed by a row-parallel layer need one sum in forward (`leave`, after the row-parallel layer) and one in backward
(`enter`, before the column-parallel layers). This is the scheme of Megatron-LM (Shoeybi et al. 2019), where `enter` is called
f and `leave` is called g. With sequence_parallel, this is the scheme of Korthikanti et al. 2022, where `enter` is g and
`leave` is its conjugate.
"""

from meshcomm.parallel.tensor.apply import tensor_parallel
from meshcomm.parallel.tensor.layers import (
    ColumnParallel,
    RowParallel,
    VocabParallelEmbedding,
    columns,
    cross_entropy,
)
from meshcomm.parallel.tensor.parameters import (
    assign,
    local,
    whole,
)
from meshcomm.parallel.tensor.split import TensorSplit
from meshcomm.parallel.tensor.unsplit import (
    load_unsplit_optimizer_state,
    load_unsplit_state,
    unsplit_optimizer_state,
    unsplit_state,
)

__all__ = [
    "ColumnParallel",
    "RowParallel",
    "TensorSplit",
    "VocabParallelEmbedding",
    "assign",
    "columns",
    "cross_entropy",
    "load_unsplit_optimizer_state",
    "load_unsplit_state",
    "local",
    "tensor_parallel",
    "unsplit_optimizer_state",
    "unsplit_state",
    "whole",
]
