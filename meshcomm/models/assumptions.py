"""Checks that a module reads a dictionary of transformers' names as training does: as tokens, of which each predicts the next.

The targets are the labels, shifted by one, and an attention_mask for padding at the end is left out. This is right for causal
language models whose own loss is the cross-entropy of the next tokens. It is silently wrong for masked language models, classes
of tokens, encoder-decoders, and losses with further terms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshcomm.errors import UnsupportedOp
from meshcomm.models.difference import ROOM
from meshcomm.models.family_code import wide
from meshcomm.models.one_step import undisturbed
from meshcomm.parallel.loss import IGNORED, logits_of

OWN_LOSS: Final = (
    "loss=lambda outputs, labels: (outputs.loss * (labels != -100).sum(), (labels != -100).sum()), the sum of the model's own loss "
    'and the number of labels that it averages over, with trainer.step(batch, batch["labels"]), or (batch, batch["labels"]) as a batch'
)
"""How a module of transformers is trained with its own loss."""

_SAMPLES, _TOKENS = 2, 512
# Tolerances, by dtype. Experts that are given other tokens may round differently.
_ROOMS: Final = {torch.float64: ROOM, torch.float32: 1e-5}
_WIDEST_ROOM: Final = 2e-2


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
    part = _part_of({key: each for key, each in batch.items() if key != "position_ids"})
    tokens, targets = read(part)[:2]
    length = tokens.shape[1]
    if length < 2 or not len(tokens):
        return
    taken = _arguments_of(module)
    room = _ROOMS.get(dtype, _WIDEST_ROOM)
    with _evaluated(module), undisturbed(), torch.no_grad(), wide(dtype):
        try:
            found = call(tokens)
        except Exception as error:
            if "labels" not in taken:
                return  # Training raises it, too.
            raise UnsupportedOp(
                f"a {name} cannot be trained on input_ids and labels as a model that predicts the next token",
                given=f"{type(error).__name__}: {error}, when it is called with input_ids",
                expected="a causal language model, or a loss of your own",
                hint=OWN_LOSS,
            ) from error
        logits = logits_of(found)
        if logits.shape[:2] != tokens.shape or not bool(logits.isfinite().all()):
            return
        # Every token after the first half is replaced by another one.
        later = tokens.clone()
        later[:, length // 2 :] = (tokens - 1).where(tokens > 0, 1)[:, length // 2 :]
        moved = (logits_of(call(later)) - logits)[:, : length // 2].abs().max()
        if moved > room * logits.abs().max():
            raise UnsupportedOp(
                f"a {name} is not causal, so a dictionary of input_ids and labels would be misread: labels would be shifted, and "
                "attention_mask left out",
                given=f"{', '.join(batch)}; other tokens at the end change earlier logits by {float(moved):.2g}",
                expected="a causal language model, or a loss of your own",
                hint=OWN_LOSS if "labels" in taken else 'trainer.step({"inputs": ..., "targets": ...})',
            )
        if not compares or "labels" not in taken or not bool((targets != IGNORED).any()):
            return
        # Without labels, the tokens are the labels.
        given = {"labels": tokens, **part}
        outputs = call({key: each for key, each in given.items() if key in taken})
    if (theirs := _loss_in(outputs)) is None:
        return
    # Of equal logits, if they are returned, losses are equal in any dtype.
    logits = getattr(outputs, "logits", logits)
    room = _ROOMS.get(theirs.dtype, _WIDEST_ROOM)
    ours = nn.functional.cross_entropy(logits.to(theirs.dtype).flatten(0, -2), targets.flatten())
    if abs(ours - theirs) <= room * max(1.0, abs(float(theirs))):
        return
    auxiliary = getattr(found, "aux_loss", None) is not None
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
    cut = {key: each[:, :_TOKENS] for key, each in batch.items()}
    counts = (cut.get("labels", cut["input_ids"]) != IGNORED).sum(1)
    chosen = counts.topk(min(_SAMPLES, len(counts))).indices
    return {key: each[chosen] for key, each in cut.items()}


def _arguments_of(module: nn.Module) -> frozenset[str]:
    """Return the names among those of a batch that the module's forward takes."""
    names = ("input_ids", "labels", "attention_mask")
    arguments = inspect.signature(type(module).forward).parameters
    if "labels" not in arguments:
        return frozenset()
    rest = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    return frozenset(name for name in names if rest or name in arguments)


def _loss_in(found: Any) -> Tensor | None:
    """Return the loss in the outputs of a module that was given labels; None if there is none."""
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if loss is None:
        loss = found[0] if isinstance(found, tuple) and found else found
    return loss if isinstance(loss, Tensor) and not loss.ndim else None


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """In this context, the module is in eval mode. Afterwards, its modes and buffers are as before."""
    were = {part: part.training for part in module.modules()}
    held = [(each, each.clone()) for each in module.buffers()]
    module.eval()
    try:
        yield
    finally:
        for part, was in were.items():
            part.training = was
        with torch.no_grad():
            for each, value in held:
                each.copy_(value)
