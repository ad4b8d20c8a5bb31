"""Data, tensor and pipeline parallelism along the dims of a mesh, and their composition."""

from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.norm import clip_grad_norm_
from meshcomm.parallel.pipeline import Accumulate, Pipelined, Stage, TiedWeight, split_layers
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    cross_entropy,
    load_unsplit_optimizer_state,
    load_unsplit_state,
    local,
    tensor_parallel,
    unsplit_optimizer_state,
    unsplit_state,
    whole,
)

__all__ = [
    "Accumulate",
    "ColumnParallel",
    "Engine",
    "GradientSync",
    "Pipelined",
    "RowParallel",
    "Stage",
    "TensorSplit",
    "TiedWeight",
    "VocabParallelEmbedding",
    "assign",
    "clip_grad_norm_",
    "cross_entropy",
    "load_unsplit_optimizer_state",
    "load_unsplit_state",
    "local",
    "split_layers",
    "tensor_parallel",
    "unsplit_optimizer_state",
    "unsplit_state",
    "whole",
]
