"""Which dim of the mesh plays which part in training? The `[parallel]` section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.wording import toml

Text = Annotated[str, Field(min_length=1)]
Part: TypeAlias = Literal["data", "shard", "tensor", "pipeline", "context", "expert"]
PARTS: tuple[Part, ...] = ("data", "shard", "tensor", "pipeline", "context", "expert")
PipelineSchedule: TypeAlias = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]
# Those that run several stages on each rank.
_MANY_STAGES: tuple[PipelineSchedule, ...] = ("interleaved_1f1b", "zero_bubble")


class ParallelConfig(Model):
    """`[parallel]`: which dim of the mesh plays which part in training."""

    data: Text | None = Field(
        default=None,
        description="The dim along which samples are split and weights are copied. None: not split.",
    )
    shard: Text | None = Field(
        default=None,
        description="The dim along which samples are split, and weights too: each is gathered where it is "
        "used (FSDP). With data: hybrid, copies of the shards. None: not sharded.",
    )
    tensor: Text | None = Field(
        default=None, description="The dim along which each layer is split. None: not split."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tensor: activations between blocks are split along the sequence. Default false.",
    )
    pipeline: Text | None = Field(
        default=None, description="The dim along which the layers are split. None: not split."
    )
    schedule: PipelineSchedule = Field(
        default="1f1b", description='With pipeline: the order of forward and backward passes. Default "1f1b".'
    )
    stages_per_rank: int = Field(
        default=1,
        ge=1,
        description="With interleaved_1f1b and zero_bubble: parts of the layers that each rank runs, 2 or more. "
        "Default 1.",
    )
    context: Text | None = Field(
        default=None, description="The dim along which each sample's tokens are split. None: not split."
    )
    attention: Literal["ring", "ulysses"] = Field(
        default="ring",
        description="With context: keys and values go around a ring, or heads are split in place of tokens. "
        'Default "ring".',
    )
    expert: Text | None = Field(
        default=None,
        description="The dim of one of mesh.views along which experts are split; that view holds the dims of "
        "pipeline and tensor unchanged. None: all experts on every rank.",
    )
    bucket_mb: float = Field(
        default=25.0,
        gt=0,
        description="With data or context, without shard: megabytes (10^6 bytes) of gradients that are reduced at "
        "once. Default 25.",
    )

    @property
    def parts(self) -> dict[Part, str]:
        """The dim of every part that is played."""
        return {part: dim for part in PARTS if (dim := getattr(self, part)) is not None}

    @property
    def data_dims(self) -> tuple[str, ...]:
        """The dims that decide which samples a rank reads, outermost first: equal along all others."""
        return self._played("data", "shard")

    @property
    def gradient_dims(self) -> tuple[str, ...]:
        """The dims along which gradients of weights that are no expert's are summed."""
        return self._played("data", "shard", "context")

    def expert_view(self, views: Mapping[str, Mapping[str, int]]) -> str | None:
        """The view that the expert's dim is in; None where no dim plays that part.

        views: as of a mesh or a layout.
        """
        return next((view for view, sizes in views.items() if self.expert in sizes), None)

    def expert_gradient_dims(self, views: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """The dims along which gradients of experts' weights are summed.

        What the expert's view has beside the dims of expert, pipeline and tensor. Where no dim
        plays that part, experts are like all weights. views: as of a mesh or a layout.
        """
        view = self.expert_view(views)
        if view is None:
            return self.gradient_dims
        return tuple(dim for dim in views[view] if dim not in (self.expert, self.pipeline, self.tensor))

    def size(self, part: Part, sizes: Mapping[str, int]) -> int:
        """Number of ranks along a part's dim, 1 where no dim plays it.

        sizes: as from MeshConfig.sizes; for expert, those of its view.
        """
        dim = self.parts.get(part)
        return 1 if dim is None else sizes[dim]

    def copies(self, sizes: Mapping[str, int]) -> int:
        """In how many parts a batch's samples are split. `sizes`: as from MeshConfig.sizes."""
        return math.prod(sizes[dim] for dim in self.data_dims)

    def stages(self, sizes: Mapping[str, int]) -> int:
        """Parts of the layers over all ranks; 1 where the pipeline has one rank and nothing is split.

        sizes: as from MeshConfig.sizes.
        """
        ranks = self.size("pipeline", sizes)
        return 1 if ranks == 1 else ranks * self.stages_per_rank

    def _played(self, *parts: Part) -> tuple[str, ...]:
        return tuple(dim for part, dim in self.parts.items() if part in parts)

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        seen: dict[str, Part] = {}
        for part, dim in self.parts.items():
            first = seen.setdefault(dim, part)
            if first != part:
                yield Problem(
                    part,
                    f"the dim {dim} plays {first} already",
                    given=f"{first} = {toml(dim)}, {part} = {toml(dim)}",
                    expected="a dim of its own for every part",
                    hint=f"remove parallel.{part}, or give it another dim",
                )
        yield from self._without_effect(broken)
        if self.pipeline is not None and not broken.touches("schedule", "stages_per_rank"):
            yield from self._stages_per_rank()

    def _without_effect(self, broken: Broken) -> Iterator[Problem]:
        needs: list[tuple[str, tuple[Part, ...], bool]] = [
            ("sequence_parallel", ("tensor",), self.sequence_parallel),
            ("schedule", ("pipeline",), self.given("schedule")),
            ("stages_per_rank", ("pipeline",), self.stages_per_rank > 1),
            ("attention", ("context",), self.given("attention")),
            ("bucket_mb", ("data", "context"), self.given("bucket_mb") and self.shard is None),
        ]
        for field, parts, wanted in needs:
            if wanted and not any(part in self.parts for part in parts) and not broken.touches(field, *parts):
                yield Problem(
                    field,
                    f"no effect without parallel.{parts[0]}",
                    given=f"{field} = {toml(getattr(self, field))}, no {parts[0]}",
                    expected=f"a dim that plays {' or '.join(parts)}",
                    hint=either(
                        [f"remove parallel.{field}", *(f"name a dim in parallel.{part}" for part in parts)]
                    ),
                )
        # fully_shard reduces the gradients of one block at once.
        if self.given("bucket_mb") and self.shard is not None:
            yield Problem(
                "bucket_mb",
                "no effect with parallel.shard: sharded gradients are reduced block by block",
                given=f"bucket_mb = {toml(self.bucket_mb)}, shard = {toml(self.shard)}",
                expected="bucket_mb only where gradients are whole",
                hint="remove parallel.bucket_mb",
            )

    def _stages_per_rank(self) -> Iterator[Problem]:
        stages, schedule = self.stages_per_rank, self.schedule
        given = f"stages_per_rank = {stages}, schedule = {toml(schedule)}"
        if schedule not in _MANY_STAGES and stages > 1:
            yield Problem(
                "stages_per_rank",
                f"no effect with schedule = {toml(schedule)}, which runs one stage on each rank",
                given=given,
                expected="one of " + ", ".join(map(toml, _MANY_STAGES)) + " beside it",
                hint=either(
                    [
                        *(f"parallel.schedule = {toml(name)}" for name in _MANY_STAGES),
                        "parallel.stages_per_rank = 1",
                    ]
                ),
            )
        if schedule in _MANY_STAGES and stages < 2:
            yield Problem(
                "stages_per_rank",
                f"{schedule} needs several stages on each rank",
                given=given,
                expected="2 or more",
                hint=either(["parallel.stages_per_rank = 2", 'parallel.schedule = "1f1b"']),
            )
