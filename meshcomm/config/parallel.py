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
# Usual names of dims -> their roles, where there is no [parallel].
USUAL_NAMES: Final[Mapping[str, ParallelRole]] = {part: part for part in PARTS} | {
    "tp": "tensor", "pp": "pipeline", "pipe": "pipeline", "stage": "pipeline", "dp": "data", "fsdp": "shard",
    "dp_shard": "shard", "cp": "context", "ep": "expert",
}  # fmt: skip
PipelineSchedule: TypeAlias = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]
# Schedules that run several stages per rank.
_MANY_STAGES: tuple[PipelineSchedule, ...] = ("interleaved_1f1b", "zero_bubble")
_A_DIM: Final = "name a dim in parallel.{}"
_BY_BLOCK: Final = " with parallel.shard: gradients are reduced block by block"


def _one_part_each(parallel: ParallelConfig) -> Iterator[Problem]:
    seen: dict[str, ParallelRole] = {}
    for part, dim in parallel.parts.items():
        first = seen.setdefault(dim, part)
        if first != part:
            what, expected = f"the dim {dim} already has the role {first}", "a different dim for every role"
            ways = [f"remove parallel.{part}, or give it another dim"]
            yield Problem(part, what, expected, ways, parallel.written(f"{first} {part}"))


def _kept_in_halves(parallel: ParallelConfig) -> Iterator[Problem]:
    options = parallel.options
    if options.reshard and options.schedule == "zero_bubble" and parallel.pipeline is not None:
        what = "the second half of a zero_bubble backward pass needs the weights that the forward pass used"
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
        what = f"no effect with schedule = {toml(schedule)}, which runs one stage per rank"
        expected = f"schedule = {' or '.join(map(toml, _MANY_STAGES))}"
        ways = [
            *(f"parallel.options.schedule = {toml(name)}" for name in _MANY_STAGES),
            f"parallel.{key} = 1",
        ]
    elif stages == 1 and schedule in _MANY_STAGES and parallel.pipeline is not None:
        what, expected = f"{schedule} needs several stages per rank", "2 or more"
        ways = [f"parallel.{key} = 2", 'parallel.options.schedule = "1f1b"']
    else:
        return
    yield Problem(key, what, expected, ways, parallel.written(f"{key} options.schedule"))


class ParallelOptions(Section):
    """`[parallel.options]`: settings specific to each kind of parallelism."""

    place = "parallel.options"
    reduce_dtype: Literal["bfloat16"] | None = None
    """With shard: dtype in which gradients are accumulated over microbatches and reduced across ranks. If omitted,
    train.dtype is used.
    """
    reshard: bool | None = None
    """With shard: free a layer's gathered weights after its forward pass, and gather them again for the backward
    pass. If false, weights are gathered once per step and freed after the step's last pass. If omitted, true without a
    pipeline and false with a pipeline.
    """
    sequence_parallel: bool = False
    """With tensor: sequence parallelism, which shards the activations between blocks along the sequence."""
    schedule: PipelineSchedule = "1f1b"
    """With pipeline: the order of forward and backward passes."""
    stages_per_rank: int = Field(default=1, ge=1)
    """With interleaved_1f1b and zero_bubble: pipeline stages per rank, 2 or more."""
    attention: Literal["ring", "ulysses"] = "ring"
    """With context: "ring" passes keys and values around a ring; "ulysses" splits heads instead of tokens."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """With data or context, without shard: bucket size for reducing gradients, in megabytes (10^6 bytes)."""


class ParallelConfig(Section):
    """`[parallel]`: the role of each dim of the mesh in training.

    The `sizes` that its methods take come from MeshConfig.sizes, and `views` from a mesh or a layout.
    """

    place = "parallel"
    rules = (
        NoEffect("options.sequence_parallel", "tensor", way=_A_DIM.format("tensor")),
        NoEffect("options.schedule", "pipeline", way=_A_DIM.format("pipeline")),
        NoEffect("options.attention", "context", way=_A_DIM.format("context")),
        # fully_shard reduces all gradients of a block together.
        NoEffect("options.bucket_mb", "shard", (None,), why=_BY_BLOCK),
        NoEffect("options.bucket_mb", "data context shard", way=_A_DIM.format("data")),
        NoEffect("options.reduce_dtype options.reshard", "shard", way=_A_DIM.format("shard")),
        *(_one_part_each, _kept_in_halves, _stages_of_the_schedule),
    )
    data: Text | None = None
    """The dim along which samples are split and weights are replicated (DDP, DP). If omitted, no dim has this role."""
    shard: Text | None = None
    """The dim along which samples are split and weights are sharded; each layer's weights are gathered for its passes
    (FSDP, ZeRO). With data, the shards are replicated (hybrid sharding). With context, weights are sharded along both dims.
    If omitted, weights are not sharded.
    """
    tensor: Text | None = None
    """The dim along which each layer is split (TP). If omitted, layers are not split."""
    pipeline: Text | None = None
    """The dim along which the layers are divided into pipeline stages (PP). If omitted, there is no pipeline."""
    context: Text | None = None
    """The dim along which the tokens of each sample are split (CP). If omitted, samples are not split."""
    expert: Text | None = None
    """The dim, from a view in mesh.views, along which experts are distributed (EP). The view must also contain the pipeline
    and tensor dims, unchanged. If omitted, every rank has all experts.
    """
    options: ParallelOptions = ParallelOptions()
    """Settings specific to each kind of parallelism."""

    @property
    def parts(self) -> dict[ParallelRole, str]:
        """A mapping from each assigned role to its dim."""
        return {part: dim for part in PARTS if (dim := getattr(self, part)) is not None}

    @property
    def data_dims(self) -> tuple[str, ...]:
        """The dims along which ranks read different samples, outermost first. Along all other dims, ranks read the same
        samples.
        """
        return self._played("data", "shard")

    @property
    def gradient_dims(self) -> tuple[str, ...]:
        """The dims along which the gradients of all weights except the experts' are summed."""
        return self._played("data", "shard", "context")

    def shard_dims(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the dims along which all weights except the experts' are sharded: shard and context, treated as one dim.

        Dims of size 1 are left out if another dim remains. The remaining dims are in the order of `sizes`.
        """
        if self.shard is None:
            return ()
        run = tuple(dim for dim in sizes if dim in (self.shard, self.context) and sizes[dim] != 1)
        return run or (self.shard,)

    def expert_view(self, views: Mapping[str, Mapping[str, int]]) -> str | None:
        """Return the view that contains the expert dim, or None if no dim has that role."""
        return next((view for view, sizes in views.items() if self.expert in sizes), None)

    def expert_gradient_dims(self, views: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """Return the dims along which the gradients of experts' weights are summed.

        These are all dims of the expert view except expert, pipeline and tensor. Without such a view, experts' weights
        are treated like all other weights.
        """
        view = self.expert_view(views)
        if view is None:
            return self.gradient_dims
        return tuple(dim for dim in views[view] if dim not in (self.expert, self.pipeline, self.tensor))

    def reshards(self, ranks: int) -> bool:
        """Return whether a layer's gathered weights are freed between its passes. ranks: number of pipeline ranks."""
        return ranks == 1 if self.options.reshard is None else self.options.reshard

    def size(self, part: ParallelRole, sizes: Mapping[str, int]) -> int:
        """Return the number of ranks along the dim with this role, or 1 if no dim has the role. For expert, `sizes` must
        be the sizes of its view.
        """
        dim = self.parts.get(part)
        return 1 if dim is None else sizes[dim]

    def copies(self, sizes: Mapping[str, int]) -> int:
        """Return the number of shards that the samples of a batch are split into."""
        return math.prod(sizes[dim] for dim in self.data_dims)

    def stages(self, sizes: Mapping[str, int]) -> int:
        """Return the total number of pipeline stages, or 1 if the pipeline has only one rank."""
        ranks = self.size("pipeline", sizes)
        return 1 if ranks == 1 else ranks * self.options.stages_per_rank

    def _played(self, *parts: ParallelRole) -> tuple[str, ...]:
        return tuple(dim for part in parts if (dim := getattr(self, part)) is not None)


def runs(schedule: PipelineSchedule, microbatches: int, ranks: int) -> bool:
    """Return whether a schedule supports this number of microbatches per step on this number of ranks.

    interleaved_1f1b runs one microbatch per rank in each round (Narayanan et al. 2021).
    zero_bubble runs microbatches // ranks rounds of equal length, as ScheduleInterleavedZeroBubble
    in torch 2.13 requires. torch's ScheduleZBVZeroBubble supports any number of microbatches.
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
