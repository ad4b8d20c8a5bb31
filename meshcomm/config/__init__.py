"""Configuration: files, overrides and models. Needs no hardware, reads no environment."""

from meshcomm.config.architecture import ModelConfig
from meshcomm.config.data import DataConfig
from meshcomm.config.file import load
from meshcomm.config.mesh import DimOptions, MeshConfig
from meshcomm.config.parallel import ParallelConfig
from meshcomm.config.planning import plan
from meshcomm.config.process import NetworkConfig, ProcessConfig
from meshcomm.config.root import Config
from meshcomm.config.topology import Link, Links, TopologyConfig
from meshcomm.config.train import TrainConfig

__all__ = [
    "Config",
    "DataConfig",
    "DimOptions",
    "Link",
    "Links",
    "MeshConfig",
    "ModelConfig",
    "NetworkConfig",
    "ParallelConfig",
    "ProcessConfig",
    "TopologyConfig",
    "TrainConfig",
    "load",
    "plan",
]
