"""The `[parallel]` section: the role of each dim of the mesh in training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import NoEffect, Section, Text
from meshcomm.config.write import toml

ParallelRole: TypeAlias = Literal["data", "shard", "tensor", "pipeline", "context", "expert"]
PARTS: tuple[ParallelRole, ...] = ("data", "shard", "tensor", "pipeline", "context", "expert")
PipelineSchedule: TypeAlias = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]
# The schedules that run several stages on each rank.
_MANY_STAGES: tuple[PipelineSchedule, ...] = ("interleaved_1f1b", "zero_bubble")
_A_DIM: Final = "name a dim in parallel.{}"
_BY_BLOCK: Final = " with parallel.shard: gradients are reduced block by block"


def _one_part_each(parallel: ParallelConfig) -> Iterator[Problem]:
    seen: dict[str, ParallelRole] = {}
    for part, dim in parallel.parts.items():
        first = seen.setdefault(dim, part)
        if first != part:
            what, expected = f"the dim {dim} already has the role {first}", "another dim for every role"
            ways = [f"remove parallel.{part}, or give it another dim"]
            yield Problem(part, what, expected, ways, parallel.written(f"{first} {part}"))


def _kept_in_halves(parallel: ParallelConfig) -> Iterator[Problem]:
    options = parallel.options
    if options.reshard and options.schedule == "zero_bubble" and parallel.pipeline is not None:
        what = (
            "the second half of a backward pass of zero_bubble needs the weights that the forward pass used"
        )
        ways = ["parallel.options.reshard = false", 'parallel.options.schedule = "interleaved_1f1b"']
        given = parallel.written("options.reshard options.schedule")
        yield Problem("options.reshard", what, "weights that stay gathered", ways, given)


def _stages_of_the_schedule(parallel: ParallelConfig) -> Iterator[Problem]:
    key, stages, schedule = (
        "options.stages_per_rank",
        parallel.options.stages_per_rank,
        parallel.options.schedule,
    )
    if stages > 1 and parallel.pipeline is None:
        what, expected = "no effect without parallel.pipeline", "parallel.pipeline"
        ways = [_A_DIM.format("pipeline"), f"remove parallel.{key}"]
    elif stages > 1 and schedule not in _MANY_STAGES:
        what = f"no effect with schedule = {toml(schedule)}, which runs one stage on each rank"
        expected = f"schedule = {' or '.join(map(toml, _MANY_STAGES))}"
        ways = [
            *(f"parallel.options.schedule = {toml(name)}" for name in _MANY_STAGES),
            f"parallel.{key} = 1",
        ]
    elif stages == 1 and schedule in _MANY_STAGES and parallel.pipeline is not None:
        what, expected = f"{schedule} needs several stages on each rank", "2 or more"
        ways = [f"parallel.{key} = 2", 'parallel.options.schedule = "1f1b"']
    else:
        return
    yield Problem(key, what, expected, ways, parallel.written(f"{key} options.schedule"))


class ParallelOptions(Section):
    """`[parallel.options]`: settings for each kind of parallelism."""

    place = "parallel.options"
    reduce_dtype: Literal["bfloat16"] | None = None
    """With shard: dtype in which gradients are accumulated over microbatches and reduced over ranks. If omitted,
    train.dtype.
    """
    reshard: bool | None = None
    """With shard: free a layer's gathered weights after its forward pass, and gather them again for the backward
    pass. If false, weights are gathered once per step and freed after the step's last pass. If omitted, true, but false
    with a pipeline.
    """
    sequence_parallel: bool = False
    """With tensor: split activations between blocks along the sequence."""
    schedule: PipelineSchedule = "1f1b"
    """With pipeline: the order of forward and backward passes."""
    stages_per_rank: int = Field(default=1, ge=1)
    """With interleaved_1f1b and zero_bubble: pipeline stages per rank, 2 or more."""
    attention: Literal["ring", "ulysses"] = "ring"
    """With context: "ring" passes keys and values around a ring; "ulysses" splits heads instead of tokens."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """With data or context, without shard: megabytes (10^6 bytes) of gradients reduced at once."""


class ParallelConfig(Section):
    """`[parallel]`: the role of each dim of the mesh in training.

    In its methods, `sizes` are from MeshConfig.sizes, and `views` from a mesh or a layout.
    """

    place = "parallel"
    rules = (_one_part_each, _kept_in_halves, _stages_of_the_schedule)
    no_effect = (
        NoEffect("options.sequence_parallel", "tensor", way=_A_DIM.format("tensor")),
        NoEffect("options.schedule", "pipeline", way=_A_DIM.format("pipeline")),
        NoEffect("options.attention", "context", way=_A_DIM.format("context")),
        # fully_shard reduces the gradients of one block at once.
        NoEffect("options.bucket_mb", "shard", (None,), why=_BY_BLOCK),
        NoEffect("options.bucket_mb", "data context shard", way=_A_DIM.format("data")),
        NoEffect("options.reduce_dtype options.reshard", "shard", way=_A_DIM.format("shard")),
    )
    data: Text | None = None
    """The dim along which samples are split and weights are replicated. If omitted, none."""
    shard: Text | None = None
    """The dim along which samples and weights are split; weights are gathered where they are used (FSDP). With
    data: hybrid sharding, with replicas of the shards. With context: weights are sharded along both. If
    omitted, weights are not sharded.
    """
    tensor: Text | None = None
    """The dim along which each layer is split. If omitted, none."""
    pipeline: Text | None = None
    """The dim along which the layers are divided into stages. If omitted, none."""
    context: Text | None = None
    """The dim along which the tokens of each sample are split. If omitted, none."""
    expert: Text | None = None
    """The dim of a view in mesh.views along which experts are split. The view must contain the dims of pipeline
    and tensor unchanged. If omitted, every rank has all experts.
    """
    options: ParallelOptions = ParallelOptions()
    """Settings for each kind of parallelism."""

    @property
    def parts(self) -> dict[ParallelRole, str]:
        """A mapping from each assigned role to its dim."""
        return {part: dim for part in PARTS if (dim := getattr(self, part)) is not None}

    @property
    def data_dims(self) -> tuple[str, ...]:
        """The dims along which ranks read different samples, outermost first. Along all other dims, samples are
        equal.
        """
        return self._played("data", "shard")

    @property
    def gradient_dims(self) -> tuple[str, ...]:
        """The dims along which gradients are summed for all weights except those of experts."""
        return self._played("data", "shard", "context")

    def shard_dims(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the dims, treated as one, along which all weights except those of experts are sharded: shard and context.

        If there are several, return only dims of size above 1, in the order of `sizes`.
        """
        if self.shard is None:
            return ()
        run = tuple(dim for dim in sizes if dim in (self.shard, self.context) and sizes[dim] != 1)
        return run or (self.shard,)

    def expert_view(self, views: Mapping[str, Mapping[str, int]]) -> str | None:
        """Return the view that contains the expert dim; None if no dim has that role."""
        return next((view for view, sizes in views.items() if self.expert in sizes), None)

    def expert_gradient_dims(self, views: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """Return the dims along which gradients of experts' weights are summed.

        These are the dims of the expert's view other than expert, pipeline and tensor. Without such a view,
        experts are treated as other weights.
        """
        view = self.expert_view(views)
        if view is None:
            return self.gradient_dims
        return tuple(dim for dim in views[view] if dim not in (self.expert, self.pipeline, self.tensor))

    def reshards(self, ranks: int) -> bool:
        """Return whether gathered weights are freed between a layer's passes. ranks: number of ranks of the pipeline."""
        return ranks == 1 if self.options.reshard is None else self.options.reshard

    def size(self, part: ParallelRole, sizes: Mapping[str, int]) -> int:
        """Return the number of ranks along the dim of a role; 1 if no dim has it. For expert, `sizes` are from its
        view.
        """
        dim = self.parts.get(part)
        return 1 if dim is None else sizes[dim]

    def copies(self, sizes: Mapping[str, int]) -> int:
        """Return the number of shards that the samples of a batch are split into."""
        return math.prod(sizes[dim] for dim in self.data_dims)

    def stages(self, sizes: Mapping[str, int]) -> int:
        """Return the number of pipeline stages over all ranks; 1 if the pipeline has one rank."""
        ranks = self.size("pipeline", sizes)
        return 1 if ranks == 1 else ranks * self.options.stages_per_rank

    def _played(self, *parts: ParallelRole) -> tuple[str, ...]:
        return tuple(dim for part, dim in self.parts.items() if part in parts)


def runs(schedule: PipelineSchedule, microbatches: int, ranks: int) -> bool:
    """Return whether a schedule supports this number of micro-batches per step on this number of ranks.

    interleaved_1f1b takes one micro-batch per rank in each round (Narayanan et al. 2021).
    zero_bubble takes microbatches // ranks rounds of equal length, as ScheduleInterleavedZeroBubble
    of torch 2.13 requires. torch's ScheduleZBVZeroBubble runs any number.
    """
    if ranks == 1:
        return True
    if schedule == "gpipe":
        return microbatches >= 1
    if microbatches < ranks:
        return False
    if schedule == "interleaved_1f1b":
        return microbatches % ranks == 0
    return schedule == "1f1b" or microbatches % (microbatches // ranks) == 0
