"""The roles of a mesh's dims in training: a model is split along some, and gradients and losses are summed along some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load_config
from meshcomm.errors import ConfigError, LayoutError
from meshcomm.layout.names import merged_name
from meshcomm.layout.sizes import toml_dims
from meshcomm.mesh import Mesh
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.tensor import TensorSplit


class Sections(NamedTuple):
    """The configuration sections that training needs. The model and the data may be given in code instead."""

    parallel: ParallelConfig
    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig


def sections(mesh: Mesh, config: Config) -> Sections:
    """Return the training sections of `config`, checked against the sizes of the open mesh.

    Raises ConfigError if [parallel] or [train] is missing or does not fit the mesh, and LayoutError if the
    open mesh and `config` have different dims.
    """
    declared, live = config.mesh.dims, mesh.layout.dims
    if list(declared) != list(live) or any(size not in (-1, live[name]) for name, size in declared.items()):
        raise LayoutError(
            "the open mesh and this configuration have different dims",
            given=f"an open mesh of {toml_dims(live)}, mesh.dims = {toml_dims(declared)}",
            expected="the configuration that the mesh was opened with",
            hint=f"meshcomm.config.load_config(config, ['mesh.dims={toml_dims(live)}'])",
        )
    loaded = load_config(config, [f"mesh.dims={toml_dims(live)}"])
    if loaded.parallel is None or loaded.train is None:
        raise ConfigError(
            "this configuration describes a mesh but no training",
            given=f"{config.source} without [parallel] and [train]",
            expected="both sections, and [model] and [data] unless they are given in code",
            hint="meshcomm new writes a configuration with all four sections",
        )
    return Sections(loaded.parallel, loaded.model, loaded.data, loaded.train)


@final
@dataclass(frozen=True)
class Splits:
    """The dims of the mesh along which weights, the sequence, the experts, samples and layers are split.

    tensor:         splits weights and, with sequence_parallel, activations between layers.
    context:        splits the sequence.
    expert:         the dim of a view along which experts are distributed. If None, every rank holds all experts.
    balance_weight: the factor by which a microbatch's balance loss is multiplied.
    data:           the dims of more than one rank along which ranks have different samples.
    gradients:      those along which the gradients of all weights but the experts' are summed.
    pipeline:       the dim along which layers are divided. If None, every rank has all layers.
    draws:          if given, seeds the default generators.
    """

    tensor: TensorSplit
    context: ContextSplit
    expert: str | None = None
    balance_weight: float = 0.0
    data: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    pipeline: str | None = None
    draws: Draws | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh to which all of the dims belong."""
        return self.tensor.mesh

    def summed(self, x: Tensor, dims: Iterable[str]) -> Tensor:
        """Return the sum of `x` along each of `dims`. Called by: every rank along them."""
        for dim in dims:
            x = self.mesh.all_reduce(dim, x)
        return x

    def of_last_stage(self, x: Tensor) -> Tensor:
        """Return the last stage's `x`, on every rank along the pipeline. Called by: each of them."""
        if self.pipeline is None:
            return x
        return self.mesh.broadcast(self.pipeline, x, src=self.mesh.size(self.pipeline) - 1)


def several(mesh: Mesh, dims: Iterable[str]) -> tuple[str, ...]:
    """Return the dims that have more than one rank."""
    return tuple(dim for dim in dims if mesh.size(dim) > 1)


def along(mesh: Mesh, dims: Iterable[str]) -> str | tuple[str, ...] | None:
    """Return the dims whose size is above 1, in the form that a collective along all of them accepts. A group is created if
    none exists.

    Called by: every rank of the mesh, in the same program order. Returns None if no such dim remains.
    """
    used = several(mesh, dims)
    if len(used) < 2:
        return used[0] if used else None
    if mesh.plan.covering(used) is None:
        mesh.create_group(merged_name(used, {*mesh.layout.names, *mesh.layout.views}), used)
    return used
