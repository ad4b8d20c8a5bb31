"""Data, tensor and pipeline parallelism along dims of a mesh, and what composes them."""

from meshcomm.parallel.compose import Build, Trainer
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.pipeline import Accumulate, Pipelined, Runner, Stage, split_layers
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    cross_entropy,
    local,
    whole,
)

__all__ = [
    "Accumulate",
    "Build",
    "ColumnParallel",
    "GradientSync",
    "Pipelined",
    "RowParallel",
    "Runner",
    "Stage",
    "TensorSplit",
    "Trainer",
    "VocabParallelEmbedding",
    "assign",
    "cross_entropy",
    "local",
    "split_layers",
    "whole",
]
