"""On what, and how is it trained? The `[data]` and `[train]` sections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import (
    Arguments,
    Fraction,
    FrozenList,
    FrozenTable,
    Function,
    NoEffect,
    Pair,
    Section,
    Table,
    Text,
    one_of,
    too_large,
)
from meshcomm.config.write import toml

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]

# In place of a tokenizer.
BYTES: Final = "bytes"

_WITH_BETAS: Final = ("adamw", "adam", "nadam", "radam", "adamax")
_WITH_EPS: Final = (*_WITH_BETAS, "rmsprop", "adagrad", "adadelta")


def _token_weights(data: DataConfig) -> Iterator[Problem]:
    weights, entries = data.weights, len(data.tokens)
    if weights and entries and (len(weights) != entries or min(weights) <= 0):
        what = "a weight is not above 0"
        if len(weights) != entries:
            what = f"{len(weights)} weights of {entries} entries of tokens"
        expected = "a number above 0 for each entry of data.tokens"
        ways = [f"data.weights = {toml([1.0] * entries)}", "remove data.weights"]
        yield Problem("weights", what, expected, ways, data.written("weights tokens"))


class DataConfig(Section):
    """`[data]`: text, as bytes or through a tokenizer, token files, or what a function returns."""

    place = "data"
    rules = (
        partial(one_of, fields="files tokens chat build", what="sources of data"),
        partial(one_of, fields="validation validation_files", what="kinds of validation"),
        _token_weights,
    )
    no_effect = (
        NoEffect("token_type weights", "tokens"),
        NoEffect("eos_id", "document_mask", way="document_mask = true"),
        NoEffect("tokenizer", "source", ("files", "chat"), why=" without text"),
        NoEffect("max_bytes", "source", ("files",), why=" without text"),
        NoEffect("eos", "source", ("files",), why=": it is put behind the texts of data.files alone"),
        NoEffect("validation_files", "source", ("files", "tokens", "chat"), why=" without files"),
        NoEffect("eos_id", "source", ("files", "tokens"), why=": samples say where documents begin"),
        NoEffect("answers_only", "chat", way='chat = ["conversations.jsonl"]'),
        NoEffect("args", "build", way='build = "my_package.data:loader"'),
    )
    files: FrozenList[Text] = ()
    """Text files or globs, relative to the config file. Default []: the sources of Python's standard library,
    where nothing else is named."""
    tokens: FrozenList[Text] = Field(default=(), examples=[["web.bin", "code.npy"]])
    """Token files: paths or globs, relative to the config file, of .npy or of raw .bin. Default []: none."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """With tokens: what a .bin file holds."""
    weights: FrozenList[float] = Field(default=(), examples=[[0.7, 0.3]])
    """With tokens: the share of samples from each entry, in relation to the others. Default []: each sample of all files
    once in an epoch."""
    chat: FrozenList[Text] = Field(default=(), examples=[["conversations.jsonl"]])
    """Files of conversations: JSON lines with messages, each with role and content, through the tokenizer's chat template."""
    answers_only: bool = False
    """With chat: only what the assistant says is a target."""
    build: Function | None = Field(default=None, examples=["my_package.data:loader"])
    """module:function, which returns an indexable dataset of all ranks' samples. None: none."""
    args: Arguments = Field(default_factory=Table, examples=[{"folder": "images"}])
    """With build: what the function is called with, by name."""
    tokenizer: Text | None = Field(default=None, examples=["tokenizer.json"])
    """With text: a tokenizer.json or its folder, relative to the config file; "bytes": a byte is a token. None: that of
    model.pretrained; without one bytes, which weights that are read from a folder refuse."""
    eos: Text | None = Field(default=None, examples=["<|endoftext|>"])
    """With a tokenizer: the token that ends a document, which is a file. None: its folder's eos_token."""
    eos_id: int | None = Field(default=None, ge=0, examples=[0])
    """With document_mask: the token that ends a document. None: eos."""
    document_mask: bool = False
    """Tokens attend within their document, positions begin anew in each, and the first token of one is no target."""
    seq_len: int = Field(ge=1, examples=[128])
    """Tokens of a sample."""
    max_bytes: int | None = Field(default=None, ge=2, examples=[8_000_000])
    """With text: bytes that are read at most, of all files in order. None: all of them."""
    workers: int = Field(default=0, ge=0, examples=[2])
    """Processes of each rank that read the samples of coming steps while it computes, two steps each ahead. Default 0: the
    rank reads between steps."""
    validation: Fraction = 0.0
    """Share of the samples, at the end of each source, that is not trained on but evaluated."""
    validation_files: FrozenList[Text] = ()
    """Files of their own to evaluate: as files, or with tokens or chat as those. Default []: none."""

    @property
    def source(self) -> str:
        """Which setting names what is read."""
        return next((name for name in ("build", "tokens", "chat") if getattr(self, name)), "files")

    def tokenizer_of(self, pretrained: str | None) -> Path | None:
        """What turns its text into tokens; None: a byte is a token. pretrained: model.pretrained."""
        if self.tokenizer is not None:
            return None if self.tokenizer == BYTES else Path(self.tokenizer)
        if pretrained is None or self.source not in ("files", "chat"):
            return None
        # os.path, as nothing is a file whose name is too long or has a null character.
        return Path(pretrained) if os.path.isfile(f"{pretrained}/tokenizer.json") else None

    @property
    def validates(self) -> bool:
        """Whether there is something to evaluate."""
        return bool(self.validation or self.validation_files)


class GroupConfig(Section):
    """One of `[train.groups]`: parameters that learn otherwise."""

    place = "train.groups"
    lr: float = Field(default=1.0, ge=0)
    """What the learning rate is multiplied by."""
    weight_decay: float = Field(default=1.0, ge=0)
    """What the weight decay is multiplied by."""


def _decay(train: TrainConfig) -> Iterator[Problem]:
    most = train.steps - train.warmup_steps
    if train.decay_steps is not None and train.decay_steps > most >= 0:
        both = f"{train.warmup_steps} + {train.decay_steps} > {train.steps}"
        what = f"the warm-up and the decay are longer than the training: {both}"
        ways = [f"train.decay_steps = {most}"] * (most > 0)
        ways.append(f"train.steps = {train.warmup_steps + train.decay_steps}")
        given = train.written("decay_steps warmup_steps steps")
        yield Problem("decay_steps", what, f"1 to {most}", ways, given)


def _some_steps(train: TrainConfig) -> Iterator[Problem]:
    first, last = train.trace_steps or (1, 1)
    if not 1 <= first <= last <= train.steps:
        what = f"steps {first} to {last} are no steps of this training"
        expected = f"a first and a last step, from 1 to {train.steps}"
        ways = [f"train.trace_steps = {toml((1, min(3, train.steps)))}", "remove train.trace_steps"]
        yield Problem("trace_steps", what, expected, ways, train.written("trace_steps steps"))


def _each_sink_once(train: TrainConfig) -> Iterator[Problem]:
    once = list(dict.fromkeys(train.log_to))
    if len(once) < len(train.log_to):
        ways = [f"train.log_to = {toml(once)}"]
        yield Problem("log_to", "one of them is named twice", "each once", ways, train.written("log_to"))


class TrainConfig(Section):
    """`[train]`: steps on batches whose size does not depend on the mesh."""

    place = "train"
    rules = (
        partial(
            too_large, field="warmup_steps", limit="steps", why="the warm-up is longer than the training"
        ),
        *(_decay, _some_steps, _each_sink_once),
    )
    no_effect = (
        NoEffect("betas", "optimizer", _WITH_BETAS, 'optimizer = "adamw"'),
        NoEffect("state_dtype", "optimizer", (*_WITH_BETAS, "sgd", "rmsprop"), 'optimizer = "adamw"'),
        NoEffect("eps", "optimizer", _WITH_EPS, 'optimizer = "adamw"'),
        NoEffect("decay_steps", "schedule", ("wsd",), 'schedule = "wsd"'),
        NoEffect("min_lr_ratio", "schedule", ("cosine", "linear", "wsd"), 'schedule = "cosine"'),
        NoEffect("compute_dtype float32_matmul_precision", "dtype", ("float32",), 'dtype = "float32"'),
        NoEffect("keep checkpoint_async", "checkpoint_every", way="checkpoint_every = 100"),
        NoEffect("resume_changed", "resume", way="resume = true"),
        NoEffect("eval_batches evaluate patience target_loss", "eval_every", way="eval_every = 100"),
        NoEffect("min_delta", "patience", way="patience = 3"),
    )
    steps: int = Field(ge=1, examples=[60])
    """Optimiser steps."""
    global_batch_size: int = Field(ge=1, examples=[32])
    """Samples of a step, over all ranks."""
    micro_batch_size: int = Field(ge=1, examples=[4])
    """Samples of one rank in one micro step."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises to lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. wsd: it stays, and falls in the last decay_steps."""
    min_lr_ratio: Share = 0.1
    """With cosine, linear and wsd: the last step's learning rate as a share of lr."""
    decay_steps: int | None = Field(default=None, ge=1)
    """With wsd: the last steps, in which the learning rate falls. None: a tenth of all."""
    optimizer: Literal[
        "adamw", "adam", "nadam", "radam", "adamax", "sgd", "rmsprop", "adagrad", "adadelta"
    ] = "adamw"
    """The class of torch.optim. Any other: meshcomm.train.Trainer(optimizer=...)."""
    optimizer_args: FrozenTable[float | int | bool] = Field(
        default_factory=Table, examples=[{"momentum": 0.9}]
    )
    """What the optimizer is made with besides lr, weight_decay, betas and eps, by the names of torch.optim."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The optimizer's weight decay. Default 0.1 for adamw, torch's for any other."""
    betas: Pair[Fraction] = (0.9, 0.95)
    """Adam's two decay rates. Default [0.9, 0.95] for adamw, torch's for its relatives."""
    eps: float = Field(default=1e-8, gt=0)
    """The optimizer's epsilon. Default 1e-08 for adamw, torch's for any other."""
    groups: FrozenTable[GroupConfig] = Field(default_factory=Table, examples=[{"embed*": {"lr": 0.1}}])
    """By patterns of parameters' names, what lr and weight_decay are multiplied by; the first that matches counts."""
    frozen: FrozenList[Text] = Field(default=(), examples=[["*.indexer.*", "model.embed_tokens.*"]])
    """Patterns of parameters' names that stay as they are: no gradient, no state of the optimizer. Default []: all learn."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Gradients whose norm over all weights is larger are scaled down to it. None: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite is never applied. "stop": the run ends. "skip": the next step
    follows. After 10 such steps in a row the run ends."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights and of the samples' order."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Type of matmuls, activations, their messages, and gathered weights. Weights, optimizer state and sums of gradients
    keep dtype; weights beneath adapters, which do not learn, have it. None: dtype."""
    state_dtype: Literal["bfloat16"] | None = None
    """Type in which the optimizer keeps its moments from step to step; it computes in dtype. None: dtype."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """torch.set_float32_matmul_precision during the run: high and medium let GPUs use TF32. None: as the process has it."""
    activation_checkpointing: bool | Literal["selective"] | Positive = False
    """Blocks whose activations are recomputed in the backward pass. True: all. N: every N-th. "selective": all, but
    results of matmuls, attention and messages are kept."""
    compile: bool = False
    """Each block goes through torch.compile."""
    out: Text = "runs/train"
    """Folder for what the run writes."""
    log_every: int = Field(default=1, ge=1)
    """Steps from one line of metrics to the next."""
    trace_steps: Pair[int] | None = Field(default=None, examples=[(3, 5)])
    """The first and the last step whose calls are written to trace.json in out. None: none."""
    log_to: FrozenList[Literal["tensorboard", "wandb"]] = Field(default=(), examples=[["tensorboard"]])
    """Where metrics also go: out/tensorboard; out/wandb, offline unless WANDB_MODE is set. Default []: nowhere."""
    peak_flops: float | None = Field(default=None, gt=0, examples=[989.4e12])
    """Peak dense FLOP/s of a rank's device, for MFU. None: the vendor's figure for a well-known GPU, else no MFU."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps from one checkpoint to the next; one more follows the last step. 0: none."""
    checkpoint_async: bool = False
    """With checkpoint_every: training goes on while a checkpoint is written."""
    keep: int = Field(default=2, ge=1)
    """With checkpoint_every: how many of the last checkpoints stay."""
    resume: bool = False
    """Go on from the last complete checkpoint in out, if there is one."""
    resume_changed: FrozenList[Literal["data", "seq_len", "global_batch_size"]] = ()
    """With resume: what may differ from the checkpoint's. After another data or seq_len the samples begin again, with
    another global_batch_size they continue. Default []: nothing."""
    eval_every: int = Field(default=0, ge=0)
    """With validation data: steps from one evaluation to the next; one more follows the last step. 0: none."""
    evaluate: Function | None = Field(default=None, examples=["my_package.judge:accuracy"])
    """With eval_every: module:function, called on every rank with the Trainer. It returns the validation loss, or numbers by
    name. None: none."""
    eval_batches: int | None = Field(default=None, ge=1)
    """With eval_every: global batches of an evaluation, the same ones each time. None: all that are whole."""
    patience: int | None = Field(default=None, ge=1)
    """With eval_every: evaluations in a row without a lower validation loss that end the run. None: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """With patience: how much lower than the lowest a validation loss must be to count as lower."""
    target_loss: float | None = None
    """With eval_every: the run ends once the validation loss is this or lower. None: never."""
