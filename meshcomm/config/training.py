"""What is trained, on what, how, and on which dims: `[parallel]`, `[model]`, `[data]`, `[train]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.table import FrozenList, Pair
from meshcomm.config.wording import toml

Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Part: TypeAlias = Literal["data", "tensor", "pipeline"]
PARTS: tuple[Part, ...] = ("data", "tensor", "pipeline")


class ParallelConfig(Model):
    """`[parallel]`: which dim of the mesh plays which part in training."""

    data: Text | None = Field(
        default=None, description="The dim along which samples are split. None: not split."
    )
    tensor: Text | None = Field(
        default=None, description="The dim along which each layer is split. None: not split."
    )
    pipeline: Text | None = Field(
        default=None, description="The dim along which the layers are split. None: not split."
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description='With pipeline: the order of forward and backward passes. Default "1f1b".'
    )
    bucket_mb: float = Field(
        default=25.0,
        gt=0,
        description="With data: megabytes (10^6 bytes) of gradients that are reduced at once. Default 25.",
    )

    @property
    def parts(self) -> dict[Part, str]:
        """The dim of every part that is played."""
        return {part: dim for part in PARTS if (dim := getattr(self, part)) is not None}

    def size(self, part: Part, sizes: Mapping[str, int]) -> int:
        """Number of ranks along a part's dim, 1 where no dim plays it. `sizes`: as from MeshConfig.sizes."""
        dim = self.parts.get(part)
        return 1 if dim is None else sizes[dim]

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
        for field, part in (("schedule", "pipeline"), ("bucket_mb", "data")):
            if self.given(field) and getattr(self, part) is None and not broken.touches(part):
                yield Problem(
                    field,
                    f"no effect without parallel.{part}",
                    given=f"{field} = {toml(getattr(self, field))}, no {part}",
                    expected=f"a dim that plays {part}",
                    hint=either([f"remove parallel.{field}", f"name a dim in parallel.{part}"]),
                )


class ModelConfig(Model):
    """`[model]`: a decoder-only transformer over bytes."""

    layers: int = Field(ge=1, description="Number of transformer blocks.", examples=[4])
    width: int = Field(ge=1, description="Elements of a token's vector.", examples=[128])
    heads: int = Field(ge=1, description="Attention heads of the queries; width divides by it.", examples=[8])
    kv_heads: int = Field(
        ge=1, description="Attention heads of keys and values; heads divides by it.", examples=[4]
    )
    ff: int = Field(ge=1, description="Elements inside the feed-forward block.", examples=[384])
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary angles. Default 10000.")
    norm_eps: float = Field(
        default=1e-5, gt=0, description="Added to the mean square in RMSNorm. Default 1e-5."
    )

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: the 256 bytes."""
        return 256

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        width, heads, kv_heads = self.width, self.heads, self.kv_heads
        if not broken.touches("heads", "kv_heads") and heads % kv_heads:
            yield Problem(
                "kv_heads",
                f"heads is not divisible by kv_heads: {heads} % {kv_heads} = {heads % kv_heads}",
                given=f"heads = {heads}, kv_heads = {kv_heads}",
                expected="heads divisible by kv_heads: equally many query heads share each of them",
                hint=either(
                    [f"model.kv_heads = {n}" for n in nearest(kv_heads, lambda n: heads % n == 0)]
                    + [f"model.heads = {n}" for n in nearest(heads, lambda n: n % kv_heads == 0, 1)]
                ),
            )
        if broken.touches("width", "heads"):
            return
        fitting = [f"model.width = {n}" for n in nearest(width, lambda n: n % (2 * heads) == 0)]
        if width % heads:
            yield Problem(
                "width",
                f"width is not divisible by heads: {width} % {heads} = {width % heads}",
                given=f"width = {width}, heads = {heads}",
                expected="heads of equal, even size: width divisible by 2*heads",
                hint=either(fitting),
            )
        elif self.head_size % 2:
            yield Problem(
                "width",
                f"the size of a head is odd: {width} / {heads} = {self.head_size}",
                given=f"width = {width}, heads = {heads}",
                expected="an even size: rotary embeddings turn pairs of elements",
                hint=either(fitting),
            )


class DataConfig(Model):
    """`[data]`: bytes of real text."""

    files: FrozenList[Text] = Field(
        default=(),
        description="Paths or globs, relative to the config file. Default []: the sources of Python's "
        "standard library.",
    )
    sequence: int = Field(ge=1, description="Tokens (bytes) of a sample.", examples=[128])
    max_bytes: int = Field(
        default=8_000_000, ge=2, description="Bytes that are read at most. Default 8,000,000."
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        if not broken.touches("sequence", "max_bytes") and self.max_bytes <= self.sequence:
            yield Problem(
                "max_bytes",
                f"does not hold one sample: {self.sequence} + 1 > {self.max_bytes}",
                given=f"sequence = {self.sequence}, max_bytes = {self.max_bytes}",
                expected="max_bytes above sequence: a sample is its tokens and the one that follows",
                hint=either(
                    [f"data.max_bytes = {self.sequence + 1}", f"data.sequence = {self.max_bytes - 1}"]
                ),
            )


class TrainConfig(Model):
    """`[train]`: AdamW on batches whose size does not depend on the mesh."""

    steps: int = Field(ge=1, description="Optimiser steps.", examples=[60])
    global_batch: int = Field(ge=1, description="Samples of a step, over all ranks.", examples=[32])
    microbatch: int = Field(ge=1, description="Samples of one rank in one micro step.", examples=[4])
    lr: float = Field(default=3e-3, gt=0, description="Learning rate after the warm-up. Default 3e-3.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps in which the learning rate rises to lr. Default 0."
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's weight decay. Default 0.1.")
    betas: Pair[Fraction] = Field(
        default=(0.9, 0.95), description="AdamW's two decay rates. Default [0.9, 0.95]."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon. Default 1e-8.")
    seed: int = Field(
        default=0, ge=0, description="Seed of the weights and of the samples' order. Default 0."
    )
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description='Type of the weights. Default "float32".'
    )
    out: Text = Field(
        default="runs/train", description='Folder for what the run writes. Default "runs/train".'
    )
    log_every: int = Field(
        default=1, ge=1, description="Steps from one line of metrics to the next. Default 1."
    )
    checkpoint_every: int = Field(
        default=0,
        ge=0,
        description="Steps from one checkpoint to the next; one more follows the last step. 0: none. Default 0.",
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="With checkpoint_every: how many of the last checkpoints stay. Default 2.",
    )
    resume: bool = Field(
        default=False,
        description="Go on from the last complete checkpoint in out, if there is one. Default false.",
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        if not broken.touches("steps", "warmup_steps") and self.warmup_steps > self.steps:
            yield Problem(
                "warmup_steps",
                f"the warm-up is longer than the training: {self.warmup_steps} > {self.steps}",
                given=f"warmup_steps = {self.warmup_steps}, steps = {self.steps}",
                expected=f"0 to {self.steps}",
                hint=either([f"train.warmup_steps = {self.steps}", f"train.steps = {self.warmup_steps}"]),
            )
        if self.given("keep") and not self.checkpoint_every and not broken.touches("checkpoint_every"):
            yield Problem(
                "keep",
                "no effect: no checkpoints are saved",
                given=f"keep = {self.keep}, checkpoint_every = 0",
                expected="checkpoint_every of 1 or more",
                hint=either(["train.checkpoint_every = 100", "remove train.keep"]),
            )
