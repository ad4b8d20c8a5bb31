"""Composes data, tensor and pipeline parallelism around a model: mesh + config -> a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load
from meshcomm.errors import ConfigError, LayoutError
from meshcomm.layout.sizes import toml_dims
from meshcomm.mesh import Mesh
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.pipeline import Accumulate, Pipelined, Runner, Stage, split_layers
from meshcomm.parallel.tensor import TensorSplit, cross_entropy

Build: TypeAlias = Callable[[TensorSplit, Stage], nn.Module]


class Sections(NamedTuple):
    """The sections of a configuration that training needs."""

    parallel: ParallelConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig


@final
class Trainer:
    """One rank's share of a hybrid-parallel training run. Order of things, outermost first:

    the pipeline's dim says which layers this rank builds; the tensor's dim splits their weights
    while they are built; the data's dim sums their gradients. The optimiser then acts on whole
    tensors of this stage, the same on every coord along data.

    Args:
        mesh: an open mesh that this rank is a member of.
        config: what the mesh was opened with, with the four training sections.
        build: makes a stage's module, weights initialised: (int64 tokens or hidden states of one
            microbatch) -> hidden states, or on the last stage this rank's slice of the logits.

    Raises as `sections`.
    """

    def __init__(self, mesh: Mesh, config: Config, build: Build) -> None:
        self.sections = sections(mesh, config)
        part, model, data, train = self.sections
        dtype: torch.dtype = getattr(torch, train.dtype)

        self.mesh = mesh
        self.data_size, self.data_coord = _place(mesh, part.data)
        self.microbatches = train.global_batch // (self.data_size * train.microbatch)
        stages, index = _place(mesh, part.pipeline)

        self.split = split = TensorSplit(mesh, part.tensor, dtype)
        self.stage = Stage(index, stages, split_layers(model.layers, stages)[index])
        self.module = build(split, self.stage)
        self.gradients = GradientSync(
            mesh,
            part.data,
            self.module.named_parameters(),
            microbatches=self.microbatches,
            bucket_mb=part.bucket_mb,
        )
        scale = 1 / (self.microbatches * self.data_size)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(split, logits, targets) * scale

        self._run: Runner = Accumulate(self.module, loss, self.microbatches)
        if part.pipeline and stages > 1:
            tokens = (train.microbatch, data.sequence)
            self._run = Pipelined(
                mesh,
                part.pipeline,
                self.module,
                loss,
                microbatches=self.microbatches,
                schedule=part.schedule,
                shapes=(tokens, (*tokens, model.width), (*tokens, model.vocabulary // split.size)),
                dtype=dtype,
            )
        # Fused: one call for all parameters, which DTensor passes on as one; its state stays DTensor.
        # Matrices decay, norms do not.
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> float:
        """One optimiser step on this rank's share of the global batch.

        Shape:     tokens and targets (microbatches * microbatch, sequence) int64.
        Called by: every rank; tokens and targets are equal along tensor and pipeline.
        Returns:   the mean loss of the global batch, before the step, equal on every rank.
        Raises:    TrainingError where a parameter got no gradient.
        """
        self.gradients.start()
        loss = self._run(tokens, targets)
        self.gradients.finish()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return self._mean(loss)

    def state(self) -> dict[str, Tensor]:
        """All that a step changes: this rank's weights and the optimiser's state, by global names.

        Whole tensors, as DTensors where they are split: `model.layers.3.attn.wq.weight`,
        `optimizer.layers.3.attn.wq.weight.exp_avg`. Names and whole tensors do not depend on the
        mesh. Memory is shared: writing into the tensors is how a state is put back. The learning
        rate is not among them, as every step is told its own.
        """
        if not self.optimizer.state:
            # The optimiser makes its state in its first step; with gradients and a rate of zero
            # that step changes nothing else.
            self.gradients.start()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self.optimizer.step()
            for state in self.optimizer.state.values():
                state["step"].zero_()
        found = {f"model.{name}": value for name, value in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def parameters_of_all_stages(self) -> int:
        """Number of elements of the whole model's parameters. Every rank calls this."""
        count = sum(parameter.numel() for parameter in self.module.parameters())
        if self.sections.parallel.pipeline is None:
            return count
        total = torch.tensor([count], dtype=torch.int64, device=self.mesh.device)
        return int(self.mesh.all_reduce(self.sections.parallel.pipeline, total).item())

    @torch.no_grad()
    def _mean(self, loss: Tensor | None) -> float:
        """This rank's share of the loss, if it has one -> the global batch's loss, everywhere."""
        data, pipeline = self.sections.parallel.data, self.sections.parallel.pipeline
        value = torch.zeros((), dtype=self.split.dtype, device=self.mesh.device) if loss is None else loss
        if loss is not None and data is not None:
            value = self.mesh.all_reduce(data, value)
        if pipeline is not None:
            value = self.mesh.broadcast(pipeline, value, src=self.stage.count - 1)
        return float(value.item())


def _place(mesh: Mesh, dim: str | None) -> tuple[int, int]:
    """Size and coord of a part's dim."""
    return (1, 0) if dim is None else (mesh.size(dim), mesh.coord(dim))


def sections(mesh: Mesh, config: Config) -> Sections:
    """The training sections of `config`, checked against the sizes of the open mesh.

    Raises ConfigError where there are none or they do not fit the mesh, LayoutError where the
    mesh was opened with other dims than `config` has.
    """
    given, live = config.mesh.dims, mesh.layout.dims
    if list(given) != list(live) or any(size not in (-1, live[name]) for name, size in given.items()):
        raise LayoutError(
            "the mesh was opened with other dims than this configuration has",
            given=f"an open mesh of {toml_dims(live)}, mesh.dims = {toml_dims(given)}",
            expected="the configuration that the mesh was opened with",
            hint=f"meshcomm.config.load(config, ['mesh.dims={toml_dims(live)}'])",
        )
    known = load(config, [f"mesh.dims={toml_dims(live)}"])
    if known.parallel is None or known.model is None or known.data is None or known.train is None:
        raise ConfigError(
            "this configuration describes a mesh and no training",
            given=f"{config.source} without [parallel] [model] [data] [train]",
            expected="all four sections",
            hint="configs/quickstart.toml has them",
        )
    return Sections(known.parallel, known.model, known.data, known.train)
