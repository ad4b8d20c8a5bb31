"""Compares a split model's step with a step on one process, and words the errors for the differences."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.models.assumptions import ROOM
from meshcomm.models.one_step import ROUNDING, STEPS, Outcome

# ROOM for weights and buffers after the last step.
_AFTER_ROOM: Final = 1e-7
# The same for a program that casts to shorter dtypes.
_NARROW_ROOM: Final = 1e-4
# Gradients smaller than this fraction of the largest gradient have relative rounding errors above ROOM.
_SMALL: Final = 1e-4


def difference_of(ours: Outcome, theirs: Outcome) -> str:
    """Return the first difference between what a rank and what one process computed, or "" if there is none."""
    room = _NARROW_ROOM if theirs.narrow else ROOM
    if (names := sorted(ours.results)) != (expected := sorted(theirs.results)):
        return f"results {listed(names)}, but {listed(expected)} in the unsplit model"
    for name in theirs.results:
        mine, other = ours.results[name], theirs.results[name]
        if not abs(mine - other) <= room * max(1.0, abs(other)):
            moved = moved_of(ours, theirs)
            also = f"; after {STEPS} steps, buffers differ: {listed(moved)}" if moved else ""
            return f"the {name} is {_apart(mine, other)} in the unsplit model{also}"
    most = max(
        (float(gradient.abs().max()) for gradient in theirs.gradients.values() if gradient.numel()),
        default=0.0,
    )
    for name, value in ours.gradients.items():
        if name not in theirs.gradients:
            if bool(value.any()):
                return f"{name} has a gradient, but none in the unsplit model"
        elif text := _off(f"the gradient of {name}", value, theirs.gradients[name], room, most):
            return text
    # An optimizer that divides by the gradient turns rounding errors of a tiny one into an update.
    room = max(room, _AFTER_ROOM)
    for name, value in ours.after.items():
        if name in theirs.after and (
            text := _off(f"{name} after {STEPS} steps", value, theirs.after[name], room)
        ):
            gradient = theirs.gradients.get(name)
            if gradient is not None and gradient.shape == value.shape:
                # Rounding errors of a gradient that is 0 may themselves be 0, on one process or on a rank.
                if 0 < float(gradient.abs().max()) <= ROUNDING * most:
                    continue
                both = (gradient == 0) & (ours.gradients.get(name, gradient) == 0)
                counts = both | (gradient.abs() > (1e-3 if theirs.narrow else _SMALL) * most)
                if not _off(name, value[counts], theirs.after[name][counts], room):
                    continue
            return text
    return ""


def _apart(mine: float, other: float) -> str:
    """Return both numbers, with as many digits as show that they differ."""
    for digits in (6, 9, 12):
        texts = f"{mine:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    else:
        texts = repr(mine), repr(other)
    return ", but ".join(texts)


def moved_of(ours: Outcome, theirs: Outcome) -> list[str]:
    """Return the names of the buffers that differ after the last step."""
    room = _NARROW_ROOM if theirs.narrow else _AFTER_ROOM
    held = [key for key in theirs.buffers if key in ours.after]
    return [key for key in held if _off("", ours.after[key], theirs.after[key], room)]


def _off(what: str, ours: Tensor, theirs: Tensor, room: float, largest: float = 0.0) -> str:
    """Return by how much tensors differ, or "" if they do not. largest: the largest element of all gradients."""
    if ours.shape != theirs.shape:
        return f"{what}: shape {tuple(ours.shape)}, but {tuple(theirs.shape)} in the unsplit model"
    if torch.equal(ours, theirs) or not ours.numel():
        return ""
    wide_ = torch.complex128 if theirs.is_complex() else torch.float64
    most = max(float(theirs.abs().max()), largest * _SMALL) or 1.0
    off = float((ours.to(wide_) - theirs.to(wide_)).abs().max())
    if off <= room * most:
        return ""
    return f"{what} off by {off:.2g} in a small float64 model, where the largest element is {most:.2g}"


# What helps if a buffer depends on the samples that a forward pass is given.
_STATISTICS: Final = (
    "sum a buffer's statistics in forward over the ranks along data and shard, with mesh.all_reduce, and set train.micro_batch_size "
    "to all samples of a rank"
)


def split_differs(name: str, setting: str, difference: str, alone: bool, moved: bool) -> TrainingError:
    """alone: whether the difference remains if one process runs the microbatches one by one. moved: whether buffers differ."""
    if not alone:
        return TrainingError(
            f"a step of {name} depends on how its samples are divided among microbatches and ranks",
            given=difference + "; it is the same if one process runs the microbatches one by one",
            expected="the mean over the global batch. The model and the loss are given one microbatch at a time",
            hint=(f"{_STATISTICS}; " if moved else "")
            + "return (sum, count) from the loss if samples count differently. Divide terms with different counts by the counts of the "
            "global batch, as scalars among the targets. A loss that compares samples with each other gathers them along data "
            "and shard. train.check = false trains with the mean over microbatches",
        )
    if setting in ("parallel.data", "train.micro_batch_size"):
        hint = (
            _STATISTICS
            if moved
            else "compute each sample from that sample only, in the model and in the loss; what a loss keeps between steps must be "
            "summed over the ranks along data and shard, with mesh.all_reduce, and change once per step: set train.micro_batch_size to "
            "all samples of a rank"
        )
        return TrainingError(
            f"a step of {name} on several ranks differs from a step on one process",
            given=difference,
            expected=f"results of the global batch, up to {ROOM:g} of the largest. With {setting}, the model sees a part of it",
            hint=f"{hint}. train.check = false trains with what each rank computes from its own samples",
        )
    hint = (
        "for a ModelSpec: add the missing parts to its forward, split, attention and so on, such as a multiplier, a soft cap, or "
        "positions of another stage"
    )
    if setting == "parallel.context":
        hint += (
            "; tensors whose axis 1 is as long as that of the first input are divided as sequences: give another shape to one that is "
            "none, like x.unsqueeze(1)"
        )
    return TrainingError(
        f"{name} computes different results with {setting}",
        given=difference,
        expected=f"the same results as in the unsplit model, up to {ROOM:g} of the largest",
        hint=f"remove {setting}; {hint}",
    )


def noise_differs(name: str, setting: str, difference: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"the random numbers that {name} draws depend on the mesh with {setting}",
        given=difference,
        expected="the numbers that one process draws for the same microbatches",
        hint=f"remove {setting}; or ModelSpec(dropped=...), which drops the same elements on every mesh",
    )
