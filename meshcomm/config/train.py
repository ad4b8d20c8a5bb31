"""How is it trained? The `[train]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.table import Pair
from meshcomm.config.wording import toml

Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class TrainConfig(Model):
    """`[train]`: AdamW on batches whose size does not depend on the mesh."""

    steps: int = Field(ge=1, description="Optimiser steps.", examples=[60])
    global_batch: int = Field(ge=1, description="Samples of a step, over all ranks.", examples=[32])
    microbatch: int = Field(ge=1, description="Samples of one rank in one micro step.", examples=[4])
    lr: float = Field(default=3e-3, gt=0, description="Learning rate after the warm-up. Default 3e-3.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps in which the learning rate rises to lr. Default 0."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description='How the learning rate falls after the warm-up. Default "cosine".'
    )
    min_lr_ratio: Share = Field(
        default=0.1,
        description="With cosine and linear: the last step's learning rate as a share of lr. Default 0.1.",
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's weight decay. Default 0.1.")
    betas: Pair[Fraction] = Field(
        default=(0.9, 0.95), description="AdamW's two decay rates. Default [0.9, 0.95]."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon. Default 1e-8.")
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        description="Gradients whose norm over all weights is larger are scaled down to it. None: never.",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="What a step whose loss or gradient norm is not finite does on every rank; it is never applied. "
        '"stop": the run ends. "skip": it goes on with the next step, for 10 such steps in a row at most. '
        'Default "stop".',
    )
    seed: int = Field(
        default=0, ge=0, description="Seed of the weights and of the samples' order. Default 0."
    )
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description='Type of the weights. Default "float32".'
    )
    compute_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="Type that matrices are multiplied in (autocast); weights keep dtype. None: dtype.",
    )
    recompute: bool = Field(
        default=False,
        description="Each block's activations are computed again in the backward pass instead of kept. "
        "Default false.",
    )
    compile: bool = Field(default=False, description="Each block goes through torch.compile. Default false.")
    out: Text = Field(
        default="runs/train", description='Folder for what the run writes. Default "runs/train".'
    )
    log_every: int = Field(
        default=1, ge=1, description="Steps from one line of metrics to the next. Default 1."
    )
    trace_steps: Pair[int] | None = Field(
        default=None,
        description="The first and the last step whose calls are written to trace.json in out. None: none.",
        examples=[(3, 5)],
    )
    checkpoint_every: int = Field(
        default=0,
        ge=0,
        description="Steps from one checkpoint to the next; one more follows the last step. 0: none. Default 0.",
    )
    checkpoint_async: bool = Field(
        default=False,
        description="With checkpoint_every: training goes on while a checkpoint is written. Default false.",
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
        if self.given("min_lr_ratio") and self.schedule == "constant" and not broken.touches("schedule"):
            yield Problem(
                "min_lr_ratio",
                'no effect with schedule = "constant"',
                given=f"min_lr_ratio = {toml(self.min_lr_ratio)}, schedule = {toml(self.schedule)}",
                expected="a schedule that falls",
                hint=either(['train.schedule = "cosine"', "remove train.min_lr_ratio"]),
            )
        if self.compute_dtype is not None and self.dtype == "float64" and not broken.touches("dtype"):
            yield Problem(
                "compute_dtype",
                'no effect with dtype = "float64", which autocast leaves as it is',
                given=f"compute_dtype = {toml(self.compute_dtype)}, dtype = {toml(self.dtype)}",
                expected='dtype = "float32" beside it',
                hint=either(['train.dtype = "float32"', "remove train.compute_dtype"]),
            )
        if self.trace_steps is not None and not broken.touches("trace_steps", "steps"):
            first, last = self.trace_steps
            if not 1 <= first <= last <= self.steps:
                yield Problem(
                    "trace_steps",
                    f"steps {first} to {last} are no steps of this training",
                    given=f"trace_steps = {toml(self.trace_steps)}, steps = {self.steps}",
                    expected=f"a first and a last step, from 1 to {self.steps}",
                    hint=either(
                        [f"train.trace_steps = {toml((1, min(3, self.steps)))}", "remove train.trace_steps"]
                    ),
                )
        if not self.checkpoint_every and not broken.touches("checkpoint_every"):
            yield from self._without_checkpoints()

    def _without_checkpoints(self) -> Iterator[Problem]:
        wanted = {"keep": self.given("keep"), "checkpoint_async": self.checkpoint_async}
        for field in (name for name, given in wanted.items() if given):
            yield Problem(
                field,
                "no effect: no checkpoints are saved",
                given=f"{field} = {toml(getattr(self, field))}, checkpoint_every = 0",
                expected="checkpoint_every of 1 or more",
                hint=either(["train.checkpoint_every = 100", f"remove train.{field}"]),
            )
