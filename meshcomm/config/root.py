"""The full configuration: all sections, and the rules that relate them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import Field, PrivateAttr

from meshcomm.config.elastic import ElasticConfig
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.model import ModelConfig
from meshcomm.config.parallel import ParallelConfig
from meshcomm.config.problems import Problem, report
from meshcomm.config.process import NetworkConfig, ProcessConfig, TopologyConfig
from meshcomm.config.rules import RULES, Resolved, problems
from meshcomm.config.section import Section
from meshcomm.config.train import DataConfig, TrainConfig
from meshcomm.errors import ConfigError
from meshcomm.layout import Layout, Plan


class Config(Section):
    """The configuration for all commands, usually read from one file.

    `mesh` is required. Training also requires `parallel` and `train`, and `model` and `data` unless code
    provides them. `parallel` without `train` only assigns roles to the dims.

    A subclass may add sections and rules, which `load_config(..., kind=MyConfig)` reads. Add sections as fields
    whose types are subclasses of `meshcomm.config.Section`, and rules as `rules = (*Config.rules, my_rule)`. A
    rule takes a `meshcomm.config.Resolved`, in which every size is a number, and yields a
    `meshcomm.config.Problem` for each problem.

    Raises ConfigError, which lists every problem found.
    """

    rules = RULES
    mesh: MeshConfig = Field(examples=[{"dims": {"dp": 8}}])
    """Names and sizes of the dims, and the groups along them."""
    process: ProcessConfig = ProcessConfig()
    """How the job's processes find each other."""
    network: NetworkConfig = NetworkConfig()
    """Network interfaces, and NCCL's logging and sockets."""
    topology: TopologyConfig = TopologyConfig()
    """The placement of ranks on nodes, and the link speeds."""
    elastic: ElasticConfig = ElasticConfig()
    """What happens when ranks are lost."""
    parallel: ParallelConfig | None = None
    """The role of each dim in training. Omit this section if you do not train."""
    model: ModelConfig | None = None
    """The model to train. Omit this section if you do not train."""
    data: DataConfig | None = None
    """The training data. Omit this section if you do not train."""
    train: TrainConfig | None = None
    """Training settings. Omit this section if you do not train."""

    # The file that the configuration was read from, for later reports. Comparisons ignore it.
    _source: str = PrivateAttr("Config")
    # Whether `load_config` has returned this configuration, so that it need not check it again.
    _checked: bool = PrivateAttr(False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """See pydantic, which does not check `update`."""
        copied = super().model_copy(update=update, deep=deep)
        copied._checked = self._checked and not update
        return copied

    @property
    def source(self) -> str:
        """The file that the configuration was read from, with the overrides; `Config` if it was created in Python."""
        return self._source

    def problems(self) -> Iterator[Problem]:
        """Yield the problems within each section, then the problems that involve several sections."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            # A section that is left out has its defaults.
            if name in self.model_fields_set and isinstance(section, Section):
                for problem in section.problems():
                    yield problem.under(name)
        yield from problems(Resolved.of(self), self.rules)

    def layout(self, world: int | None) -> Layout:
        """Return the layout of the ranks on `world` processes. Raises ConfigError if the mesh does not fit them."""
        return self._grouped(world).layout(world, self._source)

    def plan(self, world: int | None) -> Plan:
        """Return the plan of all groups of the mesh on `world` processes. Raises ConfigError if the mesh does not fit them.

        If weights are sharded along two dims together, the plan has a merged dim over both, even if [mesh] does not
        define one.
        world: may be None if every size is given.
        """
        return self._grouped(world).plan(world, self._source)

    def _grouped(self, world: int | None) -> MeshConfig:
        if self.parallel is None or self.train is None:
            return self.mesh
        return self.mesh.merging(self.parallel.shard_dims(self.mesh.sizes(world, self._source)))

    def resolved(self, world: int | None) -> Config:
        """Return the same configuration with every -1 resolved and the training settings checked against the sizes.

        Raises ConfigError if the number of processes or the training settings do not fit the mesh.
        """
        filled = self.model_copy(update={"mesh": self.mesh.resolved(world, self._source)})
        problems = list(filled.problems())
        if problems:
            raise report(self._source, problems)
        return filled

    @property
    def expert_view(self) -> str | None:
        """The view that contains the expert dim, or None if no dim has that role."""
        return None if self.parallel is None else self.parallel.expert_view(self.mesh.views)

    @property
    def expert_gradient_dims(self) -> tuple[str, ...]:
        """The dims along which the gradients of experts' weights are summed. See ParallelConfig."""
        return () if self.parallel is None else self.parallel.expert_gradient_dims(self.mesh.views)

    def microbatches(self, sizes: Mapping[str, int]) -> int:
        """Return the number of microbatches per rank in one step. sizes: as returned by MeshConfig.sizes."""
        if self.train is None or self.parallel is None:
            raise ConfigError(
                "a configuration without training has no micro-batches",
                given=f"{self._source} without [train] and [parallel]",
                expected="all of [parallel] [model] [data] [train]",
                hint="add the four sections",
            )
        return self.train.global_batch_size // self.parallel.copies(sizes) // self.train.micro_batch_size
