"""The sections `[data]` and `[train]`: the training data and the training settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

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
from meshcomm.config.write import key_path, toml

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Argument: TypeAlias = float | int | bool | FrozenList[float]

Optimizer = Literal[
    "adamw", "adam", "nadam", "radam", "adamax", "sgd", "rmsprop", "adagrad", "adadelta", "asgd", "rprop"
]

# The value of `tokenizer` that makes each byte a token.
BYTES: Final = "bytes"

WITH_BETAS: Final = ("adamw", "adam", "nadam", "radam", "adamax")
WITH_EPS: Final = (*WITH_BETAS, "rmsprop", "adagrad", "adadelta")
# With moments, which may be stored in another dtype.
WITH_MOMENTS: Final = (*WITH_BETAS, "sgd", "rmsprop", "muon")


def _token_weights(data: DataConfig) -> Iterator[Problem]:
    weights, entries = data.weights, len(getattr(data, data.source) or ())
    if weights and entries and (len(weights) != entries or min(weights) <= 0):
        what = "a weight is not positive"
        if len(weights) != entries:
            what = f"{len(weights)} weights for {entries} entries of {data.source}"
        expected = f"a positive number for each entry of data.{data.source}"
        ways = [f"data.weights = {toml([1.0] * entries)}", "remove data.weights"]
        yield Problem("weights", what, expected, ways, data.written(f"weights {data.source}"))


class DataConfig(Section):
    """`[data]`: the training data, given as text (bytes or tokenized), token files, conversations, or a function's dataset."""

    place = "data"
    rules = (
        NoEffect("token_type", "tokens"),
        NoEffect("weights", "files tokens chat", way='files = ["a.txt", "b.txt"]'),
        NoEffect("eos_id", "document_mask", way="document_mask = true"),
        NoEffect("tokenizer", "source", ("files", "chat", "build"), why=" without text"),
        NoEffect("max_bytes", "source", ("files",), why=" without text"),
        NoEffect(
            "eos column",
            "texts_from",
            ("files", "tokenizer"),
            why=" without texts from data.files or data.build",
        ),
        NoEffect("validation_files", "source", ("files", "tokens", "chat"), why=" without files"),
        NoEffect(
            "eos_id",
            "source texts_from",
            ("files", "tokens", "tokenizer"),
            why=": samples contain the starts of documents",
        ),
        NoEffect("answers_only", "chat", way='chat = ["conversations.jsonl"]'),
        NoEffect("args", "build", way='build = "my_package.data:loader"'),
        partial(one_of, fields="files tokens chat build", what="sources of data"),
        partial(one_of, fields="validation validation_files", what="kinds of validation"),
        _token_weights,
    )
    files: FrozenList[Text] = ()
    """Texts, as paths or globs relative to the config file: text files; files whose rows are texts (.jsonl, .ndjson, .json,
    .parquet, .arrow), each of these also compressed (.gz, .bz2, .xz, .zst); and folders written by save_to_disk of
    Hugging Face datasets. Default []: the source files of Python's standard library, unless another data source is given.
    """
    column: Text = Field(default="text", examples=["content"])
    """With rows of files or of a dataset: name of the column with the texts. Each row is one document."""
    tokens: FrozenList[Text] = Field(default=(), examples=[["web.bin", "code.npy"]])
    """Token files, as paths or globs relative to the config file: .npy, raw .bin, or the .bin of Megatron-LM with its .idx
    beside it. Default []: none.
    """
    token_type: Literal["uint16", "uint32"] = "uint16"
    """With tokens: dtype of raw .bin files."""
    weights: FrozenList[float] = Field(default=(), examples=[[0.7, 0.3]])
    """With files, tokens or chat: relative sampling weight of each entry. Default []: each epoch reads every sample of all
    entries once.
    """
    chat: FrozenList[Text] = Field(default=(), examples=[["conversations.jsonl"]])
    """Files of conversations with rows, in the formats of files. Each row has a list of messages, each with a role and
    content, or the texts prompt and completion, which are a user's message and the answer. The tokenizer's chat template
    formats the messages, and a row's tools. Answers with weight 0 are not targets.
    """
    answers_only: bool = False
    """With chat: use only the assistant's messages as targets."""
    build: Function | None = Field(default=None, examples=["my_package.data:loader"])
    """module:function that returns the samples of all ranks, as an indexable dataset, or as a stream, which each rank reads
    in full and in its own order. With tokenizer, they are rows of texts. If omitted, no function is used.
    """
    args: Arguments = Field(default_factory=Table, examples=[{"folder": "images"}])
    """With build: keyword arguments for the function."""
    tokenizer: Text | None = Field(default=None, examples=["tokenizer.json"])
    """With text: a tokenizer.json file or its folder, relative to the config file. "bytes" makes each byte a token. If
    omitted, the tokenizer of model.pretrained is used, or bytes if it has none. If the weights are read from a folder,
    a missing tokenizer is an error. With build, texts are tokenized only if it is set.
    """
    eos: Text | None = Field(default=None, examples=["<|endoftext|>"])
    """With a tokenizer: the token at the end of each document. Each text file and each row is one document. If omitted,
    the eos_token of the tokenizer's folder is used.
    """
    eos_id: int | None = Field(default=None, ge=0, examples=[0])
    """With document_mask: ID of the token at the end of each document. If omitted, the ID of eos is used. The documents of
    Megatron-LM's files are those of their index.
    """
    document_mask: bool = False
    """Restrict attention to each token's own document and restart positions in each document. A document's first token
    is not a target.
    """
    seq_len: int = Field(ge=1, examples=[128])
    """Tokens per sample."""
    max_bytes: int | None = Field(default=None, ge=2, examples=[8_000_000])
    """With text: maximum total number of bytes to read from the files, in order; with weights, from those of each entry. If
    omitted, all bytes are read.
    """
    workers: int = Field(default=0, ge=0, examples=[2])
    """Number of worker processes per rank. Each worker reads samples two steps ahead while the rank computes. Default 0:
    the rank itself reads samples between steps.
    """
    validation: Fraction = 0.0
    """Fraction of the samples, at the end of each source, to hold out for evaluation."""
    validation_files: FrozenList[Text] = ()
    """Separate files for evaluation, in the format of the training data: files, tokens or chat. Default []: none."""

    @property
    def source(self) -> str:
        """The setting that names the data source."""
        return next((name for name in ("build", "tokens", "chat") if getattr(self, name)), "files")

    @property
    def texts_from(self) -> str:
        """The setting because of which the data are texts; "" if they are something else."""
        return "tokenizer" if self.build and self.tokenizer else "files" * (self.source == "files")

    def tokenizer_of(self, pretrained: str | None) -> Path | None:
        """Return the path of the tokenizer, or None if each byte is a token. pretrained: the value of model.pretrained."""
        if self.tokenizer is not None:
            return None if self.tokenizer == BYTES else Path(self.tokenizer)
        if pretrained is None or self.source not in ("files", "chat"):
            return None
        # os.path returns False, where Path may raise, for a name that is too long or contains a null character.
        return Path(pretrained) if os.path.isfile(f"{pretrained}/tokenizer.json") else None

    @property
    def validates(self) -> bool:
        """Whether there is validation data."""
        return bool(self.validation or self.validation_files)


class GroupConfig(Section):
    """One entry of `[train.groups]`: parameters with a different learning rate, weight decay or optimizer."""

    place = "train.groups"
    lr: float = Field(default=1.0, ge=0)
    """Factor for the learning rate."""
    weight_decay: float = Field(default=1.0, ge=0)
    """Factor for the weight decay."""
    optimizer: Literal["muon", Optimizer] | None = Field(default=None, examples=["muon"])
    """The torch.optim class for these parameters. muon takes matrices only. If omitted, train.optimizer is used."""
    optimizer_args: FrozenTable[Argument | str] = Field(default_factory=Table)
    """With optimizer: keyword arguments, as for train.optimizer_args. betas and eps replace train.betas and train.eps here."""


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


def _arguments_of_groups(train: TrainConfig) -> Iterator[Problem]:
    for pattern, group in train.groups.items():
        if group.optimizer_args and group.optimizer is None:
            key = key_path(["groups", pattern])
            ways = [
                f"train.{key}.optimizer = {toml(train.optimizer)}",
                f"remove train.{key}.optimizer_args",
            ]
            what = "no effect: the group has no optimizer of its own"
            given = f"{key}.{group.written('optimizer_args')}"
            yield Problem(f"{key}.optimizer_args", what, f"train.{key}.optimizer", ways, given)


def _each_sink_once(train: TrainConfig) -> Iterator[Problem]:
    once = list(dict.fromkeys(train.log_to))
    if len(once) < len(train.log_to):
        ways = [f"train.log_to = {toml(once)}"]
        yield Problem(
            "log_to", "an output is listed twice", "each output once", ways, train.written("log_to")
        )


class TrainConfig(Section):
    """`[train]`: training settings. Batch sizes do not depend on the mesh."""

    place = "train"
    rules = (
        NoEffect("betas", "optimizer of_groups", WITH_BETAS, 'optimizer = "adamw"'),
        NoEffect("state_dtype", "optimizer of_groups", WITH_MOMENTS, 'optimizer = "adamw"'),
        NoEffect(
            "weight_decay", "optimizer of_groups", (*WITH_EPS, "sgd", "asgd", "muon"), 'optimizer = "adamw"'
        ),
        NoEffect("eps", "optimizer of_groups", WITH_EPS, 'optimizer = "adamw"'),
        NoEffect("decay_steps", "schedule", ("wsd",), 'schedule = "wsd"'),
        NoEffect("min_lr_ratio", "schedule", ("cosine", "linear", "wsd"), 'schedule = "cosine"'),
        NoEffect("compute_dtype float32_matmul_precision", "dtype", ("float32",), 'dtype = "float32"'),
        NoEffect("float8", "compute_dtype", ("bfloat16",), 'compute_dtype = "bfloat16"'),
        NoEffect("loss_scale", "compute_dtype", ("float16",), 'compute_dtype = "float16"'),
        NoEffect("keep checkpoint_async", "checkpoint_every", way="checkpoint_every = 100"),
        NoEffect("resume_changed", "resume", way="resume = true"),
        NoEffect("eval_batches evaluate patience target_loss", "eval_every", way="eval_every = 100"),
        NoEffect("min_delta", "patience", way="patience = 3"),
        NoEffect("evaluate_ema", "eval_every", way="eval_every = 100"),
        NoEffect("evaluate_ema", "ema", way="ema = 0.999"),
        partial(
            too_large, field="warmup_steps", limit="steps", why="the warm-up is longer than the training"
        ),
        *(_decay, _some_steps, _arguments_of_groups, _each_sink_once),
    )
    steps: int = Field(ge=1, examples=[60])
    """Number of optimizer steps."""
    global_batch_size: int = Field(ge=1, examples=[32])
    """Samples per step, over all ranks."""
    micro_batch_size: int = Field(ge=1, examples=[4])
    """Samples per rank in one forward and backward pass."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the learning rate rises to lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate decay after the warm-up. "wsd" keeps the rate constant until the last decay_steps steps."""
    min_lr_ratio: Share = 0.1
    """With cosine, linear and wsd: final learning rate, as a fraction of lr."""
    decay_steps: int | None = Field(default=None, ge=1)
    """With wsd: number of final steps over which the learning rate decays. If omitted, it is a tenth of all steps."""
    optimizer: Optimizer = "adamw"
    """The torch.optim class, for all parameters for which groups does not name another. For any other optimizer, use
    meshcomm.train.Trainer(optimizer=...).
    """
    optimizer_args: FrozenTable[Argument] = Field(default_factory=Table, examples=[{"momentum": 0.9}])
    """Keyword arguments for the optimizer other than lr, weight_decay, betas and eps, named as in torch.optim."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The optimizers' weight decay, also in groups. The default is 0.1 for adamw and torch's default for any other optimizer."""
    betas: Pair[Fraction] = (0.9, 0.95)
    """Adam's two decay rates, also in groups. The default is [0.9, 0.95] for adamw and torch's default for other variants
    of Adam.
    """
    eps: float = Field(default=1e-8, gt=0)
    """The optimizers' epsilon, also in groups, except muon's. The default is 1e-08 for adamw and torch's default for any other
    optimizer.
    """
    groups: FrozenTable[GroupConfig] = Field(default_factory=Table, examples=[{"embed*": {"lr": 0.1}}])
    """Factors for lr and weight_decay, and optimizers, by patterns of parameter names. The first pattern that matches applies."""
    frozen: FrozenList[Text] = Field(default=(), examples=[["*.indexer.*", "model.embed_tokens.*"]])
    """Name patterns of parameters to freeze. Frozen parameters have no gradient and no optimizer state. Default []: none."""
    label_smoothing: Fraction = 0.0
    """Share of each target that the built-in cross-entropy spreads evenly over the vocabulary, as in torch."""
    z_loss: float = Field(default=0.0, ge=0, examples=[1e-4])
    """Factor of the squared log-sum-exp of the logits, which the built-in cross-entropy adds for each target."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum gradient norm over all weights. Larger gradients are scaled down to this norm. If omitted, gradients are not
    clipped.
    """
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens if a step's loss or gradient norm is not finite. The step is never applied. With "stop", the run ends.
    With "skip", the run continues with the next step, and ends after 10 such steps in a row. With compute_dtype = "float16",
    "stop" applies only to the loss: a step whose gradients overflow is skipped.
    """
    on_unused: Literal["error", "zero"] = "error"
    """What happens if a parameter gets no gradient in a step. With "error", the step is not applied, and every rank names such
    parameters. With "zero", a rank that does not use a parameter adds zeros to its gradient, and the optimizer updates it as
    usual, with weight decay.
    """
    ema: float | None = Field(default=None, gt=0, lt=1, examples=[0.999])
    """Decay of a moving average of the weights, which is updated after each applied step and saved in checkpoints. If omitted,
    there is none.
    """
    check: bool = True
    """Before training, compare two steps of a small copy of the model, loss and optimizer with plain torch on one process. See
    docs/guide/step.md.
    """
    seed: int = Field(default=0, ge=0)
    """Seed for the weights and the order of the samples."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the weights."""
    compute_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype for matmuls, activations (also when they are sent) and gathered weights. Weights, optimizer state and
    gradient sums keep dtype. Frozen weights under adapters use compute_dtype. With "float16", the loss is scaled. If omitted,
    dtype is used.
    """
    loss_scale: float | None = Field(default=None, gt=0, le=2.0**64, examples=[1024.0])
    """With compute_dtype = "float16": the first factor of the loss, which then follows the rule of torch.amp.GradScaler. If
    omitted, it is 65536.
    """
    float8: Literal["tensorwise", "rowwise"] | None = None
    """With compute_dtype = "bfloat16": multiply the linear layers' matrices in float8, with one scale for each matrix or for each
    row. Needs torchao, and a GPU with compute capability 8.9 or newer. If omitted, compute_dtype is used.
    """
    state_dtype: Literal["bfloat16"] | None = None
    """Dtype in which optimizers store their moments between steps. They compute in dtype. If omitted, dtype."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Value for torch.set_float32_matmul_precision during the run; "high" and "medium" allow TF32 on GPUs. If
    omitted, the process's setting is unchanged.
    """
    activation_checkpointing: bool | Literal["selective"] | Positive = False
    """Blocks whose activations are recomputed in the backward pass: all blocks (true), every N-th block (N), or all
    blocks while keeping the results of matmuls, attention and communication ("selective").
    """
    compile: bool = False
    """Compile each block with torch.compile."""
    out: Text = "runs/train"
    """Output folder of the run."""
    log_every: int = Field(default=1, ge=1)
    """Number of steps between metric log lines."""
    trace_steps: Pair[int] | None = Field(default=None, examples=[(3, 5)])
    """First and last step to trace. Calls in these steps are written to trace.json in out. If omitted, no steps are traced."""
    log_to: FrozenList[Literal["tensorboard", "wandb"]] = Field(default=(), examples=[["tensorboard"]])
    """Additional outputs for metrics. "tensorboard" writes to out/tensorboard. "wandb" writes to out/wandb, offline
    unless WANDB_MODE is set. Default []: none.
    """
    peak_flops: float | None = Field(default=None, gt=0, examples=[989.4e12])
    """Peak dense FLOP/s of a rank's device, to compute MFU. If omitted, the vendor's figure is used for well-known GPUs;
    for other devices, MFU is not reported.
    """
    checkpoint_every: int = Field(default=0, ge=0)
    """Number of steps between checkpoints. A final checkpoint is saved after the last step. 0 saves no checkpoints."""
    checkpoint_async: bool = False
    """With checkpoint_every: continue training while a checkpoint is being written."""
    keep: int = Field(default=2, ge=1)
    """With checkpoint_every: number of most recent checkpoints to keep."""
    init_from: Text | None = Field(default=None, examples=["runs/base"])
    """Weights to start from, relative to the config file: a run or a checkpoint, saved on any mesh; a folder or file of
    safetensors; a file of torch.save; or a folder of torch.distributed.checkpoint. If omitted, weights are generated, or read
    from model.pretrained.
    """
    resume: bool = False
    """Resume from the last complete checkpoint in out, if there is one."""
    resume_changed: FrozenList[Literal["data", "seq_len", "global_batch_size"]] = ()
    """With resume: settings that may differ from those in the checkpoint. If data or seq_len differs, the samples start
    over. If only global_batch_size differs, the samples continue. Default []: none.
    """
    eval_every: int = Field(default=0, ge=0)
    """With validation data: number of steps between evaluations. A final evaluation follows the last step. 0: disabled."""
    evaluate: Function | None = Field(default=None, examples=["my_package.judge:accuracy"])
    """With eval_every: module:function, called on every rank with the Trainer. The function returns the validation loss,
    or a mapping from names to numbers. If omitted, no function is called.
    """
    evaluate_ema: bool = False
    """With eval_every and ema: evaluate the moving average of the weights."""
    eval_batches: int | None = Field(default=None, ge=1)
    """With eval_every: number of global batches per evaluation, the same batches each time. If omitted, all full batches are
    evaluated.
    """
    patience: int | None = Field(default=None, ge=1)
    """With eval_every: end the run after this many evaluations in a row without a lower validation loss. If omitted, the
    run does not end early.
    """
    min_delta: float = Field(default=0.0, ge=0)
    """With patience: minimum decrease in the validation loss that counts as an improvement."""
    target_loss: float | None = None
    """With eval_every: end the run once the validation loss is at or below this value. If omitted, there is no target."""

    @property
    def of_groups(self) -> tuple[str, ...]:
        """The optimizers that groups name."""
        return tuple(group.optimizer for group in self.groups.values() if group.optimizer)
