"""On what, and how is it trained? The `[data]` and `[train]` sections."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import (
    Fraction,
    FrozenList,
    FrozenTable,
    Pair,
    Section,
    Table,
    Text,
    no_effect,
    rule,
    setting,
)
from meshcomm.config.write import toml

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


# In place of a tokenizer.
BYTES: Final = "bytes"


class DataConfig(Section):
    """`[data]`: text, as bytes or through a tokenizer, token files, a folder of datasets, or what a function returns."""

    place = "data"
    files: FrozenList[Text] = setting(
        (),
        "Text files: paths or globs, relative to the config file. Default []: the sources of Python's standard library, "
        "where nothing else is named.",
    )
    tokens: FrozenList[Text] = setting(
        (),
        "Token files: paths or globs, relative to the config file, of .npy or of raw .bin. Default []: none.",
        examples=[["web.bin", "code.npy"]],
    )
    token_type: Literal["uint16", "uint32"] = setting("uint16", "With tokens: what a .bin file holds.")
    weights: FrozenList[float] = setting(
        (),
        "With tokens: the share of the samples that comes from each entry, in relation to the others. Default []: each "
        "sample of all files once in an epoch.",
        examples=[[0.7, 0.3]],
    )
    dataset: Text | None = setting(
        None,
        "A folder that save_to_disk of datasets wrote, relative to the config file. None: none.",
        examples=["wiki"],
    )
    split: Text | None = setting(None, "With dataset: which of its splits is trained on. None: it has none.")
    column: Text = setting("text", "With dataset: the column with the text, or with lists of tokens.")
    build: Text | None = setting(
        None,
        "module:function, which returns an indexable dataset of samples, or an iterable. None: none.",
        examples=["my_package.data:loader"],
    )
    args: FrozenTable[str | int | float | bool] = Field(
        default_factory=Table,
        description="With build: what the function is called with, by name.",
        examples=[{"folder": "images"}],
    )
    tokenizer: Text | None = setting(
        None,
        "With text: a tokenizer.json, or the folder of a model of transformers that has one, relative to the config file. "
        '"bytes": a byte is a token. None: the tokenizer in the folder of model.pretrained; without one, bytes, which '
        "weights that are read from a folder refuse.",
        examples=["tokenizer.json"],
    )
    eos: Text | None = setting(
        None,
        "With a tokenizer: the token that ends a document, which is a file, or a row of dataset. None: the eos_token that "
        "the tokenizer's folder names, if any.",
        examples=["<|endoftext|>"],
    )
    sequence: int = Field(ge=1, description="Tokens of a sample.", examples=[128])
    max_bytes: int | None = setting(
        None,
        "With text: bytes that are read at most, of all files or rows in order. None: all of them.",
        ge=2,
        examples=[8_000_000],
    )
    order: Literal["epochs", "random"] = setting(
        "epochs",
        "epochs: every sample once, in another order each time, drawn from train.seed. random: where a sample begins is "
        "drawn for each, with replacement.",
    )
    validation: Fraction = setting(
        0.0, "Share of the samples, at the end of each source, that is not trained on but evaluated."
    )
    validation_files: FrozenList[Text] = setting(
        (), "Files of their own to evaluate: as files, or with tokens as tokens. Default []: none."
    )
    validation_split: Text | None = setting(None, "With dataset: the split to evaluate. None: none.")

    @property
    def source(self) -> str:
        """Which setting names what is read."""
        return next((name for name in ("build", "dataset", "tokens") if getattr(self, name)), "files")

    def tokenizer_of(self, pretrained: str | None) -> Path | None:
        """What turns its text into tokens; None: a byte is a token. pretrained: model.pretrained."""
        if self.tokenizer is not None:
            return None if self.tokenizer == BYTES else Path(self.tokenizer)
        if pretrained is None or self.source not in ("files", "dataset"):
            return None
        # os.path, as nothing is a file whose name is too long or has a null character.
        return Path(pretrained) if os.path.isfile(f"{pretrained}/tokenizer.json") else None

    @property
    def validates(self) -> bool:
        """Whether there is something to evaluate."""
        return bool(self.validation or self.validation_files or self.validation_split)


@rule(DataConfig, "max_bytes", "sequence")
def _one_sample(data: DataConfig) -> Iterator[Problem]:
    if data.max_bytes is None or data.source != "files" or data.tokenizer not in (None, BYTES):
        return
    if data.max_bytes <= data.sequence:
        yield Problem(
            f"does not hold one sample: {data.sequence} + 1 > {data.max_bytes}",
            "max_bytes above sequence: a sample is its tokens and the one that follows",
            [f"data.max_bytes = {data.sequence + 1}", f"data.sequence = {data.max_bytes - 1}"],
        )


@rule(DataConfig, "files", "tokens", "dataset", "build")
def _one_source(data: DataConfig) -> Iterator[Problem]:
    named = [name for name in ("files", "tokens", "dataset", "build") if getattr(data, name)]
    if len(named) > 1:
        yield Problem(
            f"{len(named)} sources of data: {', '.join(named)}",
            "one of them",
            [f"remove data.{name}" for name in named],
            key=named[-1],
        )


@rule(DataConfig, "build")
def _function(data: DataConfig) -> Iterator[Problem]:
    if data.build is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", data.build):
        yield Problem("no function is named", "module:function", ['data.build = "my_package.data:loader"'])


@rule(DataConfig, "weights", "tokens")
def _weight_of_each(data: DataConfig) -> Iterator[Problem]:
    if data.weights and data.tokens and (len(data.weights) != len(data.tokens) or min(data.weights) <= 0):
        yield Problem(
            f"{len(data.weights)} weights of {len(data.tokens)} entries of tokens"
            if len(data.weights) != len(data.tokens)
            else "a weight is not above 0",
            "a number above 0 for each entry of data.tokens",
            [f"data.weights = {toml([1.0] * len(data.tokens))}", "remove data.weights"],
        )


@rule(DataConfig, "validation", "validation_files", "validation_split")
def _one_validation(data: DataConfig) -> Iterator[Problem]:
    named = [name for name in ("validation", "validation_files", "validation_split") if getattr(data, name)]
    if len(named) > 1:
        yield Problem(
            f"{len(named)} kinds of validation: {', '.join(named)}",
            "one of them",
            [f"remove data.{name}" for name in named],
            key=named[-1],
        )


def _of_source(fields: str, *sources: str) -> None:
    no_effect(
        DataConfig,
        fields,
        "files tokens dataset build",
        lambda data: data.source in sources,
        f"data.{' or data.'.join(sources)} beside it",
        why=f" without data.{sources[0]}",
    )


_of_source("token_type", "tokens")
_of_source("weights", "tokens")
_of_source("split column validation_split", "dataset")
_of_source("tokenizer max_bytes", "files", "dataset")
_of_source("validation_files", "files", "tokens")
no_effect(
    DataConfig,
    "args",
    "build",
    lambda data: data.build or not data.args,
    "build beside it",
    'data.build = "my_package.data:loader"',
    why=" without data.build",
)


class GroupConfig(Section):
    """One of `[train.groups]`: parameters that learn otherwise."""

    place = "train.groups"
    lr: float = setting(1.0, "What the learning rate is multiplied by.", ge=0)
    weight_decay: float = setting(1.0, "What the weight decay is multiplied by.", ge=0)


class TrainConfig(Section):
    """`[train]`: steps on batches whose size does not depend on the mesh."""

    place = "train"
    steps: int = Field(ge=1, description="Optimiser steps.", examples=[60])
    global_batch: int = Field(ge=1, description="Samples of a step, over all ranks.", examples=[32])
    microbatch: int = Field(ge=1, description="Samples of one rank in one micro step.", examples=[4])
    lr: float = setting(3e-3, "Learning rate after the warm-up.", gt=0)
    warmup_steps: int = setting(0, "Steps in which the learning rate rises to lr.", ge=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine",
        "How the learning rate falls after the warm-up. wsd: it stays, and falls in the last decay_steps.",
    )
    min_lr_ratio: Share = setting(
        0.1, "With cosine, linear and wsd: the last step's learning rate as a share of lr."
    )
    decay_steps: int | None = setting(
        None, "With wsd: the last steps, in which the learning rate falls. None: a tenth of all.", ge=1
    )
    optimizer: Literal[
        "adamw", "adam", "nadam", "radam", "adamax", "sgd", "rmsprop", "adagrad", "adadelta"
    ] = setting("adamw", "The class of torch.optim. Any other: meshcomm.train.Trainer(optimizer=...).")
    optimizer_args: FrozenTable[float | int | bool] = Field(
        default_factory=Table,
        description="What the optimizer is made with besides lr, weight_decay, betas and eps, by the names of torch.optim.",
        examples=[{"momentum": 0.9}],
    )
    weight_decay: float = setting(
        0.1, "The optimizer's weight decay. Default 0.1 for adamw, torch's for any other.", ge=0
    )
    betas: Pair[Fraction] = setting(
        (0.9, 0.95), "Adam's two decay rates. Default [0.9, 0.95] for adamw, torch's for its relatives."
    )
    eps: float = setting(
        1e-8, "The optimizer's epsilon. Default 1e-08 for adamw, torch's for any other.", gt=0
    )
    groups: FrozenTable[GroupConfig] = Field(
        default_factory=Table,
        description="By patterns of parameters' names, what lr and weight_decay are multiplied by; the first that "
        "matches counts.",
        examples=[{"embed*": {"lr": 0.1}}],
    )
    clip_norm: float | None = setting(
        None, "Gradients whose norm over all weights is larger are scaled down to it. None: never.", gt=0
    )
    nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "What a step whose loss or gradient norm is not finite does on every rank; it is never applied. "
        '"stop": the run ends. "skip": it goes on with the next step, for 10 such steps in a row at most.',
    )
    seed: int = setting(0, "Seed of the weights and of the samples' order.", ge=0)
    dtype: Literal["float32", "float64"] = setting("float32", "Type of the weights.")
    compute_dtype: Literal["bfloat16"] | None = setting(
        None,
        "Type that matrices are multiplied in, and of activations and of what ranks send each other of them, and of "
        "gathered weights. Weights, optimizer state and sums of gradients keep dtype. None: dtype.",
    )
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None,
        "How exactly float32 matrices are multiplied during the run, as torch.set_float32_matmul_precision has it: "
        "high and medium let GPUs use TF32. A CPU without units for it computes as before. None: as the process has "
        "it, highest where nothing was set.",
    )
    recompute: bool | Literal["selective"] | Positive = setting(
        False,
        "Which blocks' activations are computed again in the backward pass instead of kept. True: all blocks'. N: every "
        "N-th block's. \"selective\": all blocks', but for products of matrices, attention and what ranks sent each other.",
    )
    compile: bool = setting(False, "Each block goes through torch.compile.")
    out: Text = setting("runs/train", "Folder for what the run writes.")
    log_every: int = setting(1, "Steps from one line of metrics to the next.", ge=1)
    trace_steps: Pair[int] | None = setting(
        None,
        "The first and the last step whose calls are written to trace.json in out. None: none.",
        examples=[(3, 5)],
    )
    profile_steps: Pair[int] | None = setting(
        None,
        "The first and the last step that torch.profiler watches: rankN.json in out/profile is a Chrome trace, and rankN.txt "
        "has the most expensive operators. None: none.",
        examples=[(3, 5)],
    )
    profile_ranks: FrozenList[Annotated[int, Field(ge=0)]] = setting(
        (), "With profile_steps: the ranks that are watched. Default []: all.", examples=[[0]]
    )
    log_to: FrozenList[Literal["tensorboard", "wandb"]] = setting(
        (),
        "Where metrics go beside metrics.jsonl: to TensorBoard, in out/tensorboard, and to Weights & Biases, in out/wandb, "
        "offline unless WANDB_MODE says otherwise. Default []: nowhere.",
        examples=[["tensorboard"]],
    )
    peak_flops: float | None = setting(
        None,
        "The most dense FLOP/s of a rank's device in the type that matrices are multiplied in: MFU is a share of it. None: "
        "as the maker of a well-known GPU says; of another device no MFU is told.",
        gt=0,
        examples=[989.4e12],
    )
    checkpoint_every: int = setting(
        0, "Steps from one checkpoint to the next; one more follows the last step. 0: none.", ge=0
    )
    checkpoint_async: bool = setting(
        False, "With checkpoint_every: training goes on while a checkpoint is written."
    )
    keep: int = setting(2, "With checkpoint_every: how many of the last checkpoints stay.", ge=1)
    resume: bool = setting(False, "Go on from the last complete checkpoint in out, if there is one.")
    resume_changed: FrozenList[Literal["data", "sequence", "global_batch"]] = setting(
        (),
        "With resume: what may be another one than the checkpoint's; without it, that is refused. After another data or "
        "sequence the samples begin again, with another global_batch they go on. Default []: nothing.",
    )
    eval_every: int = setting(
        0,
        "With validation data: steps from one evaluation to the next; one more follows the last step. 0: none.",
        ge=0,
    )
    eval_batches: int | None = setting(
        None,
        "With eval_every: global batches of an evaluation, the same ones each time. None: all that are whole.",
        ge=1,
    )
    patience: int | None = setting(
        None,
        "With eval_every: the run ends once the validation loss has not fallen in so many evaluations in a row. None: never.",
        ge=1,
    )
    min_delta: float = setting(
        0.0,
        "With patience: the validation loss has fallen where it is lower than the lowest by more than this.",
        ge=0,
    )
    target_loss: float | None = setting(
        None, "With eval_every: the run ends once the validation loss is this or lower. None: never."
    )


@rule(TrainConfig, "warmup_steps", "steps")
def _warm_up(train: TrainConfig) -> Iterator[Problem]:
    if train.warmup_steps > train.steps:
        yield Problem(
            f"the warm-up is longer than the training: {train.warmup_steps} > {train.steps}",
            f"0 to {train.steps}",
            [f"train.warmup_steps = {train.steps}", f"train.steps = {train.warmup_steps}"],
        )


no_effect(
    TrainConfig,
    "betas",
    "optimizer",
    lambda train: train.optimizer in ("adamw", "adam", "nadam", "radam", "adamax"),
    "an optimizer with betas",
    'train.optimizer = "adamw"',
)
no_effect(
    TrainConfig,
    "eps",
    "optimizer",
    lambda train: train.optimizer != "sgd",
    "an optimizer with one epsilon",
    'train.optimizer = "adamw"',
)
no_effect(
    TrainConfig,
    "decay_steps",
    "schedule",
    lambda train: train.schedule == "wsd",
    'schedule = "wsd" beside it',
    'train.schedule = "wsd"',
)


@rule(TrainConfig, "decay_steps", "warmup_steps", "steps")
def _decay(train: TrainConfig) -> Iterator[Problem]:
    most = train.steps - train.warmup_steps
    if train.decay_steps is not None and train.decay_steps > most >= 0:
        yield Problem(
            f"the warm-up and the decay are longer than the training: {train.warmup_steps} + {train.decay_steps} > "
            f"{train.steps}",
            f"1 to {most}",
            [f"train.decay_steps = {most}"] * (most > 0)
            + [f"train.steps = {train.warmup_steps + train.decay_steps}"],
        )


no_effect(
    TrainConfig,
    "min_lr_ratio",
    "schedule",
    lambda train: train.schedule != "constant",
    "a schedule that falls",
    'train.schedule = "cosine"',
)
no_effect(
    TrainConfig,
    "compute_dtype",
    "dtype",
    lambda train: train.dtype != "float64",
    'dtype = "float32" beside it',
    'train.dtype = "float32"',
    why=' with dtype = "float64", which autocast leaves as it is',
)
no_effect(
    TrainConfig,
    "float32_matmul_precision",
    "dtype",
    lambda train: train.dtype != "float64" or train.float32_matmul_precision is None,
    'dtype = "float32" beside it',
    'train.dtype = "float32"',
    why=' with dtype = "float64", where no matrix is float32',
)


@rule(TrainConfig, "compile", "recompute")
def _selective(train: TrainConfig) -> Iterator[Problem]:
    if train.compile and train.recompute == "selective":
        yield Problem(
            "a compiled block is one operator: which results in it to keep cannot be said",
            "recompute that keeps nothing of a block, or no compile",
            ["train.recompute = true", "train.compile = false"],
        )


def _some_steps(field: str) -> None:
    @rule(TrainConfig, field, "steps")
    def check(train: TrainConfig) -> Iterator[Problem]:
        first, last = getattr(train, field) or (1, 1)
        if not 1 <= first <= last <= train.steps:
            fit = toml((1, min(3, train.steps)))
            yield Problem(
                f"steps {first} to {last} are no steps of this training",
                f"a first and a last step, from 1 to {train.steps}",
                [f"train.{field} = {fit}", f"remove train.{field}"],
            )


_some_steps("trace_steps")
_some_steps("profile_steps")
no_effect(
    TrainConfig,
    "profile_ranks",
    "profile_steps",
    lambda train: train.profile_steps or not train.profile_ranks,
    "profile_steps beside it",
    "train.profile_steps = [3, 5]",
    why=" without train.profile_steps: nothing is profiled",
)


@rule(TrainConfig, "log_to")
def _once_each(train: TrainConfig) -> Iterator[Problem]:
    once = list(dict.fromkeys(train.log_to))
    if len(once) < len(train.log_to):
        yield Problem("one of them is named twice", "each once", [f"train.log_to = {toml(once)}"])


no_effect(
    TrainConfig,
    "keep checkpoint_async",
    "checkpoint_every",
    lambda train: train.checkpoint_every,
    "checkpoint_every of 1 or more",
    "train.checkpoint_every = 100",
    why=": no checkpoints are saved",
)
no_effect(
    TrainConfig,
    "resume_changed",
    "resume",
    lambda train: train.resume or not train.resume_changed,
    "resume beside it",
    "train.resume = true",
    why=" without train.resume",
)
no_effect(
    TrainConfig,
    "eval_batches patience target_loss",
    "eval_every",
    lambda train: train.eval_every,
    "eval_every of 1 or more",
    "train.eval_every = 100",
    why=": nothing is evaluated",
)
no_effect(
    TrainConfig,
    "min_delta",
    "patience",
    lambda train: train.patience,
    "patience of 1 or more",
    "train.patience = 3",
    why=" without train.patience: the run does not end by it",
)
