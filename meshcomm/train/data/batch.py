"""What a batch of the program is: inputs and targets, tensors or dictionaries, brought to the mesh's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from meshcomm.errors import ShapeError, TrainingError, UnsupportedOp
from meshcomm.models.assumptions import OWN_LOSS
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.tree import tensors_of, with_tensors, without_arrays
from meshcomm.train.data.corpus import IGNORED

# Inputs and targets, which may be trees, and, if given, the document number of each token; or a dictionary: see `named_of`.
UserBatch: TypeAlias = tuple[Any, ...] | Mapping[str, Any]

_PLAIN: Final = ("inputs", "targets", "documents")
OF_TRANSFORMERS: Final = ("input_ids", "labels", "attention_mask", "position_ids")


def placed(engine: Engine, batch: Any, whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents on the mesh's device. Floating-point tensors are cast to train.dtype.

    whose: a name such as "step 3", for errors. Raises TrainingError unless `batch` is inputs and targets, or a dictionary
    of them.
    """
    batch = without_arrays(batch)
    if isinstance(batch, Mapping):
        batch = _of_mapping(engine, batch, whose)
    parts = batch if isinstance(batch, (tuple, list)) else ()
    if len(parts) == 3 and parts[2] is None:
        parts = parts[:2]
    # A loss of one's own may need no targets.
    required = [part for place, part in enumerate(parts) if place != 1 or engine.model.own_loss is None]
    if len(parts) not in (2, 3) or not all(map(tensors_of, required)):
        kinds = ", ".join(type(part).__name__ for part in parts[:4])
        raise TrainingError(
            f"the data of {whose} are not inputs and targets",
            given=f"a {type(batch).__name__}" + (f" of {len(parts)}: {kinds}" if parts else ""),
            expected="two tensors or trees of tensors, each with this rank's samples along axis 0, and optionally a third that "
            f"numbers documents; or a dictionary with {', '.join(_PLAIN[:2])}, or with {', '.join(OF_TRANSFORMERS[:2])}",
            hint="a generator that yields (inputs, targets), or (inputs, None) for a loss of your own that needs no targets",
        )
    device, dtype = engine.mesh.device, engine.split.dtype
    # The engine rejects documents if the model's attention crosses document boundaries.

    def moved(x: Tensor) -> Tensor:
        placed_tensor = _tracked(x, whose).to(
            device, dtype if x.is_floating_point() else x.dtype, non_blocking=True
        )
        return placed_tensor.requires_grad_() if x.requires_grad else placed_tensor

    return tuple(with_tensors(moved, part) for part in parts)


def _of_mapping(engine: Engine, batch: Mapping[str, Any], whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents from a dictionary. See `named_of`.

    A loss of one's own may also take the outputs of a model that is called with the dictionary, if it has further names.
    Raises UnsupportedOp for masked tokens that a model's own loss would count.
    """
    mask = batch.get("attention_mask")
    if engine.model.counts_all_tokens and torch.is_tensor(mask) and bool((mask == 0).any()):
        raise UnsupportedOp(
            f"the routers' auxiliary loss would count the padding of {whose}",
            given="output_router_logits = true in config.json, and an attention_mask that masks tokens",
            expected="samples without padding: transformers leaves masked tokens out of this loss",
            hint="pack samples to equal lengths, or set output_router_logits = false",
        )
    others = {*batch} - {*OF_TRANSFORMERS}
    counts_in_loss = engine.model.own_loss is not None and not engine.model.counts_all_tokens
    if counts_in_loss and others and not others & {*_PLAIN}:
        return batch, None
    named = named_of(batch, whose)
    if engine.look_named is not None and "input_ids" in batch:
        look, engine.look_named = engine.look_named, None
        device = engine.mesh.device
        look({name: x.to(device) for name, x in batch.items()}, lambda tensors: named_of(tensors, whose))
    return named


def _tracked(x: Tensor, whose: str) -> Tensor:
    """Return a tensor that autograd can save and that is in no graph: a copy of one that was made in inference mode.

    Raises UnsupportedOp for a tensor through which gradients would flow to parameters outside of the model.
    """
    if not x.requires_grad:
        return x.clone() if x.is_inference() else x
    unvisited, seen = [x.grad_fn], set[Any]()
    while unvisited:
        node = unvisited.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        unvisited += [function for function, _ in node.next_functions]
        if isinstance(parameter := getattr(node, "variable", None), nn.Parameter):
            raise UnsupportedOp(
                f"the data of {whose} are computed from parameters that this step would not train",
                given=f"a tensor of shape {tuple(x.shape)} with gradients to a parameter of shape {tuple(parameter.shape)}",
                expected="data without gradients, or with gradients that a loss takes with torch.autograd.grad",
                hint="compute the data under torch.no_grad(), or x.detach(); or move the computation into the model's forward",
            )
    return x.detach()


def named_of(batch: Mapping[str, Any], whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents from a dictionary that uses these names or the names in
    transformers.

    In transformers, labels are not shifted relative to the tokens. Without labels, input_ids are the labels. attention_mask
    may mask tokens at the end, which are then not targets. A position_id of 0 starts a document.

    Raises TrainingError for unknown or missing names; UnsupportedOp for masked tokens before others.
    """
    known_names = OF_TRANSFORMERS if "input_ids" in batch else _PLAIN
    missing = [] if "input_ids" in batch else [name for name in _PLAIN[:2] if name not in batch]
    unknown = [str(name) for name in batch if name not in known_names]
    are = torch.is_tensor if "input_ids" in batch else tensors_of
    if missing or unknown or not all(map(are, batch.values())):
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in batch.items())
        raise TrainingError(
            f"the data of {whose} are not inputs and targets",
            given=f"a dictionary of {kinds or 'nothing'}",
            expected=f"tensors under {', '.join(known_names)}"
            if unknown
            else f"tensors: {', '.join(_PLAIN[:2])}, or {', '.join(OF_TRANSFORMERS[:2])}",
            hint=_way_out(batch, unknown) if unknown else "yield the loader's tensors under these names",
        )
    if known_names is _PLAIN:
        return tuple(batch[name] for name in _PLAIN if name in batch)
    shapes = {name: tuple(x.shape) for name, x in batch.items()}
    tokens: Tensor = batch["input_ids"]
    if tokens.ndim != 2 or len(set(shapes.values())) > 1:
        raise ShapeError(
            f"the data of {whose} do not fit together",
            given=", ".join(f"{name} {shape}" for name, shape in shapes.items()),
            expected="the same shape (samples, tokens) for all tensors",
            hint=f"for labels that are not tokens, train with the model's own loss: {OWN_LOSS}"
            if "labels" in batch
            else None,
        )
    labels, mask = batch.get("labels", tokens), batch.get("attention_mask")
    if mask is not None:
        if "labels" in batch and bool(((labels != IGNORED) & (mask == 0))[:, 1:].any()):
            raise TrainingError(
                f"labels of {whose} count in the padding",
                given="labels other than -100 where attention_mask is 0",
                expected="labels of -100 there: transformers' models would learn to predict the padding",
                hint="labels.masked_fill(attention_mask == 0, -100); or leave out labels, if they are the input_ids",
            )
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            inside = bool(((mask[:, 1:] > mask[:, :-1]) & (mask[:, :-1].cumsum(1) > 0)).any())
            raise UnsupportedOp(
                f"the attention_mask of {whose} masks tokens in the middle"
                if inside
                else f"the samples of {whose} are padded at the start",
                given=f"an attention_mask {tuple(mask.shape)} that masks tokens before others",
                expected="padding at the end, where no token attends to it",
                hint="remove these tokens; or keep them, with labels of -100 if they are not to be predicted"
                if inside
                else 'tokenizer.padding_side = "right"',
            )
        labels = labels.masked_fill(mask == 0, IGNORED)
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    begins = _begins(batch, mask, whose)
    if begins is None:
        return tokens, targets
    # The first token of a document is not predicted from the document before it.
    return tokens, targets.masked_fill(begins.roll(-1, 1), IGNORED), begins.cumsum(1) - 1


def _way_out(batch: Mapping[str, Any], unknown: Sequence[str]) -> str:
    """Return the hint for a dictionary with names of other models than causal language models."""
    if "num_items_in_batch" in unknown:
        return "leave out num_items_in_batch: a step's loss is the mean over all labels of the global batch"
    if not {"input_ids", "labels"} & {*batch}:
        return f"leave out {', '.join(unknown)}; or train with a loss of your own, for which such a dictionary is the model's named arguments"
    if "labels" in batch:
        return f"train with the model's own loss: {OWN_LOSS}"
    return "train with the model's own loss: loss=lambda outputs, targets: outputs.loss, for which a dictionary is the model's named arguments"


def _begins(batch: Mapping[str, Tensor], mask: Tensor | None, whose: str) -> Tensor | None:
    """Return where documents begin; None if each sample is a single document.

    Raises TrainingError if the positions in a document do not count up from 0.
    """
    positions = batch.get("position_ids")
    if positions is None:
        return None
    begins, places = positions == 0, torch.arange(positions.shape[1], device=positions.device)
    counted = places - places.where(begins, torch.zeros_like(places)).cummax(1).values
    counts = torch.ones_like(begins) if mask is None else mask != 0
    if not bool(begins[:, 0].all()) or bool(((positions != counted) & counts).any()):
        raise TrainingError(
            f"the position_ids of {whose} do not describe consecutive documents",
            given=f"position_ids {positions[0, :8].tolist()}, ...",
            expected="0, 1, 2, ... in each document, with 0 at its start",
            hint="omit position_ids if each sample is a single document",
        )
    begins = begins & counts
    return begins if bool(begins[:, 1:].any()) else None
