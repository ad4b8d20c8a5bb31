"""The whole configuration: all sections, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field, PrivateAttr

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.model import ModelConfig
from meshcomm.config.parallel import ParallelConfig
from meshcomm.config.problems import Broken, Problem, report
from meshcomm.config.process import NetworkConfig, ProcessConfig
from meshcomm.config.rules_mesh import may_use_nccl
from meshcomm.config.rules_training import training_problems, unknown_dims
from meshcomm.config.section import Section, rule, setting
from meshcomm.config.topology import TopologyConfig
from meshcomm.config.train import DataConfig, TrainConfig
from meshcomm.config.training import Training
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError
from meshcomm.layout import Layout, Plan

_TRAINING = ("parallel", "model", "data", "train")
# What a section cannot be without; a model, and with it data, may come from code.
_BESIDE = {"parallel": ("train",), "train": ("parallel",), "data": ("parallel", "train")}
_BESIDE["model"] = _BESIDE["data"] + ("data",)


class Config(Section):
    """One file for all commands. `mesh` is needed; training needs `parallel` and `train`, and `model` and `data` where
    code brings none; `parallel` alone says the roles of the dims.

    Raises ConfigError with every problem found.
    """

    mesh: MeshConfig = Field(description="Which ranks form which mesh.", examples=[{"dims": {"dp": 8}}])
    process: ProcessConfig = Field(default=ProcessConfig(), description="How the processes find each other.")
    network: NetworkConfig = Field(default=NetworkConfig(), description="Interfaces and NCCL's log.")
    topology: TopologyConfig = Field(default=TopologyConfig(), description="How the ranks lie on machines.")
    parallel: ParallelConfig | None = setting(None, "Which dim plays which part. None: no training.")
    model: ModelConfig | None = setting(None, "What is trained. None: no training.")
    data: DataConfig | None = setting(None, "On what it is trained. None: no training.")
    train: TrainConfig | None = setting(None, "How it is trained. None: no training.")

    # Where it was read from, for reports that come later; two equal files at two places are equal.
    _source: str = PrivateAttr("Config")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    @property
    def source(self) -> str:
        """What it was read from, with the overrides; `Config` where it was made in Python."""
        return self._source

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Section.problems."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if section is not None:
                for problem in section.problems(broken.under(name)):
                    yield problem.under(name)
        yield from super().problems(broken)
        present = [name for name in _TRAINING if getattr(self, name) is not None]
        parallel = self.parallel
        needed = {name for each in present for name in _BESIDE[each]}
        absent = [
            name for name in _TRAINING if name in needed.difference(present) and not broken.touches(name)
        ]
        if present == ["parallel"] and parallel is not None:
            # The roles of the dims, for a program that trains by itself.
            yield from unknown_dims(self.mesh, parallel, broken)
        elif present and absent:
            yield Problem(
                "missing" if len(absent) == 1 else f"{len(absent)} sections are missing",
                "all of [parallel] [model] [data] [train], without [model] and [data] where code brings them, or a mesh "
                "alone, or [parallel] alone: its roles",
                [
                    f"{verb} " + " ".join(f"[{name}]" for name in names)
                    for verb, names in (("add", absent), ("remove", present))
                ],
                " ".join(f"[{name}]" for name in present),
                ", ".join(absent),
            )
        model, data, train = self.model, self.data, self.train
        if parallel is not None and train is not None:
            yield from training_problems(Training(self.mesh, parallel, model, data, train, broken))

    def layout(self, world: int | None) -> Layout:
        """Who sits where, on `world` processes. Raises ConfigError where they do not fit."""
        self._check(world)
        return self._grouped(world).layout(world)

    def plan(self, world: int | None) -> Plan:
        """Every group of the mesh, on `world` processes. Raises ConfigError where they do not fit.

        Those of weights that are sharded along two dims at once are a merged dim, also where [mesh] has none.
        world: None where it is not known and every size is given.
        """
        self._check(world)
        return self._grouped(world).plan(world)

    def _grouped(self, world: int | None) -> MeshConfig:
        if self.parallel is None or self.train is None:
            return self.mesh
        return self.mesh.merging(self.parallel.shard_dims(self.mesh.sizes(world)))

    def resolved(self, world: int | None) -> Config:
        """The same configuration with every -1 filled in, training checked against the sizes.

        Raises ConfigError where the world or the training does not fit.
        """
        self._check(world)
        filled = self.model_copy(update={"mesh": self.mesh.resolved(world)})
        problems = list(filled.problems(Broken()))
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
        return self.train.global_batch // self.parallel.copies(sizes) // self.train.microbatch

    def _check(self, world: int | None) -> None:
        problems = [problem.under("mesh") for problem in self.mesh.world_problems(world)]
        if problems:
            raise report(self._source, problems)


@rule(Config, "mesh.device")
def _device_to_bind(config: Config) -> Iterator[Problem]:
    if config.process.device_id is True and config.mesh.device == "cpu":
        yield Problem(
            "no effect: device cpu has nothing to bind",
            '"auto" or false on cpu',
            ['process.device_id = "auto"', 'mesh.device = "cuda"'],
            'device_id = true, mesh.device = "cpu"',
            "process.device_id",
        )


@rule(Config, "data.tokenizer", "data.eos", "model.pretrained")
def _tokens_of_the_weights(config: Config) -> Iterator[Problem]:
    model, data = config.model, config.data
    if data is None:
        return
    pretrained = None if model is None else model.pretrained
    if data.tokenizer_of(pretrained) is not None or data.source not in ("files", "dataset"):
        return
    if data.eos is not None:
        yield Problem(
            "no effect without a tokenizer: bytes have no token for it",
            "a tokenizer beside it",
            ['data.tokenizer = "tokenizer.json"', "remove data.eos"],
            f"eos = {toml(data.eos)}",
            "data.eos",
        )
    # A column of a dataset may hold tokens: its rows are looked at when they are read.
    if data.tokenizer is None and data.source == "files" and model is not None and model.reads_weights:
        yield Problem(
            "the weights were trained on tokens of a tokenizer, which their folder does not have",
            'a tokenizer.json; or "bytes", if a byte is a token of these weights',
            [
                'data.tokenizer = "FOLDER"',
                'data.tokenizer = "bytes"',
                "data.tokens, with the tokens of these texts",
            ],
            f"no tokenizer.json in {pretrained}",
            "data.tokenizer",
        )


@rule(Config, "mesh.device", "mesh.backend", "mesh.options")
def _nccl_that_is_used(config: Config) -> Iterator[Problem]:
    mesh = config.mesh
    settings = {} if may_use_nccl(mesh) else config.network.nccl_settings()
    for key, value in settings.items():
        yield Problem(
            "no effect: no group of this mesh runs on NCCL",
            f"{key} only where a backend is nccl",
            [f"remove network.{key}", 'mesh.device = "cuda" and mesh.backend = "nccl"'],
            f"{key} = {toml(value)}, mesh.device = {toml(mesh.device)}, mesh.backend = {toml(mesh.backend)}",
            f"network.{key}",
        )
