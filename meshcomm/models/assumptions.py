"""What training assumes of a module of tokens, checked on one process.

Its logits depend on no later token. Its positions count 0, 1, 2, ..., which context parallelism and packed documents give it:
RoBERTa and its relatives count from padding_idx + 1, and do not count padding. Its own loss, if it has one, is the cross-entropy
of the next tokens: training takes labels as targets, shifted by one, and leaves out an attention_mask for padding at the end,
which is silently wrong for masked language models, classes of tokens, encoder-decoders, and losses with further terms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshcomm.errors import UnsupportedOp
from meshcomm.models.family_code import family_code, wide
from meshcomm.models.outside import undisturbed
from meshcomm.models.spec import ModelSpec, reduced
from meshcomm.parallel.loss import IGNORED, logits_of
from meshcomm.parallel.memory import eval_mode, seeded

OWN_LOSS: Final = (
    "loss=lambda outputs, labels: (outputs.loss * (labels != -100).sum(), (labels != -100).sum()), the sum of the model's own loss "
    'and the number of labels that it averages over, with trainer.step(batch, batch["labels"]), or (batch, batch["labels"]) as a batch'
)
"""How a module of transformers is trained with its own loss."""

# The samples of a user's batch, and the tokens of each, that are looked at.
_SAMPLES, _TOKENS = 2, 512
# The tokens of a sample of a small model.
_FEW: Final = 16
ROOM: Final = 1e-9
"""Tolerance in float64, relative to the largest output or the largest element of a gradient."""
# Tolerances, by dtype. Experts that are given other tokens may round differently.
_ROOMS: Final = {torch.float64: ROOM, torch.float32: 1e-5}
_WIDEST_ROOM: Final = 2e-2
# The tolerance of positions, in float32.
_POSITIONS_ROOM: Final = 1e-4


def own_positions(spec: ModelSpec) -> str:
    """Return why a family's model computes something else if it is given the positions 0, 1, 2, ...; "" if it does not.

    A small model runs on one process: that of `spec.small` or, if it has none, the model itself. The result is "" if it does not
    run.
    """
    if not spec.positions:
        return ""
    try:
        with seeded(0), torch.no_grad(), family_code(torch.float32):
            module = reduced(spec).module().float().eval()
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            tokens = torch.randint(3, 64, (2, _FEW))
            # The padding of a small model is token 0.
            tokens[1, _FEW // 2] = 0
            named = {spec.positions: torch.arange(_FEW).unsqueeze(0)}
            usual, moved = logits_of(module(tokens)), logits_of(module(tokens, **named))
    except Exception:
        return ""
    if float((moved - usual).abs().max()) <= _POSITIONS_ROOM * float(usual.abs().max()):
        return ""
    return (
        f"a {type(module).__name__} counts the positions of its tokens itself, and not as 0, 1, 2, ..., "
        "so it cannot be given those of a part of a sample, or of a document"
    )


def check_family(spec: ModelSpec, build: Callable[[], nn.Module], name: str) -> None:
    """Raise UnsupportedOp for a model of transformers that cannot be trained to predict the next token on any mesh.

    build: returns a small model of `spec` in float64. Its logits may depend on later tokens, which it would learn to copy, or
    its own loss may have terms that `spec.loss` lacks.
    """
    tokens = torch.randint(spec.vocab_size, (4, _FEW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), wide(torch.float64):
        try:
            module = build().eval()
            outputs = module(tokens)
            off, most = _moved_by_later(module, tokens, logits_of(outputs))
        except Exception:
            return  # Only full sizes run. `check_model` needs small ones, and says so.
        with suppress(TypeError):
            _compare_losses(spec, name, outputs, tokens, float(module(tokens, labels=tokens)))
    if off <= ROOM * most:
        return
    config: Any = getattr(module, "config", None)
    encoder = getattr(config, "is_decoder", True) is False
    raise UnsupportedOp(
        f"{name} is not causal: it would learn to copy the next token from its input",
        given=f"later tokens change earlier logits by {off:.2g} in a small model, where the largest is {most:.2g}"
        + (", and is_decoder = false in its config.json" if encoder else ""),
        expected="logits that depend on no later token",
        hint='"is_decoder": true in config.json' if encoder else "use a causal language model",
    )


def _moved_by_later(call: Callable[[Any], Any], tokens: Tensor, logits: Tensor) -> tuple[float, float]:
    """Return by how much the logits of the first half of the tokens change if all later tokens do, and the largest logit."""
    half = tokens.shape[1] // 2
    later = tokens.clone()
    later[:, half:] = (tokens - 1).where(tokens > 0, 1)[:, half:]
    moved = (logits_of(call(later)) - logits)[:, :half]
    return float(moved.abs().max()), float(logits.abs().max())


def _compare_losses(spec: ModelSpec, name: str, outputs: Any, tokens: Tensor, theirs: float) -> None:
    """Raise UnsupportedOp if a family's own loss is not the one that training computes."""
    # Most families shift the labels; some expect shifted ones.
    following = nn.functional.pad(tokens[:, 1:], [0, 1], value=IGNORED)
    losses = []
    for targets in (following, tokens):
        if spec.loss is None:
            loss = nn.functional.cross_entropy(logits_of(outputs).flatten(0, -2), targets.flatten())
        else:
            total, count = spec.loss(outputs, targets)["loss"]
            loss = total / count
        losses.append(float(loss))
    if all(abs(loss - theirs) > ROOM * max(1.0, abs(theirs)) for loss in losses):
        raise UnsupportedOp(
            f"the loss of a {name} has terms that training would leave out",
            given=f"{theirs:.6g} in a small model, by transformers; {losses[0]:.6g} by the loss for training",
            expected="the cross-entropy of the next tokens, or with router_aux_loss_coef times the routers' aux_loss",
            hint="set the factors of further terms in config.json to 0, such as z_loss_coefficient",
        )


def check_named(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Mapping[str, Tensor],
    read: Callable[[Mapping[str, Tensor]], tuple[Any, ...]],
    *,
    compares: bool,
    dtype: torch.dtype,
) -> None:
    """Raise UnsupportedOp if the module does not read a batch of transformers' names as training does.

    call:     calls the module with a tensor, or with a dictionary as its named arguments. It may communicate: every rank that
              has a part of the module's weights calls this function.
    batch:    has input_ids (samples, tokens), and optionally labels and attention_mask of the same shape.
    read:     returns the inputs and targets for training.
    compares: whether the module's own loss of its labels, if it computes one, must be that of training.
    dtype:    in which the module computes.
    """
    name = type(module).__name__
    part = _part_of({key: value for key, value in batch.items() if key != "position_ids"})
    tokens, targets = read(part)[:2]
    if tokens.shape[1] < 2 or not len(tokens):
        return
    taken = _arguments_of(module)
    room = _ROOMS.get(dtype, _WIDEST_ROOM)
    with _evaluated(module), undisturbed(), torch.no_grad(), wide(dtype):
        try:
            outputs_of_tokens = call(tokens)
        except Exception as error:
            if "labels" not in taken:
                return  # Training raises it, too.
            raise UnsupportedOp(
                f"a {name} cannot be trained on input_ids and labels as a model that predicts the next token",
                given=f"{type(error).__name__}: {error}, when it is called with input_ids",
                expected="a causal language model, or a loss of your own",
                hint=OWN_LOSS,
            ) from error
        logits = logits_of(outputs_of_tokens)
        if logits.shape[:2] != tokens.shape or not bool(logits.isfinite().all()):
            return
        off, most = _moved_by_later(call, tokens, logits)
        if off > room * most:
            raise UnsupportedOp(
                f"a {name} is not causal, so a dictionary of input_ids and labels would be misread: labels would be shifted, and "
                "attention_mask left out",
                given=f"{', '.join(batch)}; other tokens at the end change earlier logits by {off:.2g}",
                expected="a causal language model, or a loss of your own",
                hint=OWN_LOSS if "labels" in taken else 'trainer.step({"inputs": ..., "targets": ...})',
            )
        if not compares or "labels" not in taken or not bool((targets != IGNORED).any()):
            return
        # Without labels, the tokens are the labels.
        arguments = {"labels": tokens, **part}
        outputs = call({key: value for key, value in arguments.items() if key in taken})
    if (theirs := _loss_in(outputs)) is None:
        return
    # Of equal logits, if they are returned, losses are equal in any dtype.
    logits = getattr(outputs, "logits", logits)
    room = _ROOMS.get(theirs.dtype, _WIDEST_ROOM)
    ours = nn.functional.cross_entropy(logits.to(theirs.dtype).flatten(0, -2), targets.flatten())
    if abs(ours - theirs) <= room * max(1.0, abs(float(theirs))):
        return
    auxiliary = getattr(outputs_of_tokens, "aux_loss", None) is not None
    raise UnsupportedOp(
        f"the loss of a {name} is not the one that training computes from input_ids and labels",
        given=f"{float(theirs):.7g} for {len(tokens)} samples, by the model; {float(ours):.7g} as the cross-entropy of the next tokens",
        expected="equal losses, or a loss of your own",
        hint="output_router_logits = false in the model's config; or a config with [model] pretrained, which adds the routers' loss"
        if auxiliary
        else OWN_LOSS,
    )


def _part_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the samples in which most labels count, without tokens far behind."""
    cut = {key: tensor[:, :_TOKENS] for key, tensor in batch.items()}
    counts = (cut.get("labels", cut["input_ids"]) != IGNORED).sum(1)
    chosen = counts.topk(min(_SAMPLES, len(counts))).indices
    return {key: tensor[chosen] for key, tensor in cut.items()}


def _arguments_of(module: nn.Module) -> frozenset[str]:
    """Return the names among those of a batch that the module's forward takes."""
    names = ("input_ids", "labels", "attention_mask")
    arguments = inspect.signature(type(module).forward).parameters
    if "labels" not in arguments:
        return frozenset()
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    return frozenset(name for name in names if takes_any or name in arguments)


def _loss_in(outputs: Any) -> Tensor | None:
    """Return the loss in the outputs of a module that was given labels; None if there is none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        loss = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    return loss if isinstance(loss, Tensor) and not loss.ndim else None


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """In this context, the module is in eval mode. Afterwards, its modes and buffers are as before."""
    held = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with eval_mode(module):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)
