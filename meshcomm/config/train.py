"""The sections `[data]` and `[train]`: the training data, and how to train on it."""

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

# The value that replaces a tokenizer.
BYTES: Final = "bytes"

_WITH_BETAS: Final = ("adamw", "adam", "nadam", "radam", "adamax")
_WITH_EPS: Final = (*_WITH_BETAS, "rmsprop", "adagrad", "adadelta")


def _token_weights(data: DataConfig) -> Iterator[Problem]:
    weights, entries = data.weights, len(data.tokens)
    if weights and entries and (len(weights) != entries or min(weights) <= 0):
        what = "a weight is not greater than 0"
        if len(weights) != entries:
            what = f"{len(weights)} weights of {entries} entries of tokens"
        expected = "a number above 0 for each entry of data.tokens"
        ways = [f"data.weights = {toml([1.0] * entries)}", "remove data.weights"]
        yield Problem("weights", what, expected, ways, data.written("weights tokens"))


class DataConfig(Section):
    """`[data]`: text, as bytes or tokenized; token files; or a dataset that a function returns."""

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
        NoEffect("eos", "source", ("files",), why=": it is only added after texts of data.files"),
        NoEffect("validation_files", "source", ("files", "tokens", "chat"), why=" without files"),
        NoEffect("eos_id", "source", ("files", "tokens"), why=": samples contain the starts of documents"),
        NoEffect("answers_only", "chat", way='chat = ["conversations.jsonl"]'),
        NoEffect("args", "build", way='build = "my_package.data:loader"'),
    )
    files: FrozenList[Text] = ()
    """Text files or globs, relative to the config file. Default []: the sources of Python's standard library,
    unless another source is given.
    """
    tokens: FrozenList[Text] = Field(default=(), examples=[["web.bin", "code.npy"]])
    """Token files, as paths or globs relative to the config file: .npy or raw .bin. Default []: none."""
    token_type: Literal["uint16", "uint32"] = "uint16"
    """With tokens: dtype of .bin files."""
    weights: FrozenList[float] = Field(default=(), examples=[[0.7, 0.3]])
    """With tokens: relative sampling weight of each entry. Default []: every sample of all files once per epoch."""
    chat: FrozenList[Text] = Field(default=(), examples=[["conversations.jsonl"]])
    """Files of conversations: JSON lines with messages, each with role and content. The tokenizer's chat template
    formats them.
    """
    answers_only: bool = False
    """With chat: use only the assistant's messages as targets."""
    build: Function | None = Field(default=None, examples=["my_package.data:loader"])
    """module:function that returns an indexable dataset with the samples of all ranks. If omitted, none."""
    args: Arguments = Field(default_factory=Table, examples=[{"folder": "images"}])
    """With build: keyword arguments of the function."""
    tokenizer: Text | None = Field(default=None, examples=["tokenizer.json"])
    """With text: a tokenizer.json or its folder, relative to the config file; "bytes" makes each byte a token. If
    omitted, the tokenizer of model.pretrained, or bytes if there is none. Bytes are an error with weights that are
    read from a folder.
    """
    eos: Text | None = Field(default=None, examples=["<|endoftext|>"])
    """With a tokenizer: the token at the end of each document. Each file is a document. If omitted, the folder's
    eos_token.
    """
    eos_id: int | None = Field(default=None, ge=0, examples=[0])
    """With document_mask: id of the token at the end of each document. If omitted, eos."""
    document_mask: bool = False
    """Tokens attend only within their document, positions restart in each document, and its first token is not
    a target.
    """
    seq_len: int = Field(ge=1, examples=[128])
    """Tokens per sample."""
    max_bytes: int | None = Field(default=None, ge=2, examples=[8_000_000])
    """With text: maximum number of bytes to read, over all files in order. If omitted, all."""
    workers: int = Field(default=0, ge=0, examples=[2])
    """Processes per rank that read the samples of later steps while the rank computes, each two steps ahead.
    Default 0: the rank reads between steps.
    """
    validation: Fraction = 0.0
    """Fraction of the samples, at the end of each source, that is held out for evaluation."""
    validation_files: FrozenList[Text] = ()
    """Separate files for evaluation, in the format of files, or of tokens or chat if that is set. Default []:
    none.
    """

    @property
    def source(self) -> str:
        """The setting that names the data source."""
        return next((name for name in ("build", "tokens", "chat") if getattr(self, name)), "files")

    def tokenizer_of(self, pretrained: str | None) -> Path | None:
        """Return the tokenizer of the text, or None if each byte is a token. pretrained: model.pretrained."""
        if self.tokenizer is not None:
            return None if self.tokenizer == BYTES else Path(self.tokenizer)
        if pretrained is None or self.source not in ("files", "chat"):
            return None
        # os.path, because a name that is too long or has a null character is not an error.
        return Path(pretrained) if os.path.isfile(f"{pretrained}/tokenizer.json") else None

    @property
    def validates(self) -> bool:
        """Whether there is validation data."""
        return bool(self.validation or self.validation_files)


class GroupConfig(Section):
    """One entry of `[train.groups]`: parameters with a different learning rate or weight decay."""

    place = "train.groups"
    lr: float = Field(default=1.0, ge=0)
    """Factor for the learning rate."""
    weight_decay: float = Field(default=1.0, ge=0)
    """Factor for the weight decay."""


def _decay(train: TrainConfig) -> Iterator[Problem]:
    most = train.steps - train.warmup_steps
    if train.decay_steps is not None and train.decay_steps > most >= 0:
        both = f"{train.warmup_steps} + {train.decay_steps} > {train.steps}"
        what = f"the warm-up and the decay together are longer than the training: {both}"
        ways = [f"train.decay_steps = {most}"] * (most > 0)
        ways.append(f"train.steps = {train.warmup_steps + train.decay_steps}")
        given = train.written("decay_steps warmup_steps steps")
        yield Problem("decay_steps", what, f"1 to {most}", ways, given)


def _some_steps(train: TrainConfig) -> Iterator[Problem]:
    first, last = train.trace_steps or (1, 1)
    if not 1 <= first <= last <= train.steps:
        what = f"steps {first} to {last} are not steps of this training"
        expected = f"a first and a last step, from 1 to {train.steps}"
        ways = [f"train.trace_steps = {toml((1, min(3, train.steps)))}", "remove train.trace_steps"]
        yield Problem("trace_steps", what, expected, ways, train.written("trace_steps steps"))


def _each_sink_once(train: TrainConfig) -> Iterator[Problem]:
    once = list(dict.fromkeys(train.log_to))
    if len(once) < len(train.log_to):
        ways = [f"train.log_to = {toml(once)}"]
        yield Problem("log_to", "an output is named twice", "each output once", ways, train.written("log_to"))


class TrainConfig(Section):
    """`[train]`: training settings. Batch sizes do not depend on the mesh."""

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
    """Number of optimizer steps."""
    global_batch_size: int = Field(ge=1, examples=[32])
    """Samples per step, over all ranks."""
    micro_batch_size: int = Field(ge=1, examples=[4])
    """Samples of one rank per forward and backward pass."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises to lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate decay after the warm-up. "wsd" keeps it constant until the last decay_steps."""
    min_lr_ratio: Share = 0.1
    """With cosine, linear and wsd: final learning rate, as a fraction of lr."""
    decay_steps: int | None = Field(default=None, ge=1)
    """With wsd: number of final steps in which the learning rate decays. If omitted, a tenth of all steps."""
    optimizer: Literal[
        "adamw", "adam", "nadam", "radam", "adamax", "sgd", "rmsprop", "adagrad", "adadelta"
    ] = "adamw"
    """The class of torch.optim. For any other, use meshcomm.train.Trainer(optimizer=...)."""
    optimizer_args: FrozenTable[float | int | bool] = Field(
        default_factory=Table, examples=[{"momentum": 0.9}]
    )
    """Further keyword arguments of the optimizer besides lr, weight_decay, betas and eps, named as in
    torch.optim.
    """
    weight_decay: float = Field(default=0.1, ge=0)
    """The optimizer's weight decay. Default 0.1 for adamw, torch's default for any other."""
    betas: Pair[Fraction] = (0.9, 0.95)
    """Adam's two decay rates. Default [0.9, 0.95] for adamw, torch's default for its variants."""
    eps: float = Field(default=1e-8, gt=0)
    """The optimizer's epsilon. Default 1e-08 for adamw, torch's default for any other."""
    groups: FrozenTable[GroupConfig] = Field(default_factory=Table, examples=[{"embed*": {"lr": 0.1}}])
    """Patterns of parameter names -> factors for lr and weight_decay. The first match applies."""
    frozen: FrozenList[Text] = Field(default=(), examples=[["*.indexer.*", "model.embed_tokens.*"]])
    """Patterns of parameter names to freeze: no gradient and no optimizer state. Default []: none."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum gradient norm over all weights. Larger gradients are scaled down to this norm. If omitted, no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite is never applied. "stop": the run ends. "skip": the run
    continues with the next step, and ends after 10 such steps in a row.
    """
    seed: int = Field(default=0, ge=0)
    """Seed of the weights and of the order of the samples."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the weights."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Dtype of matmuls, activations, their messages, and gathered weights. Weights, optimizer state and
    gradient sums keep dtype. Frozen weights under adapters use compute_dtype. If omitted, dtype.
    """
    state_dtype: Literal["bfloat16"] | None = None
    """Dtype in which the optimizer stores its moments between steps. The optimizer computes in dtype. If omitted, dtype."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Value of torch.set_float32_matmul_precision during the run; "high" and "medium" allow TF32 on GPUs. If
    omitted, the setting of the process.
    """
    activation_checkpointing: bool | Literal["selective"] | Positive = False
    """Blocks whose activations are recomputed in the backward pass. true: all. N: every N-th. "selective": all,
    but results of matmuls, attention and messages are kept.
    """
    compile: bool = False
    """Compile each block with torch.compile."""
    out: Text = "runs/train"
    """Output folder of the run."""
    log_every: int = Field(default=1, ge=1)
    """Number of steps between lines of metrics."""
    trace_steps: Pair[int] | None = Field(default=None, examples=[(3, 5)])
    """First and last step to trace. The calls of these steps are written to trace.json in out. If omitted, none."""
    log_to: FrozenList[Literal["tensorboard", "wandb"]] = Field(default=(), examples=[["tensorboard"]])
    """Further outputs for metrics: "tensorboard" writes to out/tensorboard; "wandb" to out/wandb, offline unless
    WANDB_MODE is set. Default []: none.
    """
    peak_flops: float | None = Field(default=None, gt=0, examples=[989.4e12])
    """Peak dense FLOP/s of a rank's device, for MFU. If omitted, the vendor's figure for well-known GPUs,
    otherwise no MFU.
    """
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints. One more checkpoint follows the last step. 0: none."""
    checkpoint_async: bool = False
    """With checkpoint_every: continue training while a checkpoint is written."""
    keep: int = Field(default=2, ge=1)
    """With checkpoint_every: number of most recent checkpoints to keep."""
    resume: bool = False
    """Resume from the last complete checkpoint in out, if there is one."""
    resume_changed: FrozenList[Literal["data", "seq_len", "global_batch_size"]] = ()
    """With resume: settings that may differ from the checkpoint. With a different data or seq_len, the samples
    start over; with a different global_batch_size, they continue. Default []: none.
    """
    eval_every: int = Field(default=0, ge=0)
    """With validation data: steps between evaluations. One more evaluation follows the last step. 0: none."""
    evaluate: Function | None = Field(default=None, examples=["my_package.judge:accuracy"])
    """With eval_every: module:function, called on every rank with the Trainer. It returns the validation loss, or
    numbers by name. If omitted, none.
    """
    eval_batches: int | None = Field(default=None, ge=1)
    """With eval_every: number of global batches per evaluation, the same batches each time. If omitted, all complete ones."""
    patience: int | None = Field(default=None, ge=1)
    """With eval_every: end the run after this many evaluations in a row without a lower validation loss. If omitted,
    never.
    """
    min_delta: float = Field(default=0.0, ge=0)
    """With patience: minimum decrease of the validation loss that counts as lower."""
    target_loss: float | None = None
    """With eval_every: end the run once the validation loss is at or below this value. If omitted, never."""
