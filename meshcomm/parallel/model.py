"""What a trainer knows of a model: the stages that it can build and fill, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from meshcomm.parallel.splits import Splits
from meshcomm.predict.stages import PartCosts, Stage

# (outputs, targets) or (outputs, targets, inputs) of a microbatch -> a mean, (a sum, a count), or named terms: see OwnLoss.
LossOf: TypeAlias = Callable[..., Any]


class OwnLoss(NamedTuple):
    """A loss function of the user's own, called once for each microbatch.

    function: `(outputs, targets)`, as in a program on one process, or `(outputs, targets, inputs)`. Outputs are whole: logits are gathered over the vocabulary
        along the tensor dim, and outputs over the sequence along the context dim. It runs under the autocast of
        train.compute_dtype and returns one of:
        - a scalar, the mean over the microbatch. The step's loss is the mean over all microbatches on all ranks.
        - (sum, count), scalars. The step's loss is the sum of all sums, divided by the sum of all counts. So are gradients.
        - a dictionary with "loss", which is a scalar or (sum, count), and further terms by name. They are logged and not trained.
    takes_slices: whether `function` is given this rank's slice of the logits and of the sequence, and communicates along the
        tensor dim itself. Its results then also add up along the context dim.
    """

    function: LossOf
    takes_slices: bool = False


class Model(ABC):
    """A model whose stages can be built without allocating memory, and filled after memory is allocated.

    num_layers: the number of blocks that a pipeline divides; 1 if the model cannot be divided.
    hidden_size: the number of elements in a token's vector between stages.
    vocab_size: the exclusive upper bound of token ids, and the number of logits per token.
    tied:       the name of the weight that the embedding and the head share, a stage's `tied_weight`; "" if there is none.
    draws:      whether its modules may draw from torch's default generators.
    packed:     whether samples are packed documents. If so, stages receive document numbers, and attention is per document.
    saves_all:  whether all parameters are saved. If not, only trainable ones are saved, and the rest are filled at each start.
    own_loss:   the loss; None for the cross-entropy of logits.
    counts_all_tokens: whether the loss depends on all tokens of a sample, also on those without targets, such as padding.
    any_length: whether samples of tokens may have another length than data.seq_len, without a pipeline.
    drops:      whether its stages use dropout by sample number. If so, stages receive sample numbers and an attribute `step`.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: str = ""
    draws: bool = True
    drops: bool = False
    any_length: bool = False
    packed: bool = False
    saves_all: bool = True
    own_loss: OwnLoss | None = None
    counts_all_tokens: bool = False

    @abstractmethod
    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """Return a stage's split module, with its parameters on the meta device: see `on_meta`.

        The module maps a microbatch's int64 tokens or hidden states to hidden states, or, on the last stage, to this rank's
        slice of the logits. Outputs are in train.compute_dtype, or in train.dtype if compute_dtype is not set. The module's
        `layers`, a ModuleDict or ModuleList, are gathered one at a time if they are sharded. With dropout, the module also
        receives `samples`, int64 (microbatch,), the samples' indices in the global batch. A parameter has the same name in
        every stage and on every mesh.
        """

    @abstractmethod
    def fill(self, module: nn.Module, stage: Stage) -> None:
        """Write the values of a stage's parameters, or of this rank's parts of them. Does not communicate."""

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls the only stage with inputs, which may be a tree, and further named arguments."""
        return module

    def check(self, splits: Splits, stages: int) -> None:  # noqa: B027
        """Called before any stage is built. Raises UnsupportedOp, with the reason, for unsupported settings."""

    def outputs(self, splits: Splits) -> int:
        """Return the number of logits per token that the last stage returns on a rank."""
        return splits.tensor.rows(self.vocab_size)[1]

    def costs(self, seq_len: int) -> PartCosts:
        """Return the relative costs of the parts, used to divide layers among stages."""
        return PartCosts(0, (1,) * self.num_layers, 0)
