"""The whole configuration: all sections, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    """One file for all commands. `mesh` is needed; training needs `parallel` and `train`, and `model` and `data` where
    code brings none; `parallel` alone says the roles of the dims.

    A subclass may have sections and rules of its own, which `load_config(..., kind=MyConfig)` reads: fields whose types are kinds
    of `meshcomm.config.Section`, and `rules = (*Config.rules, my_rule)`. A rule takes a `meshcomm.config.Resolved`, in which
    every size is a number, and yields a `meshcomm.config.Problem` for each thing that is wrong.

    Raises ConfigError with every problem found.
    """

    rules = RULES
    mesh: MeshConfig = Field(examples=[{"dims": {"dp": 8}}])
    """Which ranks form which mesh."""
    process: ProcessConfig = ProcessConfig()
    """How the processes find each other."""
    network: NetworkConfig = NetworkConfig()
    """Interfaces and NCCL's log."""
    topology: TopologyConfig = TopologyConfig()
    """How the ranks lie on machines."""
    elastic: ElasticConfig = ElasticConfig()
    """What happens when ranks are lost."""
    parallel: ParallelConfig | None = None
    """Which dim plays which part. None: no training."""
    model: ModelConfig | None = None
    """What is trained. None: no training."""
    data: DataConfig | None = None
    """On what it is trained. None: no training."""
    train: TrainConfig | None = None
    """How it is trained. None: no training."""

    # Where it was read from, for reports that come later; two equal files at two places are equal.
    _source: str = PrivateAttr("Config")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    @property
    def source(self) -> str:
        """What it was read from, with the overrides; `Config` where it was made in Python."""
        return self._source

    def problems(self) -> Iterator[Problem]:
        """What is wrong in the sections, then between them."""
        for name in type(self).model_fields:
            section = self.__dict__.get(name)
            if isinstance(section, Section):
                for problem in section.problems():
                    yield problem.under(name)
        yield from problems(Resolved.of(self), self.rules)

    def layout(self, world: int | None) -> Layout:
        """Who sits where, on `world` processes. Raises ConfigError where they do not fit."""
        return self._grouped(world).layout(world, self._source)

    def plan(self, world: int | None) -> Plan:
        """Every group of the mesh, on `world` processes. Raises ConfigError where they do not fit.

        Those of weights that are sharded along two dims at once are a merged dim, also where [mesh] has none.
        world: None where it is not known and every size is given.
        """
        return self._grouped(world).plan(world, self._source)

    def _grouped(self, world: int | None) -> MeshConfig:
        if self.parallel is None or self.train is None:
            return self.mesh
        return self.mesh.merging(self.parallel.shard_dims(self.mesh.sizes(world, self._source)))

    def resolved(self, world: int | None) -> Config:
        """The same configuration with every -1 filled in, training checked against the sizes.

        Raises ConfigError where the world or the training does not fit.
        """
        filled = self.model_copy(update={"mesh": self.mesh.resolved(world, self._source)})
        problems = list(filled.problems())
        if problems:
            raise report(self._source, problems)
        return filled

    @property
    def expert_view(self) -> str | None:
        """The view that the expert's dim is in; None where no dim plays that part."""
        return None if self.parallel is None else self.parallel.expert_view(self.mesh.views)

    @property
    def expert_gradient_dims(self) -> tuple[str, ...]:
        """The dims along which gradients of experts' weights are summed; see ParallelConfig."""
        return () if self.parallel is None else self.parallel.expert_gradient_dims(self.mesh.views)

    def microbatches(self, sizes: Mapping[str, int]) -> int:
        """Micro-batches of one rank in one step. `sizes`: as from MeshConfig.sizes."""
        if self.train is None or self.parallel is None:
            raise ConfigError(
                "a configuration without training has no micro-batches",
                given=f"{self._source} without [train] and [parallel]",
                expected="all of [parallel] [model] [data] [train]",
                hint="add the four sections",
            )
        return self.train.global_batch_size // self.parallel.copies(sizes) // self.train.micro_batch_size
