"""Number of parameters of each part of a transformers model."""

from __future__ import annotations

from pathlib import Path

from meshcomm.config.pretrained import understood
from meshcomm.models.hf import Whole
from meshcomm.predict.estimate import Counts


def counts_of(folder: str | Path) -> Counts:
    """For the model that `folder`/config.json describes, counted without allocating memory. Raises ConfigError if there is none."""
    whole = Whole(understood(folder))
    layers, experts, ends = [0] * whole.config.num_hidden_layers, [0] * whole.config.num_hidden_layers, 0
    for name, parameter in whole.module.named_parameters():
        # The first number in a name is that of the block.
        place = next((int(each) for each in name.split(".") if each.isdecimal()), len(layers))
        if place >= len(layers):
            ends += parameter.numel()
        elif ".experts." in name:
            experts[place] += parameter.numel()
        else:
            layers[place] += parameter.numel()
    return Counts(tuple(layers), tuple(experts), ends)
