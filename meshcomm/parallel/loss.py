"""The loss of a step: the arguments and results of a loss function, and the sum over microbatches and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from meshcomm.config import TrainConfig
from meshcomm.errors import ConfigError, ShapeError, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.parallel.model import Model
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.tensor import TensorSplit, cross_entropy
from meshcomm.parallel.torch_private import update_scale
from meshcomm.parallel.tree import tensors_of, with_tensors

IGNORED: Final = -100
_FORMS: Final = 'a scalar tensor, (sum, count), or a dictionary with "loss"'
_ONE_FORM: Final = "the same form for every microbatch: its mean, or (sum, count)"


class StepSum(NamedTuple):
    """What the losses of a step add up to.

    loss: this rank's share of the step's loss; None if its stages have none. divisor: the number by which the sum of all
    losses is divided. factor: what the step's gradients must be multiplied by; None for 1. terms: float64 (terms,), the loss's
    and then the loss scale, if there is one.
    """

    loss: Tensor | None
    divisor: Tensor
    factor: Tensor | None
    terms: Tensor


@final
class LossScale:
    """The factor of a float16 step's loss: without it, small gradients would be rounded to 0. A step that overflows is skipped and
    halves it; 2000 steps without an overflow double it.

    value: float32 (). steps: int32 (), the number of steps since it changed.
    """

    def __init__(self, first: float, device: torch.device) -> None:
        self.first = first
        self.value = torch.full((), first, device=device)
        self.steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, spoilt: Tensor) -> None:
        """Follow a step. spoilt: nonzero if it was skipped."""
        update_scale(self.value, self.steps, spoilt)

    def put_back(self, value: float, steps: int) -> None:
        """Continue from a checkpoint."""
        self.value.fill_(value)
        self.steps.fill_(steps)


@final
class StepLoss:
    """Computes the losses of a step's microbatches and adds them up, exactly as one process would.

    Without an own loss, the loss is the cross-entropy of logits, averaged over all targets of the global batch that are not
    -100. The divisor is then known before the first forward pass. The divisor of an own loss is known after the last one.

    names: the names of the own loss's terms, known after the first step.
    scale: the factor of a step's loss in the backward pass; None for 1. It is not in the results.

    Every rank and every step use the form of the first step: a mean or (sum, count). Means need no counts, so later steps of
    a loss without terms exchange nothing here.
    """

    def __init__(
        self, splits: Splits, train: TrainConfig, model: Model, microbatches: int, data_size: int
    ) -> None:
        self._mesh, self._splits, self._own = splits.mesh, splits, model.own_loss
        self._mixed = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        self._dtype = splits.tensor.dtype
        self.scale: LossScale | None = None
        if train.compute_dtype == "float16":
            self.scale = LossScale(train.loss_scale or 2.0**16, splits.mesh.device)
        self._logits = model.outputs(splits) if model.vocab_size else 0
        self._divided = 0 < self._logits < model.vocab_size
        self._undivided = TensorSplit(splits.tensor.mesh, None, splits.tensor.dtype)
        self._vocab_size, self._hidden_size = model.vocab_size, model.hidden_size
        self._smoothing, self._z_loss = train.label_smoothing, train.z_loss
        own_loss = self._own
        if own_loss is not None and (self._smoothing or self._z_loss):
            raise ConfigError(
                "this setting has no effect on a loss of your own",
                given=f"label_smoothing = {self._smoothing:g}, z_loss = {self._z_loss:g}, and a loss function",
                expected="settings of the built-in cross-entropy without a loss function, or a loss function without them",
                hint="remove train.label_smoothing and train.z_loss, or the loss",
            )
        self._slices = own_loss is None or own_loss.takes_slices
        self._takes_inputs = own_loss is not None and takes_inputs(own_loss.function)
        self._microbatches, self._samples = microbatches, microbatches * train.micro_batch_size
        # Whether a loss must not communicate with the ranks that have other samples.
        self._refuses_calls = train.check and microbatches > 1 and bool(splits.data)
        self.names: list[str] = []
        self._knows_names = False
        # Whether every loss is a mean; None before the first step. `_pairs` counts this step's losses that are not.
        self._means: bool | None = None
        self._pairs = 0
        self._counts = False
        pieces = microbatches * data_size * (splits.context.size if self._slices else 1)
        self._pieces = torch.tensor(pieces, dtype=self._dtype, device=self._mesh.device)
        self._divisor = torch.ones_like(self._pieces)
        # For each microbatch: the count of the loss, and the sum and the count of each term.
        self._rows: list[Tensor] = []
        self._tokens = 0

    def split(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return this rank's slices of the inputs along the context dim, and the further arguments of the loss.

        In a tree, tensors are split if their axis 1 is as long as axis 1 of the first tensor.
        """
        context = self._splits.context
        if context.size == 1:
            return inputs, _Given(targets, inputs) if self._takes_inputs else targets
        tokens = next((x.shape[1] for x in tensors_of(inputs) if x.ndim > 1), 0)
        self._tokens = tokens // context.size

        def mine(x: Tensor) -> Tensor:
            return context.split(x, 1) if x.ndim > 1 and x.shape[1] == tokens else x

        targets_of_rank = with_tensors(mine, targets) if self._slices else targets
        return with_tensors(mine, inputs), _Given(
            targets_of_rank, inputs
        ) if self._takes_inputs else targets_of_rank

    def start(self, targets: Any, *, evaluates: bool = False) -> None:
        """Begin a step with these targets on this rank; or an evaluation, whose divisor is not known yet.

        Called by: every rank.
        """
        self._rows, self._pairs = [], 0
        self._counts = evaluates or (self._own is not None and not (self._means and not self.names))
        divisor = torch.ones((), dtype=torch.float64)
        if evaluates:
            pass
        elif self._own is not None:
            divisor = self._pieces
        else:
            if not isinstance(targets, Tensor):
                raise TrainingError(
                    "the built-in loss takes one tensor of targets",
                    given=f"targets that are a {type(targets).__name__}",
                    expected="int64 targets with one class for each logit vector; or a loss of your own",
                    hint="Trainer(..., loss=lambda outputs, targets: ...), which is given the tree",
                )
            divisor = (targets != IGNORED).sum().to(torch.float64)
            divisor = self._splits.summed(divisor, self._splits.data)
        self._divisor = divisor.to(self._mesh.device, self._dtype)
        if self.scale is not None and not evaluates:
            self._divisor = self._divisor / self.scale.value

    def __call__(self, outputs: Any, targets: Any, weight: float = 1.0) -> Tensor:
        """Return a microbatch's share of the step's loss, up to the factor of `finish`.

        weight: of a mean of the own loss; 0 if the microbatch has no samples that count.
        """
        if self._own is None:
            logits = logits_of(outputs)
            _check_axis(logits, targets, self._vocab_size)
            # A plan may leave the head whole.
            divided = self._divided and logits.shape[-1] == self._logits
            loss = cross_entropy(
                self._splits.tensor if divided else self._undivided,
                logits,
                targets,
                reduction="sum",
                label_smoothing=self._smoothing,
                z_loss=self._z_loss,
                vocab_size=self._vocab_size if divided else None,
            )
            if self._counts:
                self._rows.append((targets != IGNORED).sum().double().reshape(1))
            return loss / self._divisor
        arguments = (targets.targets, targets.inputs) if isinstance(targets, _Given) else (targets,)
        autocast = (
            nullcontext() if self._mixed is None else torch.autocast(self._mesh.device.type, self._mixed)
        )
        with autocast, self._calls_refused():
            outputs = outputs if self._slices else self._whole(outputs)
            try:
                returned = self._own.function(outputs, *arguments)
            except (AttributeError, TypeError) as error:
                if arguments[0] is not None:
                    raise
                raise TrainingError(
                    "the loss fails without targets",
                    given=f"targets = None, {type(error).__name__}: {error}",
                    expected="targets, or a loss that needs none",
                    hint="trainer.step(inputs, targets); or batches (inputs, targets)",
                ) from error
        terms = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        if "loss" not in terms:
            raise _refused(
                f'a dictionary with {", ".join(map(repr, terms)) or "nothing"}, but no "loss"', _FORMS
            )
        loss_term = terms.pop("loss")
        self._check_form(loss_term)
        self._name([*terms])
        loss, count = self._pair("loss", loss_term, weight)
        if self._counts:
            pairs = [self._pair(name, term, weight) for name, term in terms.items()]
            row = [count, *(value for pair in pairs for value in pair)]
            self._rows.append(torch.stack([value.detach().double() for value in row]))
        return loss.to(self._dtype) / self._divisor

    @torch.no_grad()
    def finish(self, loss: Tensor | None) -> StepSum:
        """Return what the microbatches' losses since `start` add up to. loss: their sum on this rank, if it has them.

        Called by: every rank.
        """
        none = torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        scale = None if self.scale is None else self.scale.value.double().reshape(1)
        # The ranks along context have the same whole loss, and later add their shares.
        shares = 1 if self._slices else self._splits.context.size
        if not self._counts:
            whole = loss if loss is None or shares == 1 else loss / shares
            if scale is None:
                return StepSum(whole, self._divisor, None, none)
            factor = scale[0].reciprocal()
            whole = None if whole is None else (whole * factor).to(whole.dtype)
            return StepSum(whole, self._divisor * scale[0], factor, scale)
        splits = self._splits
        if not self._knows_names and self._own is not None:
            # Only the last stage calls the loss.
            if splits.pipeline is not None and not self._mesh.is_fake:
                last = self._mesh.size(splits.pipeline) - 1
                self.names[:] = self._mesh.objects.broadcast(splits.pipeline, [*self.names], src=last)
            self._knows_names = True
        # The first exchange also counts the losses that are pairs, and all losses, and adds up a checksum of the terms' names.
        first = 5 if self._own is not None and self._means is None else 0
        totals = none.new_zeros(first + 1 + 2 * len(self.names))
        if loss is not None:
            totals = torch.stack(self._rows).sum(0)
            if first:
                code = zlib.crc32(repr(self.names).encode()) % 2**20
                totals = torch.cat(
                    [totals.new_tensor([self._pairs, len(self._rows), 1, code, code**2]), totals]
                )
            totals = splits.summed(totals, splits.gradients if self._slices else splits.data)
        totals = splits.of_last_stage(totals)
        if first and not self._mesh.is_fake:
            self._agree(*totals[:first].tolist())
        totals = totals[first:]
        factor = self._divisor.double() / totals[0]
        if loss is not None:
            loss = (loss * factor / shares).to(loss.dtype)
        terms = totals[1::2] / totals[2::2]
        if scale is not None:
            return StepSum(loss, totals[0], factor, torch.cat([terms, scale]))
        return StepSum(loss, totals[0], None if self._means else factor, terms)

    # -- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _calls_refused(self) -> Iterator[None]:
        """Raise UnsupportedOp after collectives of a loss with ranks that have other samples, if it is given one of several
        microbatches.
        """
        if not self._refuses_calls:
            yield
            return
        mesh, dims = self._mesh, self._splits.data
        before = {recorder.label: recorder.started for recorder in mesh.debug.metrics.recorders.values()}
        yield
        for recorder in mesh.debug.metrics.recorders.values():
            if recorder.started == before.get(recorder.label, 0):
                continue
            coords = [mesh.get_coords(rank) for rank in recorder.ranks]
            if len({tuple(of_rank[dim] for dim in dims) for of_rank in coords}) > 1:
                size = self._samples
                raise UnsupportedOp(
                    "a loss that communicates with other ranks is given only one microbatch of their samples at a time",
                    given=f"a collective on {recorder.label} in the loss, and {self._microbatches} microbatches per step on {mesh.label}",
                    expected=f"train.micro_batch_size = {size}: one microbatch, so that the loss sees the global batch",
                    hint=f"train.micro_batch_size = {size}; or return (sum, count) or named terms, which add up over all "
                    "microbatches and ranks. train.check = false trains with the mean over microbatches",
                )

    def _check_form(self, loss: Any) -> None:
        """Raise TrainingError if a microbatch's loss is a pair and earlier steps' losses were means, or the reverse."""
        pair = _is_pair(loss)
        self._pairs += pair
        if pair is self._means:
            forms = ("a mean", "(sum, count)")
            raise _refused(
                f"{forms[pair]} on {self._mesh.label}, and {forms[not pair]} in earlier steps", _ONE_FORM
            )

    def _agree(self, pairs: float, losses: float, ranks: float, codes: float, squares: float) -> None:
        """Set the form of the loss from those of all ranks. Raises TrainingError, on every rank, if it is mixed.

        codes, squares: the sums of a checksum of the names, and of its square, over `ranks` ranks.
        """
        # Both products are rounded correctly, which a power is not.
        if ranks * squares != codes * codes:
            raise _refused(
                f"terms {listed(self.names) or '(none)'} on {self._mesh.label}, and other ones on other ranks",
                "the same terms, in the same order, on every rank",
            )
        if 0 < pairs < losses:
            raise _refused(
                f"(sum, count) for {pairs:g} of the {losses:g} microbatches of all ranks, and a mean for the others",
                _ONE_FORM,
            )
        self._means = not pairs

    def _name(self, names: list[str]) -> None:
        """Raise TrainingError if the terms differ from the terms of earlier microbatches."""
        if not self._knows_names and not self._rows:
            wrong = [name for name in names if not isinstance(name, str) or not name.isidentifier()]
            if wrong:
                raise _refused(f"a term named {wrong[0]!r}", "names that are Python identifiers")
            self.names[:] = names
        if names != self.names:
            raise _refused(
                f"terms {', '.join(names) or '(none)'} on {self._mesh.label}, and {', '.join(self.names) or '(none)'} before",
                "the same terms, in the same order, for every microbatch",
            )

    def _pair(self, name: str, returned: Any, weight: float) -> tuple[Tensor, Tensor]:
        """Return the sum and the count of a term."""
        total, count = returned if (both := _is_pair(returned)) else (returned, 1)
        if not isinstance(total, Tensor) or total.ndim:
            given = (
                f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
            )
            raise _refused(f"{name}: {given}", _FORMS)
        if total.is_complex():
            raise _refused(f"{name}: {total.dtype}", "real numbers")
        if name == "loss" and torch.is_grad_enabled() and not total.requires_grad:
            raise _refused(
                "a loss that does not depend on the outputs by operations with gradients",
                "a loss through which gradients reach the parameters",
            )
        count = torch.as_tensor(count, device=total.device).reshape(())
        if not weight:
            return torch.zeros_like(total), torch.zeros_like(count)
        return (total, count) if both or weight == 1 else (total * weight, count * weight)

    def _whole(self, outputs: Any) -> Any:
        """Return the outputs of the model on one process, on every rank along tensor and context."""
        if not self._divided and self._splits.context.size == 1:
            return outputs
        widths = [x.shape[-1] for x in tensors_of(outputs) if x.ndim]
        # A plan may leave the head whole.
        divided = self._divided and self._vocab_size not in widths
        if divided and self._hidden_size == self._logits and widths.count(self._logits) > 1:
            raise UnsupportedOp(
                "the logits look like hidden states, so they cannot be gathered for the loss",
                given=f"{widths.count(self._logits)} outputs whose last axis has {self._logits} elements",
                expected="one such output",
                hint="return only the logits; or another hidden size; or ModelSpec(loss_takes_slices=True), with a loss that is given "
                "slices",
            )
        return with_tensors(partial(self._gathered, divided), outputs)

    def _gathered(self, divided: bool, x: Tensor) -> Tensor:
        split, context = self._splits.tensor, self._splits.context
        if divided and x.ndim and x.shape[-1] == self._logits:
            # The last rank may have fewer logits. Every rank computes the same loss, so its own slice of the gradient is complete.
            most = -(-self._vocab_size // split.size)
            x = nn.functional.pad(x, (0, most - self._logits))
            x = self._mesh.functional.all_gather(split.dim, x, -1, grad="slice")[..., : self._vocab_size]
        if context.size == 1:
            return x
        if x.ndim < 2 or x.shape[1] != self._tokens:
            raise ShapeError(
                f"an output of the model is not split along the sequence on {self._mesh.label}",
                given=f"shape {tuple(x.shape)}, {self._tokens} tokens on this rank",
                expected=f"(samples, {self._tokens}, ...), which is gathered along {context.dim} for the loss",
                hint="return outputs for each token; or remove parallel.context",
            )
        return context.gather(x, 1, grad="slice")


@dataclass
class _Given:
    """What a loss with three arguments is given with the outputs."""

    targets: Any
    inputs: Any


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2


def own_leaves(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return a microbatch's inputs and the further arguments of the loss. Tensors that need gradients become leaves of a new graph.

    A loss with three arguments is given the same leaves as the module, and may differentiate outputs by them.
    """
    leaves = with_tensors(lambda x: x.detach().requires_grad_() if x.requires_grad else x, inputs)
    return leaves, _Given(targets.targets, leaves) if isinstance(targets, _Given) else targets


def takes_inputs(loss: Callable[..., Any]) -> bool:
    """Return whether a loss has a third argument without a default, which is the inputs of the microbatch."""
    try:
        called: Any = loss.forward if isinstance(loss, nn.Module) else loss
        arguments = [*signature(called).parameters.values()]
    except (TypeError, ValueError):
        return False
    placed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(argument.kind in placed and argument.default is argument.empty for argument in arguments) == 3


def module_of(loss: object) -> nn.Module | None:
    """Return the module that a loss is, or whose method it is."""
    parts = (loss, getattr(loss, "__self__", None), getattr(loss, "func", None))
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def logits_of(outputs: Any) -> Tensor:
    """Return the logits in a model's output. Raises UnsupportedOp if there are none."""
    logits = outputs[0] if isinstance(outputs, tuple) and outputs else getattr(outputs, "logits", outputs)
    logits = logits.get("logits") if isinstance(logits, Mapping) else logits
    if not isinstance(logits, Tensor):
        raise UnsupportedOp(
            "the model returns no logits",
            given=f"a {type(outputs).__name__}",
            expected="a tensor, a tuple that begins with a tensor, or logits by this name",
            hint="use a loss of your own, which takes any output of the model",
        )
    return logits


def _check_axis(logits: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Raise ShapeError if axis 1 seems to have the classes, as in torch's cross-entropy of images."""
    other = logits.ndim > 3 or (logits.ndim == 3 and logits.shape[:-1] != targets.shape)
    if not vocab_size and other and tuple(targets.shape) == (len(logits), *logits.shape[2:]):
        raise ShapeError(
            "the built-in loss takes the classes along the last axis",
            given=f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
            expected="logits (samples, ..., classes), targets (samples, ...)",
            hint="Trainer(..., loss=torch.nn.functional.cross_entropy), which takes them along axis 1",
        )


def _refused(given: str, expected: str) -> TrainingError:
    return TrainingError(
        "the loss function returned something that cannot be trained",
        given=given,
        expected=expected,
        hint="return F.mse_loss(outputs, targets); or (losses.sum(), mask.sum()); or a dictionary",
    )


def check_loss(loss: object, model: nn.Module | None = None) -> None:
    """Raise UnsupportedOp for a loss module, or a method of one, with parameters that learn. Those of `model` are trained."""
    part = module_of(loss)
    of_model = set() if model is None else set(model.parameters())
    named = () if part is None else part.named_parameters()
    if names := [name for name, parameter in named if parameter.requires_grad and parameter not in of_model]:
        raise UnsupportedOp(
            "the parameters of this loss would never be trained",
            given=f"a {type(part).__name__} with {listed(names)}",
            expected="parameters in the model, or a loss whose parameters need no gradient",
            hint="compute the part that learns in the model's forward; or loss.requires_grad_(False)",
        )
