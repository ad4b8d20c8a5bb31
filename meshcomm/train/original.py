"""Compare a model that a ModelSpec takes apart with the module itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.errors import TrainingError
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.data import Sharded
from meshcomm.parallel.tensor import whole
from meshcomm.parallel.tensor.parameters import fused_sizes, joined
from meshcomm.train.checkpoint_reader import Kind
from meshcomm.train.export import pieces_of

# Of the largest output. Norms and routers of transformers round float64 to float32.
_ROOM, _ROOM_OF_TRANSFORMERS = 1e-9, 1e-5


@torch.no_grad()
def compare_forward(engine: Engine, inputs: Tensor, *, from_folder: bool) -> str:
    """Compare the outputs of the engine's model with those of the module it was made of, in eval mode.

    engine:      on one process, in float64, before its first step.
    inputs:      (samples, ...), of one micro-batch.
    from_folder: weights of [model] pretrained are those of its folder, which transformers reads by itself.
    Returns:     one sentence: how far they are apart, or why they could not be compared. "": the module itself runs.
    Raises:      TrainingError where they differ.
    """
    model = engine.model
    if not isinstance(model, SpecModel):
        return ""
    spec, name = model.spec, "transformers"
    if spec.original is not None:
        theirs = spec.original(
            None if from_folder and spec.weights is not None else _as_stored(engine, model)
        )
        room = _ROOM_OF_TRANSFORMERS
    else:
        theirs, room = spec.module(), _ROOM
        name = f"{type(theirs).__name__}.forward"
        if missing := _fill(theirs, _values(engine), spec.tied):
            return f"not compared with {name}: the ModelSpec has other parameters than {missing}"
    theirs.to(inputs.device).eval()
    try:
        expected = _first(theirs(inputs))
    except Exception as error:
        if spec.original is not None:
            raise TrainingError(
                "transformers itself cannot run the model",
                given=f"{type(error).__name__}: {error}",
                expected="a config.json and weights that AutoModelForCausalLM runs",
                hint="mend config.json",
            ) from error
        return f"not compared with {name}, which fails on the inputs alone: {type(error).__name__}: {error}"
    ours = _first(_outputs(engine, inputs))
    given = f"shape {tuple(ours.shape)}, and {tuple(expected.shape)} of {name}"
    if ours.shape == expected.shape:
        most = max(1.0, float(expected.abs().max()))
        off = float((ours.double() - expected.double()).abs().max())
        # Not "off > room": nan must not pass.
        if off <= room * most:
            return f"equal to {name} on one process (outputs differ by {off:.1e})"
        given = f"outputs off by {off:.2g}, where the largest of {name} is {most:.2g}"
    raise TrainingError(
        f"the model does not compute what {name} computes on one process",
        given=given,
        expected=f"equal outputs in float64, up to {room:g} of the largest",
        hint="ModelSpec.forward and attention do all that the module's own forward does around its blocks: multipliers, "
        "a scaled embedding, soft caps, masks; nothing of the weights has another dtype or place",
    )


def _outputs(engine: Engine, x: Tensor) -> Any:
    were = {part: part.training for part in engine.modules.modules()}
    engine.modules.eval()
    try:
        for module in engine.modules:
            x = module(x)
        return x
    finally:
        for part, was in were.items():
            part.training = was
        for gradients in engine.gradients:
            if isinstance(gradients, Sharded):
                gradients.reshard()


def _values(engine: Engine) -> dict[str, Tensor]:
    """The whole parameters as they were before the model was split, by name."""
    sizes: dict[str, tuple[int, ...]] = {}
    for module in engine.modules:
        sizes |= fused_sizes(module)
    found = {name: whole(parameter).detach() for name, parameter in engine.own_parameters()}
    return {name: joined(value, sizes[name]) if name in sizes else value for name, value in found.items()}


def _as_stored(engine: Engine, model: SpecModel) -> dict[str, Tensor]:
    """The tensors that a folder of these weights would have."""
    return {
        piece.name: piece.take(value)
        for name, value in _values(engine).items()
        for piece in pieces_of(model, name, Kind(value.dtype, tuple(value.shape)), None)
    }


def _fill(module: nn.Module, values: Mapping[str, Tensor], tied: tuple[str, str] | None) -> str:
    """Write the weights into an unsplit module, in float64. Returns the first of its parameters that has none, or ""."""
    same = {tied[1]: tied[0]} if tied else {}
    for name, parameter in module.named_parameters():
        value = values.get(same.get(name, name))
        if value is None or value.shape != parameter.shape:
            return name
        parameter.data = value
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.double()
    return ""


def _first(outputs: Any) -> Tensor:
    """The logits: of transformers' outputs, a mapping, a tuple, or themselves."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", next(iter(outputs.values())))
    while isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    assert isinstance(outputs, Tensor)
    return outputs
