"""Configuration: files, overrides and models. This package needs no hardware and reads no environment variables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshcomm.config.elastic import ElasticConfig as ElasticConfig
    from meshcomm.config.mesh import DimOptions as DimOptions
    from meshcomm.config.mesh import MeshConfig as MeshConfig
    from meshcomm.config.model import ModelConfig as ModelConfig
    from meshcomm.config.parallel import ParallelConfig as ParallelConfig
    from meshcomm.config.parallel import ParallelOptions as ParallelOptions
    from meshcomm.config.problems import Problem as Problem
    from meshcomm.config.process import Link as Link
    from meshcomm.config.process import Links as Links
    from meshcomm.config.process import NetworkConfig as NetworkConfig
    from meshcomm.config.process import ProcessConfig as ProcessConfig
    from meshcomm.config.process import TopologyConfig as TopologyConfig
    from meshcomm.config.read import load_config as load_config
    from meshcomm.config.read import plan as plan
    from meshcomm.config.root import Config as Config
    from meshcomm.config.rules import Resolved as Resolved
    from meshcomm.config.section import Section as Section
    from meshcomm.config.train import DataConfig as DataConfig
    from meshcomm.config.train import TrainConfig as TrainConfig

# Loaded on first use: a mesh created from `dims=` does not need the classes of the training sections.
_HOMES = {
    "elastic": "ElasticConfig",
    "mesh": "DimOptions MeshConfig",
    "model": "ModelConfig",
    "parallel": "ParallelConfig ParallelOptions",
    "problems": "Problem",
    "process": "Link Links NetworkConfig ProcessConfig TopologyConfig",
    "read": "load_config plan",
    "root": "Config",
    "rules": "Resolved",
    "section": "Section",
    "train": "DataConfig TrainConfig",
}
_PUBLIC = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshcomm.config' has no attribute {name!r}")
    return getattr(import_module(f"meshcomm.config.{_PUBLIC[name]}"), name)
